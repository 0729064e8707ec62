"""Scores a whole group: every reward function at once, sync ones in threads, async ones on the event loop.

None from a function means "does not apply to this completion" and becomes NaN in our arrays, as in the reference's
`RolloutGroup.rewards`; a completion that no source scored has the total NaN. A NaN or an infinity that a function
returns is refused, not taken for None: the reference knows one way to say "not scored" (None), and a NaN is a division
or a model gone wrong, which would silently thin out the training data.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import numbers
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncgrpo_core.errors import AsyncGRPOError, RewardError
from asyncgrpo_core.rollout.reward_names import EnvironmentNames, reward_names
from asyncgrpo_core.rollout.threads import CallThreads
from asyncgrpo_core.types import RolloutGroup

RewardFunc = Callable[..., Any]
_Outcome = tuple[Any, BaseException | None]


class RewardTimeoutError(RewardError):
    """A reward function did not return within its deadline. The group has failed; the next may go well."""


@dataclass
class GroupScores:
    """Rewards of one group. float64, NaN = this source did not score this rollout.

    by_source: name of a reward function (or environment class) -> [G]. total: [G], the sum over sources.
    """

    by_source: dict[str, np.ndarray]
    total: np.ndarray


def is_async(func: RewardFunc) -> bool:
    """Whether calling the function gives a coroutine (async def, a partial of one, an object with async __call__)."""
    while isinstance(func, functools.partial):
        func = func.func
    call = getattr(type(func), "__call__", None)  # noqa: B004 -- the class attribute is what a call uses
    return inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(call)


def check_rewards(name: str, returned: Any, expected: int) -> np.ndarray:
    """What a reward function returned -> float64 [expected], None as NaN.

    Raises:
        RewardError: not a list, wrong length, or an entry that is neither None nor a finite number; the message
            names the function, what it returned and what is expected.
    """
    fix = f"Return a list of {expected} finite floats (or None where the function does not apply)."
    if isinstance(returned, np.ndarray):
        returned = returned.tolist()
    if hasattr(returned, "tolist") and not isinstance(returned, (list, tuple)):
        returned = returned.tolist()  # a torch tensor
    if not isinstance(returned, (list, tuple)):
        raise RewardError(
            f"Reward function {name!r} returned a {type(returned).__name__} ({_short(returned)}), not a list.", fix
        )
    if len(returned) != expected:
        raise RewardError(f"Reward function {name!r} returned {len(returned)} rewards for {expected} completions.", fix)
    rewards = np.full(expected, np.nan)
    for index, value in enumerate(returned):
        if value is None:
            continue
        number = _number(value)
        if number is None:
            raise RewardError(
                f"Reward function {name!r} returned {_short(value)}, which is no number but a {type(value).__name__}, "
                f"for completion {index}.",
                fix,
            )
        if not math.isfinite(number):
            raise RewardError(f"Reward function {name!r} returned {number} for completion {index}.", fix)
        rewards[index] = number
    return rewards


def _number(value: Any) -> float | None:
    """A number as float: Python's and numpy's, a Decimal, a tensor of one element. None for anything else."""
    if not isinstance(value, numbers.Real) and not hasattr(value, "__float__"):
        return None
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError):  # an array of several elements
        return None
    except OverflowError:  # an int beyond float's range
        return math.inf


def total_rewards(sources: Sequence[np.ndarray], num_rollouts: int) -> np.ndarray:
    """Sum over sources, each with weight 1; NaN where no source scored the rollout. float64 [num_rollouts]."""
    if not sources:
        return np.full(num_rollouts, np.nan)
    stacked = np.stack(sources)
    scored = ~np.isnan(stacked)
    return np.where(scored.any(axis=0), np.where(scored, stacked, 0.0).sum(axis=0), np.nan)


class GroupScorer:
    """Calls the reward functions of many groups at once, all functions of a group at the same time.

    Args:
        reward_funcs: sync or async callables of (prompts, completions, completion_ids, **columns).
        num_threads: sync functions that may run at once, over all groups that are scored at the moment.
        timeout_s: seconds one function may take for one group, from when its call starts.
        environments: environment classes that are known before the run, in a fixed order; see `EnvironmentNames`.
    """

    def __init__(
        self,
        reward_funcs: Sequence[RewardFunc],
        *,
        num_threads: int = 32,
        timeout_s: float = 600.0,
        environments: Sequence[type] = (),
    ) -> None:
        self.names = reward_names(reward_funcs)
        self._funcs = list(zip(self.names, reward_funcs, map(is_async, reward_funcs), strict=True))
        self._timeout_s = timeout_s
        self._threads = CallThreads(num_threads, "reward")
        self._environments = EnvironmentNames(self.names, environments)

    async def score(self, group: RolloutGroup) -> GroupScores:
        """Score one group; sets nothing on it.

        Raises:
            RewardTimeoutError: a function was still running at its deadline. The first failure of a group cancels its
                other functions (a sync one runs on in its thread, its result unused).
            RewardError: a function broke its contract (see `check_rewards`) or raised; then the message holds its
                traceback. An error of this project that a function raises is passed on as it is.
        """
        n = len(group.completions)
        kwargs = {
            "prompts": group.prompts,
            "completions": group.completions,
            "completion_ids": group.completions_ids,
            **group.reward_kwargs,
        }
        tasks = [asyncio.create_task(self._call(*named, kwargs)) for named in self._funcs]
        try:
            results = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        by_source = {name: check_rewards(name, got, n) for name, got in zip(self.names, results, strict=True)}
        for index, scored in enumerate(group.env_rewards):
            if scored is not None:
                environment, reward = scored
                column = by_source.setdefault(self._environments.name(environment), np.full(n, np.nan))
                column[index] = check_rewards(f"{environment.__name__}.get_reward", [reward], 1)[0]
        own = check_rewards("Rollout.reward", group.rollout_rewards, n)
        return GroupScores(by_source, total_rewards([*by_source.values(), own], n))

    def close(self) -> None:
        """Let the idle threads end; a call that runs on ends with the process."""
        self._threads.close()

    async def _call(self, name: str, func: RewardFunc, is_coro: bool, kwargs: dict[str, Any]) -> Any:
        """The function's result; its exceptions arrive as values, so that a TimeoutError is always the deadline's."""
        try:
            if is_coro:
                result, error = await self._awaited(_outcome_of(lambda: func(**kwargs)))
            else:
                result, error = await self._threads.run(lambda: _outcome(func, kwargs), self._timeout_s)
                if error is None and inspect.isawaitable(result):  # a sync wrapper of an async function
                    result, error = await self._awaited(_outcome_of(functools.partial(_itself, result)))
        except TimeoutError:
            raise RewardTimeoutError(
                f"Reward function {name!r} was still running {self._timeout_s:g} s after it was called for a group of "
                f"{len(kwargs['completions'])} completions.",
                "Give its own slow calls a shorter deadline, or raise reward_timeout.",
            ) from None
        if error is None:
            return result
        if isinstance(error, AsyncGRPOError):
            raise error
        trace = "".join(traceback.format_exception(error))
        raise RewardError(
            f"Reward function {name!r} raised {type(error).__name__}: {error}\n{trace}",
            "Make the function handle this completion (None means it does not apply); it must accept the keyword "
            f"arguments {sorted(kwargs)}, most easily with **kwargs.",
        ) from error

    async def _awaited(self, outcome: Coroutine[Any, Any, _Outcome]) -> _Outcome:
        """Wait for a coroutine up to the deadline, also when it ignores its cancellation.

        Raises:
            TimeoutError: it was still running.
        """
        task = asyncio.create_task(outcome)
        try:
            done, _ = await asyncio.wait({task}, timeout=self._timeout_s)
        finally:
            task.cancel()
        if not done:
            raise TimeoutError
        return task.result()


def _outcome(func: RewardFunc, kwargs: dict[str, Any]) -> _Outcome:
    try:
        return func(**kwargs), None
    except (Exception, SystemExit) as error:  # exit() in a reward function must not end the worker without a word
        return None, error


def _itself(awaitable: Awaitable[Any]) -> Awaitable[Any]:
    return awaitable


async def _outcome_of(call: Callable[[], Awaitable[Any]]) -> _Outcome:
    try:
        return await call(), None
    except (Exception, SystemExit) as error:
        return None, error


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
