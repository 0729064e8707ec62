"""Scores a whole group: every reward function at once, sync ones in threads, async ones on the event loop."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import numbers
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncgrpo_core.errors import RewardError
from asyncgrpo_core.types import RolloutGroup

RewardFunc = Callable[..., Any]


@dataclass
class GroupScores:
    """Rewards of one group. float64, NaN = this source did not score this rollout.

    by_source: name of a reward function (or environment class) -> [G]. total: [G], the sum over sources.
    """

    by_source: dict[str, np.ndarray]
    total: np.ndarray


def reward_names(reward_funcs: Sequence[RewardFunc]) -> list[str]:
    """Distinct, stable metric names: the function's name, of a partial its function's, of an object its class's.

    A name that is there already gets "_2", "_3", ... in list order.
    """
    names: list[str] = []
    for func in reward_funcs:
        base = _plain_name(func)
        name, number = base, 1
        while name in names:
            number += 1
            name = f"{base}_{number}"
        names.append(name)
    return names


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
            f"Reward function {name!r} returned {_short(returned)} (a {type(returned).__name__}), not a list.", fix
        )
    if len(returned) != expected:
        raise RewardError(f"Reward function {name!r} returned {len(returned)} rewards for {expected} completions.", fix)
    for index, value in enumerate(returned):
        if value is None:
            continue
        if not isinstance(value, numbers.Real):
            raise RewardError(
                f"Reward function {name!r} returned {_short(value)} (a {type(value).__name__}) for completion {index}.",
                fix,
            )
        if not math.isfinite(value):
            raise RewardError(f"Reward function {name!r} returned {value} for completion {index}.", fix)
    return np.array([np.nan if value is None else float(value) for value in returned], dtype=np.float64)


def total_rewards(sources: Sequence[np.ndarray], num_rollouts: int) -> np.ndarray:
    """Sum over sources, each with weight 1; NaN where no source scored the rollout. float64 [num_rollouts]."""
    if not sources:
        return np.full(num_rollouts, np.nan)
    stacked = np.stack(sources)
    scored = ~np.isnan(stacked)
    return np.where(scored.any(axis=0), np.where(scored, stacked, 0.0).sum(axis=0), np.nan)


class GroupScorer:
    """Calls the reward functions of many groups at once.

    Args:
        reward_funcs: sync or async callables of (prompts, completions, completion_ids, **columns).
        num_threads: threads for sync functions, over all groups that are scored at the moment.
    """

    def __init__(self, reward_funcs: Sequence[RewardFunc], *, num_threads: int = 32) -> None:
        self.names = reward_names(reward_funcs)
        self._funcs = list(zip(self.names, reward_funcs, map(is_async, reward_funcs), strict=True))
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="reward")

    async def score(self, group: RolloutGroup) -> GroupScores:
        """Score one group; sets nothing on it.

        Raises:
            RewardError: a function broke its contract (see `check_rewards`) or raised; then the message holds its
                traceback.
        """
        n = len(group.completions)
        kwargs = {
            "prompts": group.prompts,
            "completions": group.completions,
            "completion_ids": group.completions_ids,
            **group.reward_kwargs,
        }
        results = await asyncio.gather(
            *(self._call(name, func, is_coro, kwargs) for name, func, is_coro in self._funcs)
        )
        by_source = {name: check_rewards(name, got, n) for name, got in zip(self.names, results, strict=True)}
        for index, scored in enumerate(group.env_rewards):
            if scored is not None:
                environment, reward = scored
                column = by_source.setdefault(environment.__name__, np.full(n, np.nan))
                column[index] = check_rewards(f"{environment.__name__}.get_reward", [reward], 1)[0]
        own = check_rewards("Rollout.reward", group.rollout_rewards, n)
        return GroupScores(by_source, total_rewards([*by_source.values(), own], n))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _call(self, name: str, func: RewardFunc, is_coro: bool, kwargs: dict[str, Any]) -> Any:
        try:
            if is_coro:
                return await func(**kwargs)
            call = functools.partial(func, **kwargs)
            return await asyncio.get_running_loop().run_in_executor(self._threads, call)
        except Exception as error:
            raise RewardError(
                f"Reward function {name!r} raised {type(error).__name__}: {error}\n{traceback.format_exc()}",
                "Make the function handle this completion (None means it does not apply); it must accept the keyword "
                f"arguments {sorted(kwargs)}, most easily with **kwargs.",
            ) from error


def _plain_name(func: RewardFunc) -> str:
    while isinstance(func, functools.partial):
        func = func.func
    return getattr(func, "__name__", None) or type(func).__name__


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
