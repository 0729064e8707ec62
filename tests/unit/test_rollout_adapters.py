"""A rollout and its adapter version: which name its requests carry, what the trainer sees of it, how it ends."""

from __future__ import annotations

import asyncio
import multiprocessing
from types import SimpleNamespace

import pytest
from aiohttp import web

from asyncgrpo_core.errors import RolloutError
from asyncgrpo_core.rollout.adapter_uses import PLACES, AdapterRevokedError, AdapterUses
from asyncgrpo_core.rollout.heldout import evaluate_heldout
from asyncgrpo_core.rollout.loop import AsyncRolloutLoop
from asyncgrpo_core.rollout.worker import RolloutWorker
from asyncgrpo_core.rollout.worker_process import SharedValues
from asyncgrpo_core.server.fleet import ServerFleet
from asyncgrpo_core.server.generation import SamplingSettings, ServerUnavailableError, UnknownModelError
from asyncgrpo_core.types import Rollout
from tests.unit.fakes import EOS_ID, FakeTokenizer, FakeVLLM, ThreadedFakeVLLM
from tests.unit.rollout_run import ROWS, config_of, length_reward, loop_run

STEM = "asyncgrpo-0a1b2c3d"


class AdapterVLLM(FakeVLLM):
    """Answers under the names in `known` alone, and refuses others with vLLM's own words."""

    def __init__(self, **settings) -> None:
        self.known: set[str] = set()
        super().__init__(**settings)

    async def _enter(self, route: str, body: dict):
        if body["model"] not in self.known:
            self.requests.append((route, body))
            message = f"The model `{body['model']}` does not exist. Valid aliases: policy."
            return web.json_response({"error": {"message": message, "code": 404}}, status=404)
        return await super()._enter(route, body)

    @property
    def models(self) -> list[str]:
        return [body["model"] for _, body in self.requests]


class TwoTurns(AsyncRolloutLoop):
    """Two turns, the second when `gate` is open."""

    gate: asyncio.Event

    async def generate_one(self, prompt, tools, group_id=0):
        first = await self.generate_one_turn([5, 6])
        await self.gate.wait()
        second = await self.generate_one_turn([5, 6, *first.output_ids, 7])
        text = "x" * len(second.output_ids)
        ids = [*first.output_ids, *second.output_ids]
        return Rollout([{"role": "assistant", "content": text}], ids, [first, second])


def uses_of(version=None) -> AdapterUses:
    current = SimpleNamespace(value=0) if version is None else version
    return AdapterUses(STEM, current, [0] * PLACES, SimpleNamespace(value=0))


def run_with_adapters(server, tmp_path, **settings):
    run = loop_run(server, tmp_path, loop_cls=TwoTurns, max_concurrent_rollouts=4, allowance=1, **settings)
    run.loop.gate = asyncio.Event()
    run.loop.lora_name = STEM
    run.loop.adapters = uses_of(run.version)
    return run


async def test_f143_all_turns_of_a_rollout_name_the_version_it_began_with(tmp_path):
    async with AdapterVLLM(known={f"{STEM}-v0", f"{STEM}-v1"}) as server:
        run = run_with_adapters(server, tmp_path)
        counts = run.loop.adapters._counts

        def moved_on() -> bool:
            if len(server.requests) == 4 and run.version.value == 0:
                assert counts[0] == 4, "the trainer sees four rollouts under version 0"
                run.version.value = 1  # a sync
                run.loop.gate.set()
            return bool(run.ended())

        await run.until(moved_on)
        assert server.models[:8] == [f"{STEM}-v0"] * 8
        sample = run.ended()[0].samples[0]
        assert set(sample.sequence.versions.tolist()) == {0}, "not the label of the server's base weights"
        assert counts[0] == 0


async def test_base_requests_never_go_out_once_there_is_an_adapter(tmp_path):
    async with AdapterVLLM(known={f"{STEM}-v{n}" for n in range(9)}) as server:
        run = run_with_adapters(server, tmp_path)
        run.loop.gate.set()
        run.allowance.value = 10**6

        def moving_on() -> bool:
            run.version.value = min(len(run.ended()), 8)
            return len(run.ended()) >= 5

        await run.until(moving_on)
        assert all(model.startswith(f"{STEM}-v") for model in server.models)
        assert len(set(server.models)) > 1


async def test_the_prefix_cache_stays_whole_over_a_sync(tmp_path):
    """The name is a policy version by itself: the salt of a rollout's turns must not change with the sync."""
    async with AdapterVLLM(known={f"{STEM}-v0"}) as server:
        run = run_with_adapters(server, tmp_path)

        def moved_on() -> bool:
            if len(server.requests) == 4:
                run.version.value = 1
                server.known.add(f"{STEM}-v1")
                run.loop.gate.set()
            return bool(run.ended())

        await run.until(moved_on)
        salts = {body["cache_salt"] for _, body in server.requests if body["model"] == f"{STEM}-v0"}
        assert len(salts) == 1


async def test_a_rollout_whose_version_is_taken_away_ends_and_its_group_may_come_again(tmp_path):
    async with AdapterVLLM(known={f"{STEM}-v0"}) as server:
        run = run_with_adapters(server, tmp_path)

        def taken() -> bool:
            if len(server.requests) == 4:
                run.loop.adapters._oldest.value = 1
            return bool(run.ended())

        await run.until(taken)
        record = run.ended()[0]
        assert record.outcome == "failed" and "policy version 0 had to make room" in record.error
        assert run.loop.adapters._counts[0] == 0
        assert not run.failed.is_set(), "the run goes on"


