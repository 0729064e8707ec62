"""Environments: what is offered as a tool, how a rollout opens, who holds an instance."""

from __future__ import annotations

import time
from typing import Any

import pytest

from asyncgrpo_core.errors import ConfigError, DataError
from asyncgrpo_core.rollout.environments import (
    EnvironmentFailedError,
    EnvironmentPool,
    offers_tools,
    opening_messages,
    public_methods,
    reset_arguments,
)
from asyncgrpo_core.rollout.threads import CallThreads
from asyncgrpo_core.rollout.tools import ToolsDownError
from tests.unit.agent_parts import CounterEnv, GameEnv, add

USER = {"role": "user", "content": "Count."}


def pool_of(factory: Any, timeout_s: float = 5.0) -> EnvironmentPool:
    return EnvironmentPool(factory, CallThreads(4, "tool"), timeout_s)


class Odd(dict):
    """Things that are no tools: properties, attributes, inherited C methods, private and reserved names."""

    limit = 3

    @property
    def state(self) -> int:
        raise AssertionError("a property was run")

    @staticmethod
    def roll(sides: int) -> int:
        """Roll.

        Args:
            sides: Number of sides.
        """
        return sides

    def reset(self, **kwargs: Any) -> None: ...

    def get_reward(self) -> float:
        return 0.0

    def _private(self) -> None: ...


def test_f175_public_methods_are_tools_and_nothing_else() -> None:
    assert [m.__name__ for m in public_methods(Odd())] == ["roll"]
    assert [m.__name__ for m in public_methods(CounterEnv())] == ["increment"]
    assert [m.__name__ for m in public_methods(GameEnv())] == ["move"]


def test_only_environments_with_methods_offer_tools() -> None:
    assert not offers_tools(Silent) and offers_tools(CounterEnv) and offers_tools({"a": Silent, "b": GameEnv})
    assert offers_tools(lambda: Silent())  # what it makes is not known before it is called


def test_f177_columns_reach_reset_and_the_routing_column_does_not() -> None:
    row = {"prompt": [USER], "target": 4, "environment": "counter"}

    def takes_any(**kwargs: Any) -> None: ...

    def takes_target(target: int) -> None: ...

    def takes_prompt(prompt: Any, target: int) -> None: ...

    assert reset_arguments(takes_any, row) == {"prompt": [USER], "target": 4}
    assert reset_arguments(takes_target, row) == {"target": 4}
    assert reset_arguments(takes_prompt, row) == {"prompt": [USER], "target": 4}


@pytest.mark.parametrize(
    ("prompt", "observation", "expected"),
    [
        (None, "Go.", [{"role": "user", "content": "Go."}]),
        ([USER], None, [USER]),
        ([USER], " To 3.", [{"role": "user", "content": "Count. To 3."}]),
        (
            [{"role": "system", "content": "s"}, USER, {"role": "assistant", "content": "a"}],
            "!",
            [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "Count.!"},
                {"role": "assistant", "content": "a"},
            ],
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "Count."}]}],
            "!",
            [{"role": "user", "content": [{"type": "text", "text": "Count."}, {"type": "text", "text": "!"}]}],
        ),
    ],
)
def test_f176_reset_text_is_the_prompt_or_ends_its_last_user_message(prompt, observation, expected) -> None:
    assert opening_messages(prompt, observation, "Env") == expected
    assert USER == {"role": "user", "content": "Count."}  # the dataset's row is not changed


@pytest.mark.parametrize(
    ("prompt", "observation", "message"),
    [(None, None, "Env.reset.. returned None"), ([{"role": "system", "content": "s"}], "x", "no user message")],
)
def test_f176_no_prompt_from_anywhere_is_refused(prompt, observation, message) -> None:
    with pytest.raises(DataError, match=message):
        opening_messages(prompt, observation, "Env")


async def test_f182_instances_are_reused_and_never_shared() -> None:
    CounterEnv.made = 0
    pool = pool_of(CounterEnv)
    assert await pool.prepare() == [CounterEnv]
    first, second = await pool.lease({}), await pool.lease({})
    assert first.instance is not second.instance and CounterEnv.made == 2
    pool.give_back(first)
    third = await pool.lease({})
    assert third.instance is first.instance and CounterEnv.made == 2


