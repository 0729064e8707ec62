"""Load metrics from polls, preemptions as differences."""

from __future__ import annotations

import asyncio

import pytest

from asyncgrpo_core.metrics import MetricWindow
from asyncgrpo_core.rollout import clocks
from asyncgrpo_core.rollout.admission import RolloutGate
from asyncgrpo_core.rollout.clocks import LoadWatch
from asyncgrpo_core.rollout.load_control import ConcurrencyCap
from asyncgrpo_core.rollout.outbox import MetricOutbox
from asyncgrpo_core.server.fleet import ServerFleet
from asyncgrpo_core.server.load import LoadSample
from tests.unit.fakes import FakeVLLM


def fleet_of(*servers: FakeVLLM) -> ServerFleet:
    return ServerFleet([server.base_url for server in servers], "policy", use_token_route=True)


def reduced(*polls: list[LoadSample | None]) -> dict[str, float]:
    """The window's metrics of polls that found these loads, one per server."""
    box, window, count = MetricOutbox(), MetricWindow(), len(polls[0])
    fleet = ServerFleet([f"http://{i}" for i in range(count)], "policy", use_token_route=True)
    watch = LoadWatch(fleet, ConcurrencyCap(8, 100, count), RolloutGate(8), box)
    for loads in polls:
        watch.record(loads)
    window.extend(box.drain())
    return window.reduce()


def test_preemptions_are_the_growth_and_survive_a_server_restart() -> None:
    """F073: 10 -> 14 -> (restart) 3 -> 5: 4 + 3 + 2."""
    polls = [[LoadSample(preemptions=total)] for total in (10.0, 14.0, 3.0, 5.0)]
    assert reduced(*polls) == {"rollout/vllm_preemption_count": 9.0}


def test_usage_is_averaged_over_the_polls() -> None:
    """F072."""
    got = reduced([LoadSample(0.2, 1.0, 0.0)], [LoadSample(0.6, 3.0, 2.0)])
    assert got == {
        "rollout/vllm_kv_cache_usage_frac": 0.4,
        "rollout/vllm_running_requests": 2.0,
        "rollout/vllm_queued_requests": 1.0,
    }


async def test_a_poll_moves_the_gate() -> None:
    """F065, F110, F111."""
    text = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="25"} 1.0\nvllm:kv_cache_usage_perc{engine="0"} 0.9\n'
    async with FakeVLLM() as server, fleet_of(server) as fleet:
        gate = RolloutGate(8)
        watch = LoadWatch(fleet, ConcurrencyCap(8, 100), gate, MetricOutbox())
        await watch.poll()
        assert gate.limit == 8  # no /metrics
        server.metrics = text
        await watch.poll()
        assert gate.limit == 4  # 400 tokens / 100
        await watch.poll()
        assert gate.limit == 2  # 70 % of 4, cut


def metrics_of(blocks: int, usage: float, running: float, generated: float) -> str:
    return (
        f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{blocks}"}} 1.0\n'
        f'vllm:kv_cache_usage_perc{{engine="0"}} {usage}\nvllm:num_requests_running{{engine="0"}} {running}\n'
        f'vllm:generation_tokens_total{{engine="0"}} {generated}\n'
    )


def test_over_servers_usage_is_the_maximum_and_the_rest_are_sums() -> None:
    """F072, F073: usage max(0.2, 0.7) and 0.4 over two polls; preemptions 10 -> 12 and 1 -> 4; one did not answer."""
    first = [LoadSample(0.2, 1.0, 0.0, 10.0), LoadSample(0.7, 3.0, 2.0, 1.0), None]
    second = [LoadSample(0.4, 1.0, 0.0, 12.0), LoadSample(0.1, 1.0, 0.0, 4.0), None]
    assert reduced(first, second) == {
        "rollout/vllm_kv_cache_usage_frac": pytest.approx(0.55),
        "rollout/vllm_running_requests": 3.0,
        "rollout/vllm_queued_requests": 1.0,
        "rollout/vllm_preemption_count": 5.0,
    }


async def test_each_server_has_its_cap_and_the_gate_their_sum() -> None:
    """F110, F111: 400 and 800 tokens / 100; without the second, four; per-server metrics for several servers."""
    async with (
        FakeVLLM(metrics=metrics_of(25, 0.1, 1, 5)) as one,
        FakeVLLM(metrics=metrics_of(50, 0.1, 2, 5)) as two,
        fleet_of(one, two) as fleet,
    ):
        gate, box, window = RolloutGate(64), MetricOutbox(), MetricWindow()
        watch = LoadWatch(fleet, ConcurrencyCap(64, 100, 2), gate, box)
        await watch.poll()
        assert gate.limit == 12 and [server.cap for server in fleet.routing.servers] == [4, 8]
        fleet.routing.take_out(1, now=0.0)
        fleet.on_change()
        assert gate.limit == 4
        fleet.routing.take_out(0, now=0.0)
        fleet.on_change()
        assert gate.limit == 12  # nobody answers: what they could take is not what holds rollouts back
        fleet.routing.bring_back(0)
        await watch.poll()
        assert gate.limit == 4
    window.extend(box.drain())
    got = window.reduce()
    assert got["rollout/server_0/concurrency_cap"] == 4 and got["rollout/server_1/concurrency_cap"] == 8
    assert got["rollout/server_0/healthy"] == 1.0 and got["rollout/server_1/healthy"] == 0.5


async def test_one_server_has_no_metrics_of_its_own() -> None:
    async with FakeVLLM(metrics=metrics_of(25, 0.1, 1, 5)) as server, fleet_of(server) as fleet:
        box = MetricOutbox()
        await LoadWatch(fleet, ConcurrencyCap(8, 100), RolloutGate(8), box).poll()
    assert not [name for name, *_ in box.drain() if "server_" in name]


async def test_the_servers_are_asked_every_five_seconds(monkeypatch) -> None:
    """F111, by a clock of the test's own."""
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 4:
            raise asyncio.CancelledError

    fleet = ServerFleet("http://nowhere", "policy", use_token_route=True)
    watch = LoadWatch(fleet, ConcurrencyCap(8, 100), RolloutGate(8), MetricOutbox())
    polls = 0

    async def poll() -> None:
        nonlocal polls
        polls += 1

    watch.poll = poll  # type: ignore[method-assign]
    monkeypatch.setattr(clocks.asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await watch.run()
    assert waits == [5.0] * 4 and polls == 3