async def test_a_server_that_was_started_again_ends_the_run_after_a_few_groups(tmp_path):
    """It knows no adapter until the next sync; regenerating for ever would use the whole epoch up."""
    async with AdapterVLLM() as server:
        run = run_with_adapters(server, tmp_path)
        with pytest.raises(RolloutError, match=r"does not know policy version 0"):
            await run.until(lambda: False)
        assert len(run.ended()) <= 10


async def test_a_fleet_asks_another_server_for_an_adapter_that_one_does_not_know():
    async with AdapterVLLM() as restarted, AdapterVLLM(known={"a-v1"}) as other:
        fleet = ServerFleet([restarted.base_url, other.base_url], "a", use_token_route=True, backoff_s=0.01)
        async with fleet:
            for _ in range(4):
                turn = await fleet.generate([3], SamplingSettings(max_tokens=4), 1, "run", model="a-v1")
                assert turn.output_ids
            assert all(body["cache_salt"] == "run" for _, body in other.requests)
            fleet.max_retries = 0
            with pytest.raises(ServerUnavailableError, match="does not exist"):
                await fleet.generate([3], SamplingSettings(max_tokens=4), 1, "run", model="a-v2")


async def test_one_server_says_that_it_does_not_know_a_model():
    async with AdapterVLLM(known={"a-v1"}) as server, ServerFleet(server.base_url, "a", use_token_route=True) as fleet:
        await fleet.generate([3], SamplingSettings(max_tokens=4), 1, model="a-v1")
        with pytest.raises(UnknownModelError, match="does not exist"):
            await fleet.generate([3], SamplingSettings(max_tokens=4), 1, model="a-v2")


async def test_uses_are_counted_through_errors_and_cancellation():
    uses = uses_of()

    async def fail(_version):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await uses.run(fail)
    outside = asyncio.create_task(uses.run(lambda _version: asyncio.sleep(60)))
    await asyncio.sleep(0.01)
    assert uses._counts[0] == 1
    outside.cancel()
    with pytest.raises(asyncio.CancelledError):
        await outside
    assert uses._counts[0] == 0 and not uses._running


async def test_only_older_versions_end():
    uses = uses_of()
    old = asyncio.create_task(uses.run(lambda _version: asyncio.sleep(60)))
    await asyncio.sleep(0.01)
    uses._current.value = 3
    new = asyncio.create_task(uses.run(lambda version: asyncio.sleep(0.05, version)))
    await asyncio.sleep(0.01)
    uses._oldest.value = 3
    uses.end_revoked()
    uses.end_revoked()
    with pytest.raises(AdapterRevokedError):
        await old
    assert await new == 3


async def test_a_sync_between_looking_and_counting_does_not_lose_the_rollout():
    """The trainer writes the version first and reads the count then; the worker the other way round."""

    class Moving:
        reads = 0

        @property
        def value(self) -> int:
            self.reads += 1
            return 4 if self.reads == 1 else 5

    uses = uses_of(Moving())

    async def version_of(version):
        assert (uses._counts[4], uses._counts[5]) == (0, 1)
        return version

    assert await uses.run(version_of) == 5


def test_the_trainer_sees_counts_through_shared_memory(tmp_path):
    shared = SharedValues.create(multiprocessing.get_context("spawn"), 0, 0)
    worker = object.__new__(RolloutWorker)
    worker._shared, worker._process = shared, SimpleNamespace(is_alive=lambda: True)
    shared.adapter_uses[PLACES - 1] = 2
    assert worker.adapter_in_use(PLACES - 1) and not worker.adapter_in_use(0)
    worker.revoke_adapters(7)
    worker.revoke_adapters(5)
    assert shared.oldest_adapter.value == 7, "never back"
    worker._process = SimpleNamespace(is_alive=lambda: False)
    assert not worker.adapter_in_use(PLACES - 1), "a dead worker names nothing"


def test_held_out_requests_name_the_version_that_is_evaluated():
    with ThreadedFakeVLLM() as server:
        result = evaluate_heldout(
            config=config_of(server),
            model_name="policy",
            processing_class=FakeTokenizer(),
            eos_token_ids=[EOS_ID],
            rows=ROWS,
            reward_funcs=[length_reward],
            seed=0,
            lora_name=STEM,
            model_version=6,
        )
        assert result.n == len(ROWS)
        assert {body["model"] for _, body in server.fake.requests} == {f"{STEM}-v6"}


def test_a_hook_that_sends_its_own_requests_is_told_the_name(tmp_path):
    from asyncgrpo_core.rollout.context import FirstPrompt, RolloutContext, current_rollout
    from asyncgrpo_core.types import Slot

    run = loop_run(FakeVLLM(base_url="http://127.0.0.1:1"), tmp_path)
    context = RolloutContext(Slot(0, 0, 0), 0, 0, FirstPrompt())
    token = current_rollout.set(context)
    try:
        assert run.loop.request_model() == "policy"
        run.loop.adapters, context.adapter_version = uses_of(), 3
        assert run.loop.request_model() == f"{STEM}-v3"
    finally:
        current_rollout.reset(token)
