"""Rewards for the length of a completion, in tokens. Source of the punishment: DAPO, arXiv 2503.14476, equation 13."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from asyncgrpo_core.errors import ConfigError


def length_reward(completion_ids: list[list[int]], *, per_token: float = 1.0, **kwargs: Any) -> list[float]:
    """`per_token` for every token of the completion.

    Rewards carry weight 1 each, so choose a small value beside other rewards, negative for shorter completions:
    `functools.partial(length_reward, per_token=-0.001)`.
    """
    return [per_token * len(ids) for ids in completion_ids]


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> Callable[..., list[float]]:
    """A reward function that punishes long completions softly (DAPO, equation 13). The result can be pickled.

    0 up to max_completion_len - soft_punish_cache tokens, then falling linearly to -1 at max_completion_len, -1 above.
    """
    if not 0 < soft_punish_cache <= max_completion_len:
        raise ConfigError(
            f"soft_punish_cache is {soft_punish_cache} and max_completion_len {max_completion_len}.",
            "Choose 0 < soft_punish_cache <= max_completion_len.",
        )
    return functools.partial(
        soft_overlong_punishment, max_completion_len=max_completion_len, soft_punish_cache=soft_punish_cache
    )


def soft_overlong_punishment(
    completion_ids: list[list[int]], *, max_completion_len: int, soft_punish_cache: int, **kwargs: Any
) -> list[float]:
    """See `get_soft_overlong_punishment`."""
    free = max_completion_len - soft_punish_cache
    return [max(-1.0, min(0.0, (free - len(ids)) / soft_punish_cache)) for ids in completion_ids]
