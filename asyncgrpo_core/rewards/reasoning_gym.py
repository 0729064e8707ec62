"""Rows and rewards of reasoning-gym 0.1.25 tasks (procedurally made puzzles, each with its own scorer).

In a config:

    data: {train: "asyncgrpo_core.rewards:reasoning_gym_rows", train_args: {task: chain_sum, n: 1000, max_terms: 3}}
    rewards: ["asyncgrpo_core.rewards:reasoning_gym_reward"]

A scorer parses what the model wrote, often with sympy or eval-like parsers, so it runs in a verifier process with a
deadline per sample (verifiers.py).
"""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from asyncgrpo_core.errors import ConfigError, RewardError
from asyncgrpo_core.rewards.text import completion_text
from asyncgrpo_core.rewards.verifiers import run_checks, verifier_counts

logger = logging.getLogger(__name__)

INSTRUCTION = "Give the final answer between <answer> and </answer>."
_JOB = "asyncgrpo_core.rewards.reasoning_gym:score_entry"
_TUPLE, _ITEMS = "__tuple__", "__items__"


def reasoning_gym_rows(
    task: str, n: int, seed: int = 0, *, instruction: str | None = INSTRUCTION, **config: Any
) -> list[dict[str, Any]]:
    """`n` conversational rows of one task; the same for the same arguments.

    Args:
        task: a name of `reasoning_gym.factory.DATASETS`, for example "chain_sum".
        n: how many.
        seed: rows of one seed and task differ from those of another; held-out rows need another seed. Tasks with few
            different questions may repeat themselves across seeds.
        instruction: appended to the question, so that the answer can be found; None for none.
        config: fields of the task's config.

    Returns:
        Rows {"prompt": [user message], "task": name, "entry": JSON, "task_config": JSON}. `entry` is the whole
        reasoning-gym entry (question, answer, metadata); text, since the metadata of two tasks has no common schema.

    Raises:
        ConfigError: reasoning-gym is not installed, there is no such task, or its config refuses a value.
    """
    dataset = _dataset(task, {**config, "size": n, "seed": seed})
    rows = []
    for index in range(n):
        entry = dataset[index]
        text = entry["question"] if instruction is None else f"{entry['question']}\n\n{instruction}"
        rows.append(
            {
                "prompt": [{"role": "user", "content": text}],
                "task": task,
                "entry": json.dumps(_encode({key: entry[key] for key in ("question", "answer", "metadata")})),
                "task_config": json.dumps(_encode(config)),
            }
        )
    return rows


def reasoning_gym_reward(
    completions: list[list[dict[str, Any]]],
    task: Sequence[str | None],
    entry: Sequence[str | None],
    task_config: Sequence[str | None] | None = None,
    *,
    answer_tag: str | None = "answer",
    timeout_s: float | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """The score, 0 to 1, that the task's own scorer gives to the answer; see `reasoning_gym_rows` for the columns.

    The answer is looked for in the last assistant message, after the last </think> when there is one: the text of the
    last <answer>...</answer>. `answer_tag` names another tag; None takes the whole text. No such tag: 0.0.

    Returns:
        One value per completion; 0.0 also where the scorer fails on the answer or passes the deadline `timeout_s`
        (logged and counted, `verifier_counts`); None where the row has no `entry`.

    Raises:
        ConfigError: reasoning-gym is not installed.
        RewardError: a row's `entry` cannot be used (no such task, no JSON, a config that the task refuses).
    """
    _need_library()
    configs = [None] * len(entry) if task_config is None else task_config
    rewards: list[float | None] = []
    left: dict[int, list[str]] = {}  # index -> request
    for index, completion in enumerate(completions):
        text = entry[index]
        answer = _answer(completion_text(completion), answer_tag)
        rewards.append(None if text is None else 0.0)
        if text is not None and answer is not None:
            left[index] = [str(task[index]), configs[index] or "{}", text, answer]
    for index, outcome in zip(left, run_checks(_JOB, list(left.values()), timeout_s), strict=True):
        if outcome.stage is None and outcome.status == "error":
            raise RewardError(
                f"A row of the task {task[index]!r} cannot be scored: {outcome.why}.",
                "Make its rows with asyncgrpo_core.rewards.reasoning_gym_rows and this version of reasoning-gym.",
            )
        if outcome.status == "ok" and math.isfinite(outcome.value):
            rewards[index] = outcome.value
        else:
            why = outcome.why or f"the score is {outcome.value}"
            logger.warning("reasoning_gym_reward: an answer to %s could not be scored (%s): reward 0", task[index], why)
    return rewards


def _answer(text: str, tag: str | None) -> str | None:
    text = text.rpartition("</think>")[2]
    if tag is None:
        return text.strip()
    found = re.findall(f"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", text, re.DOTALL)
    return found[-1].strip() if found else None


# inside the verifier process


def load() -> None:
    """Import the library.

    Raises:
        ImportError: reasoning-gym is not installed.
    """
    import reasoning_gym  # noqa: F401


def score_entry(request: list[str], stage: Callable[[str], None]) -> float:
    """Score [task, config as JSON, entry as JSON, answer]. Stage "answer" once the row itself is known to be good."""
    task, config, entry, answer = request
    dataset = _cached_dataset(task, config)
    decoded = _decode(json.loads(entry))
    stage("answer")
    return float(dataset.score_answer(answer, decoded))


@functools.lru_cache(maxsize=64)
def _cached_dataset(task: str, config: str) -> Any:
    return _dataset(task, {**_decode(json.loads(config)), "size": 1, "seed": 0})


def _need_library() -> None:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ConfigError(
            "reasoning_gym rows and rewards need reasoning-gym, which is not installed.",
            'Install the extra "cpu" or "gpu" of this project, or pip install reasoning-gym==0.1.25.',
        )


def _dataset(task: str, config: dict[str, Any]) -> Any:
    _need_library()
    from reasoning_gym.factory import DATASETS, create_dataset

    if task not in DATASETS:
        near = sorted(name for name in DATASETS if task.split("_")[0] in name)
        raise ConfigError(
            f"reasoning-gym has no task {task!r}.",
            f"Choose one of {near or sorted(DATASETS)}; there are {len(DATASETS)} in reasoning_gym.factory.DATASETS.",
        )
    try:
        return create_dataset(task, **config)
    except (AssertionError, TypeError, ValueError) as error:
        fields = sorted(DATASETS[task][1].__dataclass_fields__)
        raise ConfigError(
            f"The reasoning-gym task {task!r} refuses {config}: {error}.", f"Its config has the fields {fields}."
        ) from error


def _encode(value: Any) -> Any:
    """JSON keeps neither tuples nor keys that are no strings, and scorers compare with both."""
    if isinstance(value, tuple):
        return {_TUPLE: [_encode(item) for item in value]}
    if isinstance(value, list):
        return [_encode(item) for item in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and value.keys() not in ({_TUPLE}, {_ITEMS}):
            return {key: _encode(item) for key, item in value.items()}
        return {_ITEMS: [[_encode(key), _encode(item)] for key, item in value.items()]}
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if isinstance(value, dict):
        if value.keys() == {_TUPLE}:
            return tuple(_decode(item) for item in value[_TUPLE])
        if value.keys() == {_ITEMS}:
            return {_decode(key): _decode(item) for key, item in value[_ITEMS]}
        return {key: _decode(item) for key, item in value.items()}
    return value


reasoning_gym_reward.counts = verifier_counts  # type: ignore[attr-defined]  # logged by the rollout loop
