"""Rewards for a right mathematical answer, by math-verify 0.9 in killable processes (verifiers.py)."""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Sequence
from typing import Any

from asyncgrpo_core.errors import ConfigError
from asyncgrpo_core.rewards.text import completion_text
from asyncgrpo_core.rewards.verifiers import Outcome, run_checks, verifier_counts

logger = logging.getLogger(__name__)

_JOB = "asyncgrpo_core.rewards.math_check:check"
# Strings for which equality settles it: math-verify parses them alike on both sides (tests compare the two).
_NUMBER = re.compile(r"-?(0|[1-9]\d{0,14})(\.\d{1,9})?|-?\\frac\{[1-9]\d{0,8}\}\{[1-9]\d{0,8}\}")
_BOXED = re.compile(r"\\boxed\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}")


def accuracy_reward(
    completions: list[list[dict[str, str]]], solution: list[str], *, timeout_s: float | None = None, **kwargs: Any
) -> list[float | None]:
    """1.0 where the completion's mathematical answer equals `solution` (math-verify), else 0.0.

    The answer must be LaTeX: \\boxed{...} first, else an expression that the text introduces as the answer.

    Args:
        completions: conversational completions; the last assistant message is looked at.
        solution: the dataset column of that name: the right answer as text or LaTeX; None where a row has none.
        timeout_s: deadline of one completion's check, in seconds; None: `verifier_settings.timeout_s` (5). Set it with
            `functools.partial(accuracy_reward, timeout_s=10)`.

    Returns:
        One value per completion. An answer that cannot be checked in time, or whose check fails, gets 0.0; None stands
        where nothing can be said: no answer can be parsed from `solution`, or not in time. Each such case is logged,
        with its reason, and counted (`verifier_counts`).

    Raises:
        ConfigError: math-verify is not installed.
    """
    return _check([completion_text(completion) for completion in completions], solution, timeout_s)


def reasoning_accuracy_reward(
    completions: list[list[dict[str, str]]],
    solution: list[str],
    reasoning_delimiters: list[str] | None = None,
    *,
    timeout_s: float | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """`accuracy_reward` on the text after the reasoning.

    Args:
        completions: conversational completions.
        solution: the right answers.
        reasoning_delimiters: strings that end the reasoning, tried in order; default ["</think>"].
        timeout_s: as for `accuracy_reward`.

    Returns:
        One value per completion; 0.0 where no delimiter is found, None where `solution` cannot be parsed.
    """
    delimiters = ["</think>"] if reasoning_delimiters is None else reasoning_delimiters
    contents: list[str | None] = []
    for completion in completions:
        content = completion_text(completion)
        found = next((delimiter for delimiter in delimiters if delimiter in content), None)
        contents.append(None if found is None else content.split(found)[-1])
    return _check(contents, solution, timeout_s)


def _check(
    contents: Sequence[str | None], solutions: Sequence[str | None], timeout_s: float | None
) -> list[float | None]:
    """One reward per pair; a content of None gets 0.0, a solution of None gets None."""
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError("accuracy_reward needs math-verify, which is not installed.", "pip install math-verify.")
    pairs = [
        (content, None if solution is None else str(solution))
        for content, solution in zip(contents, solutions, strict=True)
    ]
    rewards: dict[tuple[str | None, str | None], float | None] = {}
    left: list[tuple[str, str]] = []  # each pair once: completions of a group are often alike
    for content, solution in dict.fromkeys(pairs):
        if solution is None or content is None:
            rewards[content, solution] = None if solution is None else 0.0
        elif _same_number(content, solution):
            rewards[content, solution] = 1.0
        else:
            left.append((content, solution))
    if left:
        for pair, outcome in zip(left, run_checks(_JOB, left, timeout_s), strict=True):
            rewards[pair] = outcome.value if outcome.status == "ok" else _unchecked(*pair, outcome)
    return [rewards[pair] for pair in pairs]


def _same_number(content: str, solution: str) -> bool:
    """Whether the only boxed answer is, character by character, the solution, and that is a plain number."""
    solution = solution.strip()
    if not _NUMBER.fullmatch(solution) or content.count("boxed") != 1:
        return False
    boxed = _BOXED.search(content)
    return boxed is not None and boxed.group(1).strip() == solution


def _unchecked(content: str, solution: str, outcome: Outcome) -> float | None:
    if outcome.stage is None:
        logger.warning(
            "accuracy_reward: the solution %s itself cannot be parsed (%s): not scored",
            _short(solution),
            outcome.why,
        )
        return None
    logger.warning(
        "accuracy_reward: %s could not be checked against %s (%s): reward 0",
        _short(content, end=True),
        _short(solution),
        outcome.why,
    )
    return 0.0


def _short(text: str, end: bool = False) -> str:
    if len(text) <= 100:
        return repr(text)
    return "..." + repr(text[-100:]) if end else repr(text[:100]) + "..."


# read once per second by the rollout loop, which logs what is new
accuracy_reward.counts = reasoning_accuracy_reward.counts = verifier_counts  # type: ignore[attr-defined]
