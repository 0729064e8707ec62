"""Metrics of a group, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asyncgrpo_core.metrics import MetricWindow
from asyncgrpo_core.rollout.context import FirstPrompt, RolloutContext
from asyncgrpo_core.rollout.group_metrics import duplicates, generation_events, reward_events
from asyncgrpo_core.rollout.one_rollout import FinishedRollout
from asyncgrpo_core.rollout.outbox import MetricOutbox
from asyncgrpo_core.rollout.reconcile import reconcile
from asyncgrpo_core.rollout.scoring import GroupScores
from asyncgrpo_core.types import Rollout, Slot, TurnRecord

EOS = 2
NAN = float("nan")


def rollout(*outputs: list[int], prompts: list[list[int]] | None = None) -> Rollout:
    prompts = prompts or [[1]] * len(outputs)
    turns = [TurnRecord(p, o, [-1.0] * len(o)) for p, o in zip(prompts, outputs, strict=True)]
    return Rollout([], [t for o in outputs for t in o], turns)


def finished(rollout: Rollout, **more: Any) -> FinishedRollout:
    context = RolloutContext(Slot(0, 0, 0), 0, 0, FirstPrompt())
    values = {"duration_s": 2.0, "prompt": [], "context": context, **more}
    return FinishedRollout(rollout, reconcile(rollout.turns, 0, want_top=False), **values)


def generated(rollouts: list[Rollout]) -> dict[str, float]:
    window = MetricWindow()
    window.extend(generation_events([finished(r) for r in rollouts], frozenset({EOS})))
    return window.reduce()


def scored(*columns: tuple[str, list[float], str]) -> dict[str, float]:
    window = MetricWindow()
    for name, values, outcome in columns:
        column = np.array(values)
        window.extend(reward_events(GroupScores({name: column}, column), outcome))
    return window.reduce()


def test_lengths_and_truncation() -> None:
    """F041, F042, F043: lengths 3, 2, 4, 1; the third and fourth do not end with EOS."""
    got = generated([rollout([5, 5, EOS]), rollout([5, EOS]), rollout([5, 5, 5, 5]), rollout([5])])
    assert got["completions/mean_length"] == 2.5
    assert (got["completions/min_length"], got["completions/max_length"]) == (1, 4)
    assert got["completions/clipped_ratio"] == 0.5
    assert got["completions/mean_terminated_length"] == 2.5
    assert (got["completions/min_terminated_length"], got["completions/max_terminated_length"]) == (2, 3)
    assert got["rollout/duration_s"] == 2.0


def test_nothing_terminated_leaves_the_terminated_lengths_out() -> None:
    """F042."""
    got = generated([rollout([5]), rollout([6])])
    assert got["completions/clipped_ratio"] == 1.0
    assert not any("terminated" in name for name in got)


def test_the_last_turn_decides_whether_a_rollout_ended() -> None:
    """F041, F043, F066: two turns of 2 and 1 tokens; the context between them is not counted."""
    got = generated([rollout([5, EOS], [6], prompts=[[1], [1, 5, EOS, 9, 9]]), rollout([EOS])])
    assert got["completions/mean_length"] == 2.0 and got["completions/clipped_ratio"] == 0.5
    assert (got["rollout/turns_mean"], got["rollout/turns_max"]) == (1.5, 2)
    assert got["rollout/fork_frac"] == 0.0 and got["rollout/drift_tokens_max"] == 0


def test_duplicates_repeat_an_earlier_rollout_token_for_token() -> None:
    """F044: A, A, B, A."""
    group = [rollout([5, 6]), rollout([5, 6]), rollout([7]), rollout([5, 6])]
    assert duplicates(group) == [False, True, False, True]
    assert generated(group)["completions/duplicate_frac"] == 0.5
    assert duplicates([rollout([5], [6]), rollout([5, 6])]) == [False, False]  # other turns


def test_forks_and_drift() -> None:
    """F067, F068: one fork among two transitions, three held tokens rendered anew."""
    forked = rollout([5, 6], [7], prompts=[[1, 3], [1, 4]])  # held 1 3 5 6, common prefix 1
    kept = rollout([5], [7], prompts=[[1], [1, 5]])
    got = generated([forked, kept])
    assert got["rollout/fork_frac"] == 0.5
    assert (got["rollout/drift_tokens_mean"], got["rollout/drift_tokens_max"]) == (1.5, 3)
    assert got["rollout/samples_per_rollout"] == 1.5


def test_empty_completions_make_fewer_samples_than_rollouts() -> None:
    """F067."""
    assert generated([rollout([]), rollout([5])])["rollout/samples_per_rollout"] == 0.5


def test_reward_metrics_over_a_window() -> None:
    """F047, F049, F051, F052: one kept group, one dropped, one that nothing scored."""
    got = scored(("f", [0.0, 1.0, NAN], "scored"), ("f", [4.0, 4.0, 4.0], "zero_std"), ("f", [NAN] * 3, "no_reward"))
    assert got["reward"] == pytest.approx(13 / 5)  # over completions, not over groups
    assert got["rewards/f/mean"] == pytest.approx(13 / 5)
    assert got["frac_reward_zero_std"] == pytest.approx(2 / 3)
    assert got["reward_dropped"] == 4.0  # F030: the all-None group is not in it


def test_nothing_dropped_leaves_reward_dropped_out() -> None:
    assert "reward_dropped" not in scored(("f", [0.0, 1.0], "scored"))


def test_outbox_reduces_by_name_and_empties() -> None:
    """F062."""
    box, window = MetricOutbox(), MetricWindow()
    for value in (1.0, 3.0):
        box.record("rollout/vllm_preemption_count", value)
        box.record("rollout/backpressure_s", value)  # F070: mean over the waits
    window.extend(box.drain())
    assert box.drain() == []
    assert window.reduce() == {"rollout/vllm_preemption_count": 4.0, "rollout/backpressure_s": 2.0}
