"""Module-level reward functions and loops for the worker tests: they must be importable in the spawned process."""

from __future__ import annotations

import os
import time

from asyncgrpo_core.rollout.loop import AsyncRolloutLoop


def index_reward(completions, **_):
    return [float(i) for i in range(len(completions))]


def short_reward(completions, **_):
    return [1.0]


def raising_reward(completions, **_):
    raise ZeroDivisionError("division by zero in the reward")


def device_reward(completions, **_):
    """1 when no GPU is visible and this is another process than the trainer."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == "" and os.getppid() == int(os.environ["TEST_TRAINER_PID"])
    return [float(hidden), 0.0] * (len(completions) // 2)


def exiting_reward(completions, **_):
    os._exit(7)


def scaled(completions, scale, **_):
    return [scale * i for i in range(len(completions))]


class Judge:
    def __call__(self, completions, **_):
        return [float(i) for i in range(len(completions))]


class BlockingLoop(AsyncRolloutLoop):
    """Blocks the event loop, as a hook that forgets to await does."""

    async def generate_one(self, prompt, tools, group_id=0):
        time.sleep(60)
        raise AssertionError("the worker should have been stopped")


class ImpatientLoop(AsyncRolloutLoop):
    """Gives up on an unreachable server at once."""

    async def connect(self):
        from asyncgrpo_core.server import generation

        class Client(generation.GenerationClient):
            def __init__(self, *args, **kwargs) -> None:
                super().__init__(*args, **{**kwargs, "max_retries": 1, "backoff_s": 0.01})

        import asyncgrpo_core.server.fleet as fleet_module

        fleet_module.GenerationClient = Client
        return await super().connect()
