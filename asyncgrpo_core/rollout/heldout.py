"""Evaluates held-out prompts with the run's own loop: same hooks, tools and environments, sampled, not greedy."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from asyncgrpo_core.rollout.adapter_uses import AdapterUses
from asyncgrpo_core.rollout.assemble import make_group
from asyncgrpo_core.rollout.context import FirstPrompt, RolloutContext
from asyncgrpo_core.rollout.environments import EnvironmentFailedError
from asyncgrpo_core.rollout.loop import AsyncRolloutLoop
from asyncgrpo_core.rollout.one_rollout import FinishedRollout, run_rollout
from asyncgrpo_core.rollout.outbox import MetricOutbox
from asyncgrpo_core.rollout.prompts import check_no_images, check_prompt
from asyncgrpo_core.rollout.scoring import GroupScorer
from asyncgrpo_core.types import Slot

logger = logging.getLogger(__name__)

# Keeps held-out seeds apart from those of training rollouts, whose epochs count from 0.
_HELDOUT_EPOCH = -1
_SCORED_AT_ONCE = 64


@dataclass
class HeldoutResult:
    """Outcome of one evaluation.

    n: prompts that at least one source scored. mean_reward: mean summed reward over those, None when n is 0.
    records: one dict per prompt in row order: row, prompt, completion (the last message's text), messages (all that
    was generated, tool results included), reward (None when not scored), rewards (by source), completion_tokens,
    tool_calls, tool_failures, finish_reason (of the last turn), and the row's other columns. A rollout whose
    environment failed has an "error" instead of a completion.
    """

    n: int
    mean_reward: float | None
    records: list[dict[str, Any]] = field(default_factory=list)


def evaluate_heldout(
    *,
    config: Any,
    model_name: str,
    processing_class: Any,
    eos_token_ids: Sequence[int],
    rows: Sequence[dict[str, Any]],
    reward_funcs: Sequence[Callable[..., Any]],
    seed: int,
    max_in_flight: int = 64,
    loop_cls: type[AsyncRolloutLoop] = AsyncRolloutLoop,
    tools: list[Callable[..., Any]] | None = None,
    environment_factory: Any | None = None,
    run_settings: dict[str, Any] | None = None,
    server_versions: Sequence[int] | None = None,
    lora_name: str | None = None,
    model_version: int = 0,
) -> HeldoutResult:
    """Sample one rollout per row and score it.

    Args:
        config: the run's AsyncGRPOConfig: server, sampling settings, tool limits.
        seed: two calls with one seed sample alike from one policy.
        max_in_flight: rollouts at once.
        loop_cls, tools, environment_factory, run_settings: as the rollout worker gets them.
        lora_name, model_version: the adapter version that is evaluated, where only an adapter is synced.

    Raises:
        ServerError, RequestRejectedError: a request failed for good.
        RewardError: a reward function broke its contract.
        DataError: a row's prompt is not conversational.
        ConfigError: the tools or environments cannot be used.
    """
    loop = loop_cls(
        config,
        model_name,
        rows,
        list(reward_funcs),
        processing_class,
        list(eos_token_ids),
        None,
        SimpleNamespace(value=0),
        SimpleNamespace(value=0),
        SimpleNamespace(value=0.0),
        None,
        None,
        MetricOutbox(),
        tools=tools,
        environment_factory=environment_factory,
        lora_name=lora_name,
        run_settings=run_settings,
    )
    if lora_name is not None:
        loop.adapters = AdapterUses.of_one_version(lora_name, model_version)
    loop.seed = seed
    loop.server_versions = server_versions
    loop.sampling = replace(loop.sampling, num_logprobs=0)  # nothing is trained on
    return asyncio.run(_evaluate(loop, list(rows), max_in_flight))


async def _evaluate(loop: AsyncRolloutLoop, rows: list[dict[str, Any]], max_in_flight: int) -> HeldoutResult:
    limit = asyncio.Semaphore(max_in_flight)

    async def sample(index: int) -> FinishedRollout | EnvironmentFailedError:
        if loop.environments is None or rows[index].get("prompt") is not None:
            check_prompt(rows[index].get("prompt"), f"held-out row {index}")
        check_no_images(rows[index], f"held-out row {index}")
        slot = Slot(_HELDOUT_EPOCH, index, index)
        async with limit:
            context = RolloutContext(slot, 0, 0, FirstPrompt(), index, rows[index])
            try:
                context.adapter_version = loop.adapters.newest if loop.adapters is not None else None
                return await run_rollout(loop, context, 0, want_top=False)
            except EnvironmentFailedError as error:
                logger.error("held-out row %d has no result: %s", index, error)
                return error

    scorer = GroupScorer(loop.reward_funcs, timeout_s=loop.config.reward_timeout)
    try:
        await loop.connect()
        await loop.prepare()
        finished = await _all(sample, len(rows))
        records: list[dict[str, Any]] = []
        for start in range(0, len(rows), _SCORED_AT_ONCE):
            part = slice(start, start + _SCORED_AT_ONCE)
            records += await _score(scorer, rows[part], finished[part], start)
    finally:
        scorer.close()
        await loop.release()
    scored = [record["reward"] for record in records if record["reward"] is not None]
    return HeldoutResult(len(scored), float(np.mean(scored)) if scored else None, records)


async def _all(sample: Callable[[int], Any], count: int) -> list[FinishedRollout | EnvironmentFailedError]:
    tasks = [asyncio.ensure_future(sample(index)) for index in range(count)]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _score(
    scorer: GroupScorer,
    rows: list[dict[str, Any]],
    finished: list[FinishedRollout | EnvironmentFailedError],
    start: int,
) -> list[dict[str, Any]]:
    """Score some rows in one call; a column that a row lacks is None there."""
    done = [(i, rollout) for i, rollout in enumerate(finished) if isinstance(rollout, FinishedRollout)]
    records = [{**_columns(row), "row": start + i, "prompt": row.get("prompt")} for i, row in enumerate(rows)]
    for i, outcome in enumerate(finished):
        if isinstance(outcome, EnvironmentFailedError):
            records[i] |= {"completion": None, "reward": None, "rewards": {}, "error": str(outcome)}
    if not done:
        return records
    group = make_group({}, [rollout for _, rollout in done], 0, -1, start)
    names = sorted({name for row in rows for name in _columns(row)})
    group.reward_kwargs = {name: [rows[i].get(name) for i, _ in done] for name in names}
    scores = await scorer.score(group)
    for place, (i, result) in enumerate(done):
        rollout = result.rollout
        records[i] |= {
            "prompt": result.prompt,
            "completion": _text(rollout.completion),
            "messages": rollout.completion,
            "reward": _number(scores.total[place]),
            "rewards": {name: _number(column[place]) for name, column in scores.by_source.items()},
            "completion_tokens": sum(len(turn.output_ids) for turn in rollout.turns),
            "tool_calls": rollout.tool_call_count,
            "tool_failures": rollout.tool_failure_count,
            "finish_reason": rollout.turns[-1].finish_reason if rollout.turns else None,
        }
    return records


def _columns(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "prompt"}


def _text(completion: list[dict[str, Any]]) -> str:
    content = completion[-1].get("content") if completion else None
    return content if isinstance(content, str) else ""


def _number(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
