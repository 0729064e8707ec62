"""Evaluates held-out prompts against the server, sampled like training samples (not greedy)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from asyncgrpo_core.rollout.context import request_seed
from asyncgrpo_core.rollout.prompts import check_prompt
from asyncgrpo_core.rollout.scoring import GroupScorer
from asyncgrpo_core.server.generation import GenerationClient, SamplingSettings
from asyncgrpo_core.types import RolloutGroup, Slot, TurnRecord

# Keeps held-out seeds apart from those of training rollouts, whose epochs count from 0.
_HELDOUT_EPOCH = -1
_SCORED_AT_ONCE = 64


@dataclass
class HeldoutResult:
    """Outcome of one evaluation.

    n: prompts that at least one reward function scored. mean_reward: mean summed reward over those, None when n is 0.
    records: one dict per prompt in row order: row, prompt, completion (text), reward (None when not scored), rewards
    (by function), completion_tokens, finish_reason, and the row's other columns.
    """

    n: int
    mean_reward: float | None
    records: list[dict[str, Any]] = field(default_factory=list)


def evaluate_heldout(
    *,
    base_url: str,
    model_name: str,
    tokenizer: Any,
    rows: Sequence[dict[str, Any]],
    reward_funcs: Sequence[Callable[..., Any]],
    sampling: SamplingSettings,
    seed: int,
    max_in_flight: int = 64,
    chat_template_kwargs: dict[str, Any] | None = None,
    use_token_route: bool | None = None,
    timeout_s: float = 1800.0,
    cache_salt: str | None = None,
    api_key: str | None = None,
) -> HeldoutResult:
    """Sample one completion per row and score it.

    Args:
        sampling: pass the training run's temperature; `num_logprobs` 0 is enough.
        seed: two calls with one seed sample alike from one policy.
        max_in_flight: requests at once.
        use_token_route: None asks the server.
        timeout_s: deadline of one request attempt.
        cache_salt: give one when the server's weights changed since these prompts were last sent to it.

    Raises:
        ServerError, RequestRejectedError: a request failed for good.
        RewardError: a reward function broke its contract.
        DataError: a row's prompt is not conversational.
    """
    return asyncio.run(
        _evaluate(
            list(rows),
            GenerationClient(
                base_url,
                model_name,
                use_token_route=bool(use_token_route),
                timeout_s=timeout_s,
                max_connections=max_in_flight,
                api_key=api_key,
            ),
            ask_route=use_token_route is None,
            tokenizer=tokenizer,
            reward_funcs=reward_funcs,
            sampling=sampling,
            seed=seed,
            cache_salt=cache_salt,
            template_kwargs=chat_template_kwargs or {},
        )
    )


async def _evaluate(
    rows: list[dict[str, Any]],
    client: GenerationClient,
    *,
    ask_route: bool,
    tokenizer: Any,
    reward_funcs: Sequence[Callable[..., Any]],
    sampling: SamplingSettings,
    seed: int,
    cache_salt: str | None,
    template_kwargs: dict[str, Any],
) -> HeldoutResult:
    limit = asyncio.Semaphore(client.max_connections)

    async def sample(index: int) -> TurnRecord:
        check_prompt(rows[index]["prompt"], index)
        ids = tokenizer.apply_chat_template(
            rows[index]["prompt"], add_generation_prompt=True, tokenize=True, return_dict=False, **template_kwargs
        )
        async with limit:
            return await client.generate(
                list(ids), sampling, request_seed(seed, Slot(_HELDOUT_EPOCH, index, index), 0, 0, 0), cache_salt
            )

    scorer = GroupScorer(reward_funcs)
    async with client:
        try:
            if ask_route:
                client.use_token_route = (await client.facts()).token_route
            turns = await _all(sample, len(rows))
            records: list[dict[str, Any]] = []
            for start in range(0, len(rows), _SCORED_AT_ONCE):
                part = slice(start, start + _SCORED_AT_ONCE)
                records += await _score(scorer, tokenizer, rows[part], turns[part], start)
        finally:
            scorer.close()
    scored = [record["reward"] for record in records if record["reward"] is not None]
    return HeldoutResult(len(scored), float(np.mean(scored)) if scored else None, records)


async def _all(sample: Callable[[int], Any], count: int) -> list[TurnRecord]:
    tasks = [asyncio.ensure_future(sample(index)) for index in range(count)]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _score(
    scorer: GroupScorer, tokenizer: Any, rows: list[dict[str, Any]], turns: list[TurnRecord], start: int
) -> list[dict[str, Any]]:
    """Score some rows in one call; a column that a row lacks is None there."""
    texts = [tokenizer.decode(turn.output_ids, skip_special_tokens=True) for turn in turns]
    columns = sorted({name for row in rows for name in row if name != "prompt"})
    n = len(rows)
    group = RolloutGroup(
        prompts=[row["prompt"] for row in rows],
        reward_kwargs={name: [row.get(name) for row in rows] for name in columns},
        completions=[[{"role": "assistant", "content": text}] for text in texts],
        completions_ids=[turn.output_ids for turn in turns],
        completions_sequences=[[] for _ in rows],
        tool_call_counts=[0] * n,
        tool_failure_counts=[0] * n,
        model_version=0,
        group_id=-1,
        row_index=start,
        env_rewards=[None] * n,
        rollout_rewards=[None] * n,
    )
    scores = await scorer.score(group)
    return [
        {
            **{name: value for name, value in rows[i].items() if name != "prompt"},
            "row": start + i,
            "prompt": rows[i]["prompt"],
            "completion": texts[i],
            "reward": _number(scores.total[i]),
            "rewards": {name: _number(column[i]) for name, column in scores.by_source.items()},
            "completion_tokens": len(turns[i].output_ids),
            "finish_reason": turns[i].finish_reason,
        }
        for i in range(n)
    ]


def _number(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
