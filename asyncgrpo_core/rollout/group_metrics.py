"""The metrics that are known when a group ends, as events (reference, 'Logged metrics'; see metrics.MetricEvent)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from asyncgrpo_core.metrics import MetricEvent
from asyncgrpo_core.rollout.one_rollout import FinishedRollout
from asyncgrpo_core.rollout.scoring import GroupScores
from asyncgrpo_core.rollout.tools import CallOutcome
from asyncgrpo_core.types import Rollout

# Trained tokens per sample as generated; training divides its own mean by it (sample/length_bias).
GENERATED_SAMPLE_TOKENS = "sample/generated_tokens_mean"


def _mean(name: str, values: Iterable[float]) -> MetricEvent:
    values = list(values)
    return (name, "mean", float(sum(values)), float(len(values)))


def generation_events(finished: Sequence[FinishedRollout], eos_ids: frozenset[int]) -> list[MetricEvent]:
    """Metrics of how a group was generated, dropped or not: completions/*, rollout/* and what length_bias needs.

    Lengths count generated tokens of all turns of a rollout, no tool results. A rollout is terminated when its last
    turn ends with an EOS token.
    """
    rollouts, reconciled = [f.rollout for f in finished], [f.reconciled for f in finished]
    lengths = [sum(len(turn.output_ids) for turn in r.turns) for r in rollouts]
    ended = [_ends_with_eos(r, eos_ids) for r in rollouts]
    terminated = [n for n, done in zip(lengths, ended, strict=True) if done]
    events: list[MetricEvent] = [
        _mean("completions/mean_length", lengths),
        ("completions/min_length", "min", min(lengths), 0.0),
        ("completions/max_length", "max", max(lengths), 0.0),
        _mean("completions/clipped_ratio", [not done for done in ended]),
        _mean("completions/duplicate_frac", duplicates(rollouts)),
        _mean("rollout/duration_s", [f.duration_s for f in finished]),
        _mean("rollout/turns_mean", [len(r.turns) for r in rollouts]),
        ("rollout/turns_max", "max", max(len(r.turns) for r in rollouts), 0.0),
        _mean("rollout/samples_per_rollout", [len(r.sequences) for r in reconciled]),
    ]
    if samples := [sequence.num_trained for r in reconciled for sequence in r.sequences]:
        events.append(_mean(GENERATED_SAMPLE_TOKENS, samples))
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


def agent_events(finished: Sequence[FinishedRollout], *, tools: bool) -> list[MetricEvent]:
    """tools/* (with `tools`, or when a custom generator reports calls) and env/* of a group (reference, same names).

    Beyond the reference, failed calls by their cause: the policy's (unknown_name, malformed, bad_arguments) and the
    tool's (raised, timeout).
    """
    events = _environment_events(finished)
    rollouts = [f.rollout for f in finished]
    if not tools and not any(r.tool_call_count for r in rollouts):
        return events
    num_calls = sum(r.tool_call_count for r in rollouts)
    failures = sum(r.tool_failure_count for r in rollouts)
    contexts = [f.context for f in finished]
    events += [
        _mean("tools/call_frequency", [r.tool_call_count for r in rollouts]),
        ("tools/failure_frequency", "mean", float(failures), float(num_calls)),  # no call at all: NaN
        _mean("tools/loop_exhausted_frac", [c.exhausted for c in contexts]),
    ]
    if any(c.context_full for c in contexts):
        events.append(_mean("rollout/context_full_frac", [c.context_full for c in contexts]))
    if per_message := [n for c in contexts for n in c.calls_per_message]:
        events.append(_mean("tools/parallel_calls_mean", per_message))
    for call in (call for c in contexts for call in c.calls):
        events += _call_events(call)
    return events


def _call_events(call: CallOutcome) -> list[MetricEvent]:
    if call.kind == "unknown":
        return [("tools/unknown_name_count", "count", 1.0, 0.0)]
    if call.kind == "malformed":
        return [("tools/malformed_count", "count", 1.0, 0.0)]
    events: list[MetricEvent] = [
        (f"tools/{call.name}/call_count", "count", 1.0, 0.0),
        (f"tools/{call.name}/failure_count", "count", float(call.failed), 0.0),
    ]
    if call.failed:
        events.append((f"tools/{call.kind}_count", "count", 1.0, 0.0))
    if call.kind != "bad_arguments":
        events += [
            ("tools/latency_s", "mean", call.seconds, 1.0),
            (f"tools/{call.name}/latency_s", "mean", call.seconds, 1.0),
        ]
    return events


def _environment_events(finished: Sequence[FinishedRollout]) -> list[MetricEvent]:
    resets = [f.reset_s for f in finished if f.reset_s is not None]
    rewards = [f.reward_s for f in finished if f.reward_s is not None]
    events = []
    if resets:
        events.append(_mean("env/reset_s", resets))
    if rewards:
        events.append(_mean("env/reward_s", rewards))
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
