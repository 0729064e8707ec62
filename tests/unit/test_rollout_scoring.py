"""Reward functions of a group: calls, concurrency, contract."""

from __future__ import annotations

import asyncio
import functools
import pickle
import re
import threading
import types
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncgrpo_core.errors import ConfigError, RewardError
from asyncgrpo_core.launch import reward_probe
from asyncgrpo_core.rollout.reward_names import EnvironmentNames, reward_name
from asyncgrpo_core.rollout.scoring import (
    GroupScorer,
    RewardTimeoutError,
    check_rewards,
    is_async,
    reward_names,
    total_rewards,
)
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


async def test_sync_and_async_functions_of_one_group_overlap() -> None:
    """F147, F152: none can return before all four have been called, so one after the other would never end."""
    loop, called, all_called = asyncio.get_running_loop(), [], threading.Event()
    all_async = asyncio.Event()

    def arrive(name: str) -> None:
        called.append(name)
        if len(called) == 4:
            all_called.set()
            loop.call_soon_threadsafe(all_async.set)

    def sync_one(completions, **_):
        arrive("sync_one")
        return [1.0 if all_called.wait(20) else 0.0] * 2

    def sync_two(completions, **_):
        arrive("sync_two")
        return [1.0 if all_called.wait(20) else 0.0] * 2

    async def async_one(completions, **_):
        arrive("async_one")
        await asyncio.wait_for(all_async.wait(), 20)
        return [1.0, 1.0]

    async def async_two(completions, **_):
        arrive("async_two")
        await asyncio.wait_for(all_async.wait(), 20)
        return [1.0, 1.0]

    scores = await score([sync_one, async_one, sync_two, async_two], group_of())
    np.testing.assert_array_equal(scores.total, [4.0, 4.0])
    assert list(scores.by_source) == ["sync_one", "async_one", "sync_two", "async_two"]


async def test_a_sync_function_past_its_deadline() -> None:
    """Its thread goes on; the next group is scored all the same, even with one place."""
    release = threading.Event()

    def hangs(completions, **_):
        if completions[0][0]["content"] == "0" and len(completions) == 3:
            release.wait(20)
        return [1.0] * len(completions)

    scorer = GroupScorer([hangs], num_threads=1, timeout_s=0.1)
    with pytest.raises(
        RewardTimeoutError, match=r"'hangs' was still running 0\.1 s after.* 3 completions.*reward_timeout"
    ):
        await scorer.score(group_of(3))
    np.testing.assert_array_equal((await scorer.score(group_of(2))).total, [1.0, 1.0])
    release.set()


async def test_an_async_function_past_its_deadline_even_when_it_ignores_cancellation() -> None:
    ended = asyncio.Event()

    async def stubborn(completions, **_):
        for _ in range(3):
            try:
                await asyncio.wait_for(ended.wait(), 20)
            except asyncio.CancelledError:
                continue
        return [0.0, 0.0]

    scorer = GroupScorer([stubborn], timeout_s=0.05)
    with pytest.raises(RewardTimeoutError, match="'stubborn' was still running"):
        await scorer.score(group_of())
    ended.set()
    await asyncio.sleep(0)


async def test_a_failure_cancels_the_groups_other_functions() -> None:
    cancelled = asyncio.Event()

    async def waits(completions, **_):
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def fails(completions, **_):
        await asyncio.sleep(0)
        raise KeyError("column")

    with pytest.raises(RewardError, match="'fails' raised KeyError"):
        await score([waits, fails], group_of())
    await asyncio.wait_for(cancelled.wait(), 20)


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("error", [TimeoutError("of a socket"), StopIteration(), SystemExit(3)])
async def test_what_a_function_raises_is_its_own_error_not_the_deadlines(kind, error) -> None:
    """Its own TimeoutError is no missed deadline, and exit() does not end the worker."""

    def raises(completions, **_):
        raise error

    async def raises_async(completions, **_):
        raise error

    with pytest.raises(RewardError, match=f"raised ({type(error).__name__}|RuntimeError)") as caught:
        await score([raises if kind == "sync" else raises_async], group_of())
    assert not isinstance(caught.value, RewardTimeoutError)


async def test_an_error_of_the_project_is_passed_on() -> None:
    def unconfigured(completions, **_):
        raise ConfigError("math-verify is not installed.", "pip install math-verify.")

    with pytest.raises(ConfigError, match="^math-verify is not installed"):
        await score([unconfigured], group_of())


async def test_a_sync_wrapper_of_an_async_function() -> None:
    """F152: a decorator often gives a plain function that returns the coroutine."""

    def wrapper(completions, **kwargs):
        return coroutine(completions, **kwargs)

    assert not is_async(wrapper)
    np.testing.assert_array_equal((await score([wrapper], group_of())).total, [0.0, 0.0])


async def test_environment_rewards_alone() -> None:
    """F152: reward_funcs may be empty when the environment scores; F024, F149: None everywhere is NaN in total."""

    class Grid:
        pass

    scores = await score([], group_of(2, env_rewards=[None, (Grid, 3)]))
    np.testing.assert_array_equal(scores.total, [NAN, 3.0])
    with pytest.raises(RewardError, match=r"'Grid.get_reward' returned nan"):
        await score([], group_of(2, env_rewards=[(Grid, NAN), None]))


