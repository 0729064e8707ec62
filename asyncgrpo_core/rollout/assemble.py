"""Finished rollouts -> a group for the reward functions -> the record for the trainer."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from asyncgrpo_core.errors import RolloutError
from asyncgrpo_core.metrics import MetricEvent
from asyncgrpo_core.rollout.advantages import group_outcome, group_std
from asyncgrpo_core.rollout.group_metrics import reward_events
from asyncgrpo_core.rollout.one_rollout import FinishedRollout
from asyncgrpo_core.rollout.scoring import GroupScores
from asyncgrpo_core.types import GroupRecord, RolloutGroup, Slot, TrainingSample


@dataclass
class FinishedGroup:
    """A group on its way through the score queue; `events` are the metrics known so far."""

    slot: Slot
    generation: int
    group: RolloutGroup
    rollouts: list[FinishedRollout]
    events: list[MetricEvent] = field(default_factory=list)

    @property
    def forwarded_tokens(self) -> int:
        return sum(seq.num_tokens for r in self.rollouts for seq in r.reconciled.sequences)


def make_group(
    row: dict[str, Any], rollouts: list[FinishedRollout], model_version: int, group_id: int, row_index: int
) -> RolloutGroup:
    """The RolloutGroup that reward functions and `compute_advantages` see."""
    n = len(rollouts)
    return RolloutGroup(
        prompts=[r.prompt for r in rollouts],
        reward_kwargs={name: [value] * n for name, value in row.items() if name != "prompt"},
        completions=[r.rollout.completion for r in rollouts],
        completions_ids=[r.rollout.completion_ids for r in rollouts],
        completions_sequences=[r.reconciled.sequences for r in rollouts],
        tool_call_counts=[r.rollout.tool_call_count for r in rollouts],
        tool_failure_counts=[r.rollout.tool_failure_count for r in rollouts],
        model_version=model_version,
        group_id=group_id,
        row_index=row_index,
        env_rewards=[r.env_reward for r in rollouts],
        rollout_rewards=[r.rollout.reward for r in rollouts],
    )


def ended_record(finished: FinishedGroup, scores: GroupScores, advantages: np.ndarray) -> GroupRecord:
    """The record of a scored group. Dropped groups ("zero_std", "no_reward") carry metrics and no samples.

    A rollout that no source scored keeps its samples, with reward NaN and (by default) advantage 0.

    Raises:
        RolloutError: `advantages` is not one finite number per rollout.
    """
    outcome = group_outcome(scores.total)
    advantages = _check_advantages(advantages, len(scores.total))
    scored = scores.total[~np.isnan(scores.total)]
    record = GroupRecord(
        outcome=outcome,
        slot=finished.slot,
        generation=finished.generation,
        group_id=finished.group.group_id,
        model_version=finished.group.model_version,
        reward=float(scored.mean()) if len(scored) else None,
        metrics=finished.events + reward_events(scores, outcome),
    )
    if outcome != "scored":
        return record
    record.samples = _samples(finished, scores, advantages)
    if not record.samples:
        # rewards differ and yet there is nothing to train on (every output empty or masked): no gradient either
        record.outcome = "zero_std"
        record.error = "no rollout of the group has a token to train on"
    return record


def _samples(finished: FinishedGroup, scores: GroupScores, advantages: np.ndarray) -> list[TrainingSample]:
    group = finished.group
    std = group_std(scores.total)
    func_stds = {name: group_std(column) for name, column in scores.by_source.items() if not np.isnan(column).all()}
    now = time.time()
    return [
        TrainingSample(
            sequence=sequence,
            advantage=float(advantages[index]),
            reward=float(scores.total[index]),
            group_reward_std=std,
            slot=finished.slot,
            generation=finished.generation,
            group_id=group.group_id,
            model_version=group.model_version,
            rollout_id=finished.rollouts[index].rollout.rollout_id,
            func_group_stds=func_stds,
            queued_at=now,
        )
        for index, sequences in enumerate(group.completions_sequences)
        for sequence in sequences
    ]


def _check_advantages(advantages: Any, expected: int) -> np.ndarray:
    values = np.asarray(advantages, dtype=np.float64)
    if values.shape != (expected,) or not np.isfinite(values).all():
        raise RolloutError(
            f"compute_advantages returned {values.tolist()} for a group of {expected} rollouts.",
            f"Return an array of {expected} finite numbers.",
        )
    return values
