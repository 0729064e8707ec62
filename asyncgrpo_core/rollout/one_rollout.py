"""One rollout from its dataset row to its training sequences, environment included.

    lease -> reset -> prompt -> generate_one (hook) -> get_reward -> turns become sequences

Shared by training (pipeline.py) and the held-out evaluation (heldout.py), so that both measure the same thing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from asyncgrpo_core.errors import ConfigError, RolloutError
from asyncgrpo_core.rollout.context import RolloutContext, current_rollout
from asyncgrpo_core.rollout.environments import EnvironmentLease, opening_messages
from asyncgrpo_core.rollout.reconcile import Reconciled, reconcile
from asyncgrpo_core.types import Rollout

if TYPE_CHECKING:
    from asyncgrpo_core.rollout.loop import AsyncRolloutLoop


@dataclass
class FinishedRollout:
    """One rollout with its training sequences.

    Attributes:
        prompt: its opening messages (an environment may give every rollout of a group another prompt).
        env_reward: (environment class, reward), None when no environment scored it.
        duration_s: from dispatch to collection.
        reset_s, reward_s: time in the environment's reset() and get_reward(), None where there is none.
    """

    rollout: Rollout
    reconciled: Reconciled
    duration_s: float
    prompt: list[dict[str, Any]]
    context: RolloutContext
    env_reward: tuple[type, float] | None = None
    reset_s: float | None = None
    reward_s: float | None = None


async def run_rollout(
    loop: AsyncRolloutLoop, context: RolloutContext, model_version: int, *, want_top: bool
) -> FinishedRollout:
    """Run one rollout.

    Args:
        context: its origin; `context.row` is the dataset row.
        model_version: policy version of tokens whose turn does not report its own.
        want_top: whether trained tokens need the sampler's most likely tokens.

    Raises:
        EnvironmentFailedError: the environment failed; the group can be generated again.
        ServerError, RequestRejectedError: a turn could not be sampled.
        ConfigError, DataError, RolloutError: nothing that generating again would change.
    """
    started = time.monotonic()
    current_rollout.set(context)
    pool, lease, observation = loop.environments, None, None
    try:
        if pool is not None:
            lease = await pool.lease(context.row)
            observation = await pool.reset(lease, context.row)
        prompt = _prompt(context.row, observation, lease)
        rollout = await _generate(loop, context, prompt, lease)
        env_reward = await pool.reward(lease) if pool is not None and lease is not None else None
    finally:
        if pool is not None and lease is not None:
            pool.give_back(lease)
    return FinishedRollout(
        rollout=rollout,
        reconciled=reconcile(rollout.turns, model_version, want_top=want_top),
        duration_s=time.monotonic() - started,
        prompt=prompt,
        context=context,
        env_reward=env_reward,
        reset_s=lease.reset_s if lease is not None else None,
        reward_s=lease.reward_s if lease is not None else None,
    )


def _prompt(row: dict[str, Any], observation: str | None, lease: EnvironmentLease | None) -> list[dict[str, Any]]:
    if lease is None:
        return list(row["prompt"])
    return opening_messages(row.get("prompt"), observation, type(lease.instance).__name__)


async def _generate(
    loop: AsyncRolloutLoop, context: RolloutContext, prompt: list[dict[str, Any]], lease: EnvironmentLease | None
) -> Rollout:
    tools = loop.tools if lease is None else [*loop.tools, *lease.tools]
    if lease is not None:
        lease.intact = False  # until the rollout has come to its own end
    rollout = await loop.generate_one(list(prompt), list(tools), context.group_id)
    if not isinstance(rollout, Rollout):
        raise RolloutError(f"generate_one returned a {type(rollout).__name__}.", "Return an asyncgrpo_core.Rollout.")
    if lease is not None:
        # a method past its deadline may still be at work on the instance
        lease.intact = all(call.kind != "timeout" for call in context.calls)
    return rollout


def check_reward_sources(num_reward_funcs: int, scoring: list[type], custom_generation: bool) -> None:
    """Raise ConfigError when nothing can score a rollout (a custom `generate_one` may set Rollout.reward)."""
    if num_reward_funcs or scoring or custom_generation:
        return
    raise ConfigError(
        "Nothing scores the rollouts: there is no reward function and no environment has get_reward().",
        "Pass reward_funcs, or define get_reward() in the environment.",
    )
