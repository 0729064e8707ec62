"""Call reward functions once on dummy completions, to find what would fail in the first minutes of a run."""

from __future__ import annotations

import asyncio
import inspect
import math
import pickle
from collections.abc import Callable
from typing import Any

from asyncgrpo_core.errors import ConfigError, RewardError
from asyncgrpo_core.rollout.reward_names import reward_name
from asyncgrpo_core.rollout.scoring import check_rewards

__all__ = ["check_picklable", "probe_reward", "reward_name"]

DUMMY = "0"  # the completion that is scored
NUM_DUMMIES = 3  # more than one, so that a function that returns one number for all is found


def probe_reward(function: Callable[..., Any], row: dict[str, Any]) -> list[float | None]:
    """Score `NUM_DUMMIES` dummy completions of one dataset row.

    Args:
        function: the reward function, sync or async.
        row: a dataset row with `prompt`; its other columns are passed as the reference does.

    Returns:
        What the function returned, as floats.

    Raises:
        ConfigError: it cannot be sent to the rollout process.
        RewardError: it raised, or returned no list of one number (or None) per completion.
    """
    name = reward_name(function)
    check_picklable(function, f"the reward function {name!r}")
    prompt = row.get("prompt") or [{"role": "user", "content": DUMMY}]
    kwargs: dict[str, Any] = {key: [value] * NUM_DUMMIES for key, value in row.items() if key != "prompt"}
    kwargs["prompts"] = [prompt] * NUM_DUMMIES
    kwargs["completions"] = [[{"role": "assistant", "content": DUMMY}] for _ in range(NUM_DUMMIES)]
    kwargs["completion_ids"] = [[0] for _ in range(NUM_DUMMIES)]
    try:
        result = function(**kwargs)
        if inspect.isawaitable(result):
            result = asyncio.run(_await(result))
    except Exception as exc:
        raise RewardError(
            f"The reward function {name!r} raised {type(exc).__name__}: {exc} when it scored the dummy completion "
            f"{DUMMY!r} of the first row.",
            f"It gets the keyword arguments {sorted(kwargs)}; make it return 0.0 for a completion it cannot judge.",
        ) from exc
    return [None if math.isnan(reward) else float(reward) for reward in check_rewards(name, result, NUM_DUMMIES)]


async def _await(result: Any) -> Any:
    return await result


def check_picklable(thing: Any, what: str) -> None:
    """Rewards, tools and environments cross into the rollout process.

    Raises:
        ConfigError: it is a lambda, a closure, or holds something that cannot be pickled.
    """
    try:
        pickle.dumps(thing)
    except (pickle.PicklingError, TypeError, AttributeError) as exc:
        raise ConfigError(
            f"{what[0].upper()}{what[1:]} cannot be sent to the rollout process: {exc}.",
            "Define it at the top level of a module (no lambda, no closure); functools.partial and objects with "
            "__call__ work too.",
        ) from exc
