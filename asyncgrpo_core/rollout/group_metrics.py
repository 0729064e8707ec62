"""The metrics that are known when a group ends, as events (reference, 'Logged metrics'; see metrics.MetricEvent)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from asyncgrpo_core.metrics import MetricEvent
from asyncgrpo_core.rollout.reconcile import Reconciled
from asyncgrpo_core.rollout.scoring import GroupScores
from asyncgrpo_core.types import Rollout


def _mean(name: str, values: Iterable[float]) -> MetricEvent:
    values = list(values)
    return (name, "mean", float(sum(values)), float(len(values)))


def generation_events(
    rollouts: list[Rollout], reconciled: list[Reconciled], durations_s: list[float], eos_ids: frozenset[int]
) -> list[MetricEvent]:
    """Metrics of how a group was generated, dropped or not: completions/* and rollout/*.

    Lengths count generated tokens of all turns of a rollout, no tool results. A rollout is terminated when its last
    turn ends with an EOS token.
    """
    lengths = [sum(len(turn.output_ids) for turn in r.turns) for r in rollouts]
    ended = [_ends_with_eos(r, eos_ids) for r in rollouts]
    terminated = [n for n, done in zip(lengths, ended, strict=True) if done]
    events: list[MetricEvent] = [
        _mean("completions/mean_length", lengths),
        ("completions/min_length", "min", min(lengths), 0.0),
        ("completions/max_length", "max", max(lengths), 0.0),
        _mean("completions/clipped_ratio", [not done for done in ended]),
        _mean("completions/duplicate_frac", duplicates(rollouts)),
        _mean("rollout/duration_s", durations_s),
        _mean("rollout/turns_mean", [len(r.turns) for r in rollouts]),
        ("rollout/turns_max", "max", max(len(r.turns) for r in rollouts), 0.0),
        _mean("rollout/samples_per_rollout", [len(r.sequences) for r in reconciled]),
    ]
    if terminated:
        events += [
            _mean("completions/mean_terminated_length", terminated),
            ("completions/min_terminated_length", "min", min(terminated), 0.0),
            ("completions/max_terminated_length", "max", max(terminated), 0.0),
        ]
    transitions = sum(r.transitions for r in reconciled)
    if transitions:
        drift = [tokens for r in reconciled for tokens in r.drift_tokens]
        events += [
            ("rollout/fork_frac", "mean", float(sum(r.forks for r in reconciled)), float(transitions)),
            _mean("rollout/drift_tokens_mean", drift),
            ("rollout/drift_tokens_max", "max", max(drift), 0.0),
        ]
    return events


def reward_events(scores: GroupScores, outcome: str) -> list[MetricEvent]:
    """Metrics of a group's rewards: reward, reward_dropped, frac_reward_zero_std, rewards/{source}/mean."""
    scored = scores.total[~np.isnan(scores.total)]
    dropped = outcome != "scored"
    events: list[MetricEvent] = [("frac_reward_zero_std", "mean", float(dropped), 1.0)]
    if len(scored):
        events.append(("reward", "mean", float(scored.sum()), float(len(scored))))
        if dropped:
            events.append(("reward_dropped", "mean", float(scored.mean()), 1.0))
    for name, column in scores.by_source.items():
        values = column[~np.isnan(column)]
        if len(values):
            events.append((f"rewards/{name}/mean", "mean", float(values.sum()), float(len(values))))
    return events


def duplicates(rollouts: list[Rollout]) -> list[bool]:
    """For each rollout, whether an earlier one of the group has the same output tokens in all of its turns."""
    seen: set[tuple[tuple[int, ...], ...]] = set()
    out = []
    for rollout in rollouts:
        key = tuple(tuple(turn.output_ids) for turn in rollout.turns)
        out.append(key in seen)
        seen.add(key)
    return out


def _ends_with_eos(rollout: Rollout, eos_ids: frozenset[int]) -> bool:
    last = rollout.turns[-1].output_ids if rollout.turns else []
    return bool(last) and last[-1] in eos_ids
