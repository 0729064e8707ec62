"""Counts that reward functions keep become metrics of the window in which they rose."""

from __future__ import annotations

import functools
from collections import Counter

from asyncgrpo_core.rewards import accuracy_reward, reasoning_accuracy_reward, verifier_counts
from asyncgrpo_core.rollout.reward_counts import RewardCounts


class Judge:
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    async def __call__(self, completions, **_):
        return [0.0 for _ in completions]


def plain(completions, **_):
    return [0.0 for _ in completions]


def test_only_what_is_new_is_reported() -> None:
    judge = Judge()
    counts = RewardCounts([plain, judge])
    assert counts.events() == []
    judge.counts["requests"] = 3
    assert counts.events() == [("rewards/Judge/requests_count", "count", 3.0, 0.0)]
    judge.counts.update(requests=2, cache_hits=1)
    assert sorted(counts.events()) == [
        ("rewards/Judge/cache_hits_count", "count", 1.0, 0.0),
        ("rewards/Judge/requests_count", "count", 2.0, 0.0),
    ]
    assert counts.events() == []


def test_the_verifiers_counts_are_shared_and_reported_once() -> None:
    assert accuracy_reward.counts is verifier_counts
    counts = RewardCounts([plain, functools.partial(accuracy_reward, timeout_s=1.0), reasoning_accuracy_reward])
    counts.events()
    accuracy_reward([[{"role": "assistant", "content": r"\boxed{\frac{2}{4}}"}]], [r"\frac{1}{2}"])
    names = [name for name, *_ in counts.events()]
    assert "rewards/accuracy_reward/ok_count" in names
    assert not any("reasoning" in name for name in names)