async def test_f180_rows_are_routed_by_name_and_see_their_own_tools() -> None:
    pool = pool_of({"count": CounterEnv, "game": GameEnv})
    await pool.prepare()
    count, game = await pool.lease({"environment": "count"}), await pool.lease({"environment": "game"})
    assert [t.__name__ for t in count.tools] == ["increment"] and [t.__name__ for t in game.tools] == ["move"]


@pytest.mark.parametrize(("row", "message"), [({"environment": "chess"}, "'chess'"), ({}, 'has no "environment"')])
async def test_f181_unknown_names_are_refused_with_the_known_ones(row, message) -> None:
    pool = pool_of({"count": CounterEnv, "game": GameEnv})
    with pytest.raises(DataError, match=message + r".*\['count', 'game'\]"):
        await pool.lease(row)


async def test_f179_get_reward_sync_and_async() -> None:
    pool = pool_of({"count": CounterEnv, "game": GameEnv})
    count, game = await pool.lease({"environment": "count"}), await pool.lease({"environment": "game"})
    assert await pool.reset(count, {"target": 1}) == " Target 1."
    count.instance.increment(1)
    assert await pool.reward(count) == (CounterEnv, 1.0) and count.reward_s is not None
    assert await pool.reset(game, {}) == "Reach the goal."
    assert await pool.reward(game) == (GameEnv, 0.0)


class Silent:
    def reset(self, **kwargs: Any) -> None: ...


class Fragile:
    """Raises or hangs where the row says."""

    def reset(self, how: str = "", **kwargs: Any) -> None:
        self.how = how
        if how == "reset raises":
            raise OSError("the game server is gone")
        if how == "reset hangs":
            time.sleep(1.0)

    def get_reward(self) -> float:
        if self.how == "reward raises":
            raise ValueError("no episode")
        return 1.0


async def test_an_environment_without_get_reward_scores_nothing() -> None:
    pool = pool_of(Silent)
    assert await pool.prepare() == []
    lease = await pool.lease({})
    assert await pool.reset(lease, {}) is None and await pool.reward(lease) is None and lease.reward_s is None


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("reset raises", r"Fragile.reset\(\) failed: OSError: the game server is gone"),
        ("reset hangs", r"Fragile.reset\(\) failed: still running after 0.05 s"),
        ("reward raises", r"Fragile.get_reward\(\) failed: ValueError: no episode"),
    ],
)
async def test_a_failing_environment_fails_its_rollout_and_is_thrown_away(how, message) -> None:
    pool = pool_of(Fragile, timeout_s=0.05)
    lease = await pool.lease({})
    with pytest.raises(EnvironmentFailedError, match=message):
        await pool.reset(lease, {"how": how})
        await pool.reward(lease)
    pool.give_back(lease)
    assert (await pool.lease({})).instance is not lease.instance


async def test_an_environment_that_fails_half_of_the_time_stops_the_run() -> None:
    pool = pool_of(Fragile)
    with pytest.raises(ToolsDownError, match=r"Fragile.reset\(\) failed in 17 of the last 32 calls"):
        for number in range(40):
            lease = await pool.lease({})
            try:
                await pool.reset(lease, {"how": "reset raises" if number % 2 == 0 or number > 30 else ""})
            except EnvironmentFailedError:
                pass
            pool.give_back(lease)


class Unmade:
    def __init__(self) -> None:
        raise RuntimeError("no licence")


class NoReset: ...


class Undescribed:
    def reset(self, **kwargs: Any) -> None: ...

    def act(self, x):
        return x


class Clash:
    def reset(self, **kwargs: Any) -> None: ...

    def add(self, a: int) -> int:
        """Add.

        Args:
            a: One number.
        """
        return a


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (Unmade, "environment_factory could not make an environment: RuntimeError: no licence"),
        ({"x": NoReset}, r"environment_factory\['x'\] made a NoReset without a reset"),
        (Undescribed, "'act'.*cannot be described"),
        (Clash, "Two tools are named 'add'"),
    ],
)
async def test_unusable_environments_are_refused_before_the_first_prompt(factory, message) -> None:
    with pytest.raises(ConfigError, match=message):
        await pool_of(factory).prepare([add])


async def test_reset_must_return_none_or_text() -> None:
    class Wrong:
        def reset(self, **kwargs: Any) -> Any:
            return {"observation": 1}

    pool = pool_of(Wrong)
    with pytest.raises(ConfigError, match="Return None or a string"):
        await pool.reset(await pool.lease({}), {})
