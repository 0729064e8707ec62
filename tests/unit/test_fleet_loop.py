"""A rollout loop over two servers: groups, failures and versions as the trainer sees them."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace

import pytest

from asyncgrpo_core.rollout.loop import AsyncRolloutLoop
from asyncgrpo_core.server import fleet as fleet_module
from asyncgrpo_core.server.fleet import ServerFleet
from asyncgrpo_core.server.freshness import LEFT_OUT
from asyncgrpo_core.types import Rollout, TurnRecord
from tests.unit.fakes import FakeVLLM
from tests.unit.rollout_run import LoopRun, loop_run


class FleetLoop(AsyncRolloutLoop):
    """Waits milliseconds, not seconds, before it sends a request again."""

    async def connect(self) -> ServerFleet:
        servers = await super().connect()
        servers.backoff_s = 0.01
        return servers


class TwoTurns(FleetLoop):
    """Two requests with a slow tool between them."""

    running = most = 0

    async def generate_one(self, prompt, tools, group_id=0) -> Rollout:
        cls = type(self)
        cls.running += 1
        cls.most = max(cls.most, cls.running)
        first = await self.generate_one_turn([5, 6])
        await asyncio.sleep(0.02)
        second = await self.generate_one_turn([*first.prompt_ids, *first.output_ids, 7])
        cls.running -= 1
        return Rollout(
            [{"role": "assistant", "content": "x"}],
            second.output_ids,
            [first, second],
            reward=float(len(second.output_ids)),
        )


@pytest.fixture(autouse=True)
def two_servers(monkeypatch) -> None:
    monkeypatch.setattr(fleet_module, "_TICK_S", 0.01)
    monkeypatch.setattr(fleet_module, "_CHECK_EVERY_S", 0.02)
    monkeypatch.setattr(fleet_module, "_HEALTH_TIMEOUT_S", 0.2)


def run_over(*servers: FakeVLLM, folder, loop_cls=FleetLoop, **more) -> LoopRun:
    urls = [server.base_url for server in servers]
    run = loop_run(servers[0], folder, loop_cls=loop_cls, vllm_server_base_url=urls, **more)
    run.loop.server_versions = [0] * len(servers)
    return run


def seeds(*servers: FakeVLLM) -> Counter:
    return Counter(body["sampling_params"]["seed"] for server in servers for _, body in server.requests)


def check_nothing_lost_or_doubled(run: LoopRun) -> None:
    """Every group that was announced before the last one that ended has ended once, with all of its rollouts."""
    ended = Counter((r.slot, r.generation) for r in run.ended())
    assert set(ended.values()) == {1}
    for record in run.ended():
        assert record.outcome in ("scored", "zero_std"), record.error
    announced = [pair for r in run.records for pair in r.dispatched]
    assert len(announced) == len(set(announced)) and set(ended) <= set(announced)


async def test_both_servers_share_the_groups_and_turns_stay(tmp_path) -> None:
    async with FakeVLLM(delay_s=0.01) as one, FakeVLLM(delay_s=0.01) as two:
        run = run_over(one, two, folder=tmp_path, loop_cls=TwoTurns, max_concurrent_rollouts=32)
        await run.until(lambda: len(run.ended()) >= 20)
    check_nothing_lost_or_doubled(run)
    shares = [len(server.requests) for server in (one, two)]
    assert min(shares) > 0.3 * sum(shares)
    for server in (one, two):  # a second turn begins with a first turn's prompt and reply, and went to its server
        first = sum(body["token_ids"] == [5, 6] for _, body in server.requests)
        assert abs(2 * first - len(server.requests)) <= 32


async def test_a_slot_is_kept_during_tools_and_between_turns(tmp_path) -> None:
    """F114: at most max_concurrent_rollouts rollouts are under way, those that wait for a tool included."""
    TwoTurns.running = TwoTurns.most = 0
    async with FakeVLLM() as one, FakeVLLM() as two:
        run = run_over(one, two, folder=tmp_path, loop_cls=TwoTurns, max_concurrent_rollouts=4, num_generations=3)
        await run.until(lambda: len(run.ended()) >= 6)
    assert TwoTurns.most == 4
    assert max(one.max_in_flight, two.max_in_flight) <= 4


@pytest.mark.parametrize("death", ["500s", "killed", "hung"])
async def test_a_server_that_dies_in_the_middle_costs_no_group(tmp_path, death) -> None:
    one, two = FakeVLLM(delay_s=0.02), FakeVLLM(delay_s=0.02)
    async with two:
        await one.__aenter__()
        run = run_over(one, two, folder=tmp_path, max_concurrent_rollouts=24, vllm_server_timeout=3600.0)
        task = asyncio.create_task(run.until(lambda: len(run.ended()) >= 40))
        while len(one.requests) < 20:
            await asyncio.sleep(0.002)
        if death == "500s":
            one.fail = lambda _n: 500
        elif death == "killed":
            await one.__aexit__()
        else:
            one.delay_s, one.health = 3600.0, 503
        await task
        if death != "killed":
            await one.__aexit__()
    check_nothing_lost_or_doubled(run)
    assert len(two.requests) > len(one.requests)
    again = [seed for seed, count in seeds(one, two).items() if count > 1]
    assert len(again) <= run.metrics().get("rollout/vllm_retry_count", 0), "only what failed was sent twice"
    if death != "killed":
        assert again


async def test_groups_during_a_rolling_sync_and_after_a_missed_one(tmp_path) -> None:
    """The versions of the servers differ for a while; none of a server that missed a sync reaches a sample."""
    async with FakeVLLM(version="0", delay_s=0.01) as one, FakeVLLM(version="0", delay_s=0.01) as two:
        run = run_over(one, two, folder=tmp_path, max_concurrent_rollouts=16)
        task = asyncio.create_task(run.until(lambda: any(r.model_version == 2 for r in run.ended())))
        while len(one.requests) < 10 or len(two.requests) < 10:
            await asyncio.sleep(0.002)
        one.version, run.loop.server_versions[0] = "1", 1
        await asyncio.sleep(0.05)
        two.version, run.loop.server_versions[1], run.version.value = "1", 1, 1
        await asyncio.sleep(0.05)
        run.loop.server_versions[0] = LEFT_OUT  # a sync fails there, half of the weights are in
        one.version, count = "666", len(one.requests)
        two.version, run.loop.server_versions[1], run.version.value = "2", 2, 2
        await task
        assert len(one.requests) <= count + 16
    check_nothing_lost_or_doubled(run)
    samples = [s.sequence for r in run.ended() for s in r.samples]
    versions = {int(v) for s in samples for v in s.versions[s.loss_mask.astype(bool)]}
    assert versions <= {0, 1, 2} and 2 in versions


async def test_one_server_costs_nothing_measurable() -> None:
    """The fleet's own share of a request to one server: under 50 microseconds (a request takes milliseconds)."""
    import time

    fleet = ServerFleet("http://nowhere", "policy", versions=[3], use_token_route=True)
    turn = TurnRecord([1], [2], [-1.0])

    async def answered(*_args, **_kwargs):
        return turn

    fleet.clients = [SimpleNamespace(generate=answered)]
    best = float("inf")
    for _ in range(20):
        started = time.perf_counter()
        for _ in range(200):
            await fleet.generate([1], None, 1, "run", affinity=1, member=0)
        best = min(best, (time.perf_counter() - started) / 200)
    assert best < 50e-6