def test_the_timeout_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(RewardTimeoutError("f was still running.", "Raise reward_timeout.")))
    assert type(error) is RewardTimeoutError and isinstance(error, RewardError)
    assert str(error) == "f was still running. Raise reward_timeout."


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
        ([1.0, np.zeros(2)], "a ndarray.*completion 1"),
        ([10**400, 1.0], "inf for completion 0"),
        ({1.0, 2.0}, "a set"),
    ],
)
def test_what_is_no_reward_is_refused_by_name(returned, text) -> None:
    """F149: the error names the function, what it returned and what is expected."""
    with pytest.raises(RewardError, match=f"'my_reward'.*{text}") as caught:
        check_rewards("my_reward", returned, 2)
    assert "list of 2 finite floats" in str(caught.value)


@pytest.mark.parametrize(
    "returned",
    [
        [1, 0.5],
        (True, 0.5),
        np.array([1.0, 0.5]),
        [np.float32(1), np.array([0.5])],
        [Fraction(1), Decimal("0.5")],
        torch.tensor([1.0, 0.5]),
        [torch.tensor(1), torch.tensor([0.5])],
    ],
)
def test_what_counts_as_rewards(returned) -> None:
    checked = check_rewards("f", returned, 2)
    assert checked.dtype == np.float64 and list(checked) == [1.0, 0.5]


def test_a_function_that_the_probe_takes_is_taken_in_the_run() -> None:
    """The check before the run and the check in the run are the same one."""
    assert reward_probe.check_rewards is check_rewards


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


def named(name: str):
    def func(completions, **_):
        return [0.0] * len(completions)

    func.__name__ = name
    return func


class Named:
    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, completions, **_):
        return [0.0] * len(completions)

    def method(self, completions, **_):
        return [0.0] * len(completions)


def test_every_kind_of_function_has_a_name() -> None:
    """F154: lambdas, nested partials, methods, and the same __name__ in two modules."""
    other_module = types.FunctionType(plain.__code__, {}, "plain")
    nested = functools.partial(functools.partial(functools.partial(plain), scale=1.0), scale=2.0)
    own = functools.partial(plain)
    own.__name__ = "half"
    funcs = [plain, other_module, nested, own, lambda completions, **_: [0.0], functools.partial(Judge()), Named("x y")]
    funcs += [functools.partial(functools.partial(lambda completions, **_: [0.0])), Named("z").method, named("plain_2")]
    assert reward_names(funcs) == [
        "plain", "plain_2", "plain_3", "half", "lambda", "Judge", "x_y", "lambda_2", "method", "plain_2_2",
    ]  # fmt: skip
    assert reward_names(funcs) == reward_names(funcs)


@given(
    st.lists(st.text(max_size=6) | st.sampled_from(["a", "a_2", "<lambda>", "", "..", "ä/b", "a" * 300]), max_size=8)
)
def test_names_are_distinct_and_mlflow_takes_them(raw: list[str]) -> None:
    """F154: any __name__ at all."""
    names = reward_names([named(name) for name in raw])
    assert len(set(names)) == len(raw)
    for name in names:
        assert re.fullmatch(r"[A-Za-z0-9_.-]+", name) and len(name) < 110 and name.strip(".")


def test_the_probe_and_the_scorer_agree_on_names() -> None:
    assert reward_probe.reward_name is reward_name
    for func in (plain, functools.partial(functools.partial(plain)), Judge(), named("<lambda>")):
        assert [reward_name(func)] == reward_names([func]) == GroupScorer([func]).names


async def test_an_environment_is_not_merged_with_a_function_of_its_name() -> None:
    """F154: a reward function `Chess`, and two environment classes Chess of different modules."""
    here, there = type("Chess", (), {}), type("Chess", (), {})
    group = group_of(3, env_rewards=[(there, 1.0), (here, 2.0), None])
    scorer = GroupScorer([Named("Chess")], environments=[here, there])
    for _ in range(2):
        scores = await scorer.score(group)
        assert {name: list(column) for name, column in scores.by_source.items()} == {
            "Chess": [0.0, 0.0, 0.0],
            "Chess_2": pytest.approx([NAN, 2.0, NAN], nan_ok=True),
            "Chess_3": pytest.approx([1.0, NAN, NAN], nan_ok=True),
        }
        np.testing.assert_array_equal(scores.total, [1.0, 2.0, 0.0])


def test_environment_names_are_safe_and_stay() -> None:
    first, second = type("Grid<int>", (), {}), type("Grid<int>", (), {})
    names = EnvironmentNames(["Grid_int"])
    assert [names.name(c) for c in (first, second, first)] == ["Grid_int_2", "Grid_int_3", "Grid_int_2"]


def test_coroutine_functions_are_recognised_in_every_form() -> None:
    """F152."""
    assert [is_async(f) for f in (coroutine, functools.partial(coroutine), AsyncJudge())] == [True] * 3
    assert [is_async(f) for f in (plain, functools.partial(plain), Judge())] == [False] * 3


def test_no_source_scores_nothing() -> None:
    assert np.isnan(total_rewards([], 3)).all()
