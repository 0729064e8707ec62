"""Reward functions of a group: calls, concurrency, contract."""

from __future__ import annotations

import asyncio
import functools
import threading

import numpy as np
import pytest

from asyncgrpo_core.errors import RewardError
from asyncgrpo_core.rollout.scoring import GroupScorer, check_rewards, is_async, reward_names, total_rewards
from asyncgrpo_core.types import RolloutGroup

NAN = float("nan")


def group_of(
    n: int = 2, rollout_rewards: list | None = None, env_rewards: list | None = None, **columns
) -> RolloutGroup:
    return RolloutGroup(
        prompts=[[{"role": "user", "content": "q"}]] * n,
        reward_kwargs={name: [value] * n for name, value in columns.items()},
        completions=[[{"role": "assistant", "content": str(i)}] for i in range(n)],
        completions_ids=[[i] for i in range(n)],
        completions_sequences=[[] for _ in range(n)],
        tool_call_counts=[0] * n,
        tool_failure_counts=[0] * n,
        model_version=0,
        group_id=0,
        row_index=0,
        env_rewards=env_rewards or [None] * n,
        rollout_rewards=rollout_rewards or [None] * n,
    )


async def score(funcs: list, group: RolloutGroup):
    scorer = GroupScorer(funcs)
    try:
        return await scorer.score(group)
    finally:
        scorer.close()


async def test_keyword_arguments_are_the_groups_and_every_column() -> None:
    """F148, F193: every dataset column but the prompt reaches the function."""
    seen = {}

    def recording(**kwargs):
        seen.update(kwargs)
        return [0.0, 1.0]

    group = group_of(answer=7, environment="chess")
    await score([recording], group)
    assert seen == {
        "prompts": group.prompts,
        "completions": group.completions,
        "completion_ids": [[0], [1]],
        "answer": [7, 7],
        "environment": ["chess", "chess"],
    }


async def test_rewards_are_summed_with_weight_one_and_none_is_left_out() -> None:
    """F022, F149, F164: two functions, one None each, plus Rollout.reward."""

    def first(completions, **_):
        return [1.0, None, None]

    async def second(completions, **_):
        return [10, True, None]

    scores = await score([first, second], group_of(3, rollout_rewards=[None, 0.5, None]))
    np.testing.assert_array_equal(scores.total, [11.0, 1.5, NAN])
    np.testing.assert_array_equal(scores.by_source["first"], [1.0, NAN, NAN])
    np.testing.assert_array_equal(scores.by_source["second"], [10.0, 1.0, NAN])


async def test_environment_rewards_go_by_class_name() -> None:
    class Chess:
        pass

    scores = await score([], group_of(2, env_rewards=[(Chess, 2.0), None]))
    np.testing.assert_array_equal(scores.by_source["Chess"], [2.0, NAN])
    np.testing.assert_array_equal(scores.total, [2.0, NAN])


async def test_functions_of_a_group_and_many_groups_run_at_once() -> None:
    """F147: a barrier that only opens when all six calls are inside; sync ones in threads, async ones awaited."""
    sync_barrier, entered = threading.Barrier(4), []
    all_async = asyncio.Event()

    def blocking(completions, **_):
        sync_barrier.wait(timeout=20)
        return [0.0, 0.0]

    async def awaiting(completions, **_):
        entered.append(1)
        if len(entered) == 2:
            all_async.set()
        await asyncio.wait_for(all_async.wait(), 20)
        return [1.0, 1.0]

    scorer = GroupScorer([blocking, blocking, awaiting])
    try:
        results = await asyncio.gather(scorer.score(group_of()), scorer.score(group_of()))
    finally:
        scorer.close()
    for result in results:
        np.testing.assert_array_equal(result.total, [1.0, 1.0])


async def test_a_blocking_reward_does_not_stop_the_event_loop() -> None:
    release, ticks = threading.Event(), 0

    def blocking(completions, **_):
        assert release.wait(timeout=20)
        return [0.0, 0.0]

    task = asyncio.create_task(score([blocking], group_of()))
    for _ in range(50):
        await asyncio.sleep(0)
        ticks += 1
    assert not task.done() and ticks == 50
    release.set()
    await task


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        ([1.0], "returned 1 rewards for 2 completions"),
        (1.0, "a float"),
        (None, "a NoneType"),
        ({0: 1.0}, "a dict"),
        (["1.0", 2.0], "'1.0'.*a str.*completion 0"),
        ([1.0, [2.0]], "a list.*completion 1"),
        ([NAN, 1.0], "nan for completion 0"),
        ([1.0, float("inf")], "inf for completion 1"),
        ([1.0, 1j], "a complex"),
    ],
)
def test_what_is_no_reward_is_refused_by_name(returned, text) -> None:
    """F149: the error names the function, what it returned and what is expected."""
    with pytest.raises(RewardError, match=f"'my_reward'.*{text}") as caught:
        check_rewards("my_reward", returned, 2)
    assert "list of 2 finite floats" in str(caught.value)


@pytest.mark.parametrize("returned", [[1, None], (True, 0.5), np.array([1.0, 2.0]), [np.float32(1), np.int64(2)]])
def test_what_counts_as_rewards(returned) -> None:
    assert check_rewards("f", returned, 2).dtype == np.float64


async def test_an_exception_keeps_its_traceback() -> None:
    def deep(completions, **_):
        raise ZeroDivisionError("no answer")

    with pytest.raises(RewardError, match=r"'deep' raised ZeroDivisionError: no answer") as caught:
        await score([deep], group_of())
    assert "test_rollout_scoring.py" in str(caught.value)


async def test_a_function_that_does_not_take_a_column_says_so() -> None:
    def narrow(completions):
        return [0.0, 0.0]

    with pytest.raises(RewardError, match=r"\*\*kwargs"):
        await score([narrow], group_of(answer=1))


class Judge:
    def __call__(self, completions, **_):
        return [0.0] * len(completions)


class AsyncJudge:
    async def __call__(self, completions, **_):
        return [0.0] * len(completions)


def plain(completions, scale=1.0, **_):
    return [scale] * len(completions)


async def coroutine(completions, **_):
    return [0.0] * len(completions)


def test_metric_names_are_distinct_and_stable() -> None:
    """F154."""
    funcs = [functools.partial(plain, scale=1.0), functools.partial(plain, scale=2.0), Judge(), plain]
    assert reward_names(funcs) == ["plain", "plain_2", "Judge", "plain_3"]


def test_coroutine_functions_are_recognised_in_every_form() -> None:
    """F152."""
    assert [is_async(f) for f in (coroutine, functools.partial(coroutine), AsyncJudge())] == [True] * 3
    assert [is_async(f) for f in (plain, functools.partial(plain), Judge())] == [False] * 3


def test_no_source_scores_nothing() -> None:
    assert np.isnan(total_rewards([], 3)).all()
