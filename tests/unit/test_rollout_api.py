"""The carriers' public shape (reference, API pages)."""

from __future__ import annotations

import dataclasses
import re

from asyncgrpo_core.types import Rollout, RolloutGroup, TurnRecord


def fields(cls) -> list[str]:
    return [f.name for f in dataclasses.fields(cls)]


def test_rollout() -> None:
    """F198."""
    assert fields(Rollout) == [
        "completion", "completion_ids", "turns", "tool_call_count", "tool_failure_count", "reward", "rollout_id"
    ]  # fmt: skip
    one, two = Rollout([], [], []), Rollout([], [], [])
    assert (one.tool_call_count, one.tool_failure_count, one.reward) == (0, 0, None)
    assert one.rollout_id != two.rollout_id and re.fullmatch(r"[0-9a-f]{32}", one.rollout_id)


def test_turn_record() -> None:
    """F199: the reference's fields come first, ours follow with a default."""
    names = fields(TurnRecord)
    assert names[:6] == [
        "prompt_ids", "output_ids", "output_log_probs", "output_mask", "output_sampling_mask",
        "output_sampler_logprobs",
    ]  # fmt: skip
    record = TurnRecord([1], [2])
    assert record.output_log_probs == [] and all(getattr(record, name) is None for name in names[3:])


def test_rollout_group() -> None:
    """F200."""
    assert fields(RolloutGroup) == [
        "prompts", "reward_kwargs", "completions", "completions_ids", "completions_sequences", "tool_call_counts",
        "tool_failure_counts", "model_version", "group_id", "row_index", "env_rewards", "rollout_rewards",
        "queued_at", "rewards",
    ]  # fmt: skip
