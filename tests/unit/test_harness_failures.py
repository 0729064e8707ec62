"""Harnesses that fail, hang, are cancelled or walk away from their requests."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from types import SimpleNamespace

import openai
import pytest

from asyncgrpo_core.errors import RolloutError
from asyncgrpo_core.rollout.harness import HarnessFailedError, HarnessResult, HarnessRolloutLoop
from asyncgrpo_core.rollout.tools import ToolsDownError
from tests.unit.agent_parts import scripted
from tests.unit.harness_parts import ClientLoop, OneTurn, Silent, agent_run, digits, ready, rollout


class Crashing(OneTurn):
    async def then(self, reply, row):
        if row["answer"] == 0:
            raise ConnectionError("the sandbox is away")
        return float(reply.choices[0].message.content)


async def test_a_harness_that_raises_fails_its_group_only(tmp_path) -> None:
    async with scripted(digits) as server:
        run = agent_run(server, tmp_path, Crashing)
        await run.until(lambda: len(run.ended()) >= 4)
    failed = {record.slot.row: record.error for record in run.ended() if record.outcome == "failed"}
    assert (
        set(failed) == {0}
        and "The harness Crashing failed: it raised ConnectionError: the sandbox is away" in failed[0]
    )
    assert "scored" in {record.outcome for record in run.ended()}


class AlwaysCrashing(OneTurn):
    async def then(self, reply, row):
        raise ConnectionError("the sandbox is away")


async def test_a_harness_that_nearly_always_fails_ends_the_run(tmp_path) -> None:
    async with scripted(digits) as server:
        run = agent_run(server, tmp_path, AlwaysCrashing)
        with pytest.raises(ToolsDownError, match="AlwaysCrashing failed in .* the sandbox is away"):
            await run.until(lambda: False)


class Exiting(OneTurn):
    async def then(self, reply, row):
        sys.exit("usage: agent ...")


class SyncExiting(HarnessRolloutLoop):
    def run_harness(self, base_url, api_key, prompt, row):
        sys.exit(2)


class SelfCancelling(OneTurn):
    async def then(self, reply, row):
        raise asyncio.CancelledError


class OwnTimeout(OneTurn):
    async def then(self, reply, row):
        raise TimeoutError("the build took too long")


@pytest.mark.parametrize(
    ("agent", "says"),
    [
        (Silent, "harness Silent failed: it sent no request .* Give base_url"),
        (Exiting, r"it raised RuntimeError: it called sys.exit\('usage: agent ...'\)"),
        (SyncExiting, r"it called sys.exit\(2\)"),
        (SelfCancelling, "it was cancelled from within"),
        (OwnTimeout, "it raised TimeoutError: the build took too long"),
    ],
)
async def test_other_ways_to_fail(tmp_path, agent, says) -> None:
    async with scripted(digits) as server, ready(server, tmp_path, agent) as loop:
        with pytest.raises(HarnessFailedError, match=says):
            await rollout(loop)


class WrongReward(OneTurn):
    value = None

    async def then(self, reply, row):
        return self.value


@pytest.mark.parametrize("value", ["0.5", float("nan"), [1.0], HarnessResult(float("inf"))])
async def test_a_reward_that_is_no_number_ends_the_run(tmp_path, value) -> None:
    async with scripted(digits) as server, ready(server, tmp_path, WrongReward) as loop:
        loop.value = value
        with pytest.raises(RolloutError, match="WrongReward.run_harness returned .* as its reward"):
            await rollout(loop)


# deadlines and cancellation


class Hanging(OneTurn):
    """Hangs after its first turn; notes how it ended."""

    harness_timeout = 0.3
    stubborn = False

    async def then(self, reply, row):
        self.ended, self.hanging = None, True
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.ended = "cancelled"
            raise


async def test_a_hanging_harness_is_cancelled_at_its_deadline(tmp_path) -> None:
    async with scripted(digits) as server, ready(server, tmp_path, Hanging) as loop:
        with pytest.raises(HarnessFailedError, match="still running after 0.3 s.*timeout_reward"):
            await rollout(loop)
        assert loop.ended == "cancelled"
        loop.timeout_reward = -1.0
        done = await rollout(loop)
        assert done.rollout.reward == -1.0 and done.context.exhausted and len(done.rollout.turns) == 1


async def test_a_cancelled_rollout_cancels_its_harness(tmp_path) -> None:
    async with scripted(digits) as server, ready(server, tmp_path, Hanging) as loop:
        loop.harness_timeout, loop.hanging = 60.0, False
        task = asyncio.create_task(rollout(loop))
        while not loop.hanging:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert loop.ended == "cancelled" and not loop._proxy._sessions


class HangingThread(HarnessRolloutLoop):
    harness_timeout = 0.3
    harness_tools = False

    def run_harness(self, base_url, api_key, prompt, row):
        api = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        api.chat.completions.create(model="x", messages=prompt)
        self.go_on.wait(20)
        try:
            api.chat.completions.create(model="x", messages=prompt)
        except openai.APIStatusError as error:
            self.status = error.status_code
        self.ended.set()


async def test_a_hanging_thread_is_given_up_and_may_ask_no_more(tmp_path) -> None:
    async with scripted(digits) as server, ready(server, tmp_path, HangingThread) as loop:
        loop.harness_timeout = 1.5  # its client takes a while to make
        loop.go_on, loop.ended = threading.Event(), threading.Event()
        with pytest.raises(HarnessFailedError, match="still running"):
            await rollout(loop)
        asked = len(server.requests)
        loop.go_on.set()
        assert await asyncio.to_thread(loop.ended.wait, 10) and loop.status == 410
    assert len(server.requests) == asked


class Impatient(ClientLoop):
    """Gives up its first request while the engine works on it, and leaves a second one running at its end."""

    async def run_harness(self, base_url, api_key, prompt, row):
        api = self.api(base_url, api_key)
        with pytest.raises(openai.APITimeoutError):
            await api.with_options(timeout=0.1).chat.completions.create(model="x", messages=prompt)
        self.server.delay_s = 0.0
        await api.chat.completions.create(model="x", messages=prompt)
        self.server.delay_s = 30.0
        self.left = asyncio.create_task(api.chat.completions.create(model="x", messages=prompt))
        while len(self.server.requests) < 3:
            await asyncio.sleep(0.005)
        return 1.0


async def test_requests_that_nobody_waits_for_leave_no_turn(tmp_path) -> None:
    """What the harness never read had no part in the reward."""
    async with scripted(digits, delay_s=30.0) as server, ready(server, tmp_path, Impatient) as loop:
        loop.server = server
        done = await rollout(loop)
        with pytest.raises(openai.APIStatusError) as caught:
            await loop.left
        assert caught.value.status_code == 410
        assert loop.in_flight_value.value == 0
    assert len(server.requests) == 3 and len(done.rollout.turns) == 1


def test_a_harness_that_fails_while_its_rollout_is_cancelled_leaves_no_forgotten_error():
    """asyncio logs an exception that nobody looked at when the garbage collector finds it, in whatever runs then."""
    forgotten = []

    class Failing(HarnessRolloutLoop):
        def __init__(self):
            self.harness_timeout, self.go = 60.0, asyncio.Event()

        async def _call(self, base_url, api_key, prompt, row):
            await self.go.wait()
            raise ConnectionError("the sandbox is away")

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: forgotten.append(context["message"]))
        session = SimpleNamespace(failed=asyncio.Event(), key="k", context=SimpleNamespace(row={}))
        failing = Failing()
        rollout = asyncio.create_task(failing._within_deadline(session, "http://127.0.0.1:1", []))
        await asyncio.sleep(0.01)
        failing.go.set()
        rollout.cancel()
        await asyncio.wait([rollout])
        assert rollout.cancelled()
        del rollout
        gc.collect()
        await asyncio.sleep(0)

    asyncio.run(main())
    assert forgotten == []
