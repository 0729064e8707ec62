"""ServerFleet against several stand-in servers: what is sent where, and what a failing server costs."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from asyncgrpo_core.errors import ServerError
from asyncgrpo_core.server import fleet as module
from asyncgrpo_core.server.fleet import ServerFleet
from asyncgrpo_core.server.freshness import LEFT_OUT
from asyncgrpo_core.server.generation import (
    RequestRejectedError,
    SamplingSettings,
    ServerFacts,
    ServerUnavailableError,
    smallest_max_logprobs,
)
from tests.unit.fakes import FakeVLLM

SAMPLING = SamplingSettings(max_tokens=16, num_logprobs=3)


@pytest.fixture(autouse=True)
def quick_watch(monkeypatch) -> None:
    monkeypatch.setattr(module, "_TICK_S", 0.01)
    monkeypatch.setattr(module, "_CHECK_EVERY_S", 0.02)
    monkeypatch.setattr(module, "_HEALTH_TIMEOUT_S", 0.2)


def fleet_of(*servers: FakeVLLM, reasons: list[str] | None = None, **more) -> ServerFleet:
    settings = {"use_token_route": True, "backoff_s": 0.01, "timeout_s": 10.0, **more}
    return ServerFleet(
        [s.base_url for s in servers], "policy", on_retry=None if reasons is None else reasons.append, **settings
    )


def salts(server: FakeVLLM) -> list[str | None]:
    return [body.get("cache_salt") for _, body in server.requests]


async def until(condition, timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


async def groups(fleet: ServerFleet, count: int, size: int, turns: int = 1) -> list:
    """Groups of rollouts of so many turns, at once; every reply."""

    async def rollout(group: int, member: int):
        return [
            await fleet.generate([group, member, t], SAMPLING, 1, "run", affinity=group, member=member)
            for t in range(turns)
        ]

    done = await asyncio.gather(*(rollout(g, m) for g in range(count) for m in range(size)))
    for group in range(count):
        fleet.forget(group)
    return [turn for rollout in done for turn in rollout]


def prompts(server: FakeVLLM) -> list[list[int]]:
    return [body["token_ids"] for _, body in server.requests]


async def test_groups_stay_together_and_servers_get_equal_shares() -> None:
    async with FakeVLLM(delay_s=0.02) as one, FakeVLLM(delay_s=0.02) as two, fleet_of(one, two) as fleet:
        await groups(fleet, count=12, size=4, turns=3)
    homes = [{p[0] for p in prompts(server)} for server in (one, two)]
    assert not homes[0] & homes[1] and homes[0] | homes[1] == set(range(12))
    assert len(homes[0]) == len(homes[1]) == 6
    assert [s.in_flight for s in fleet.routing.servers] == [0, 0]


async def test_a_group_larger_than_a_servers_room_is_spread_and_turns_stay() -> None:
    async with FakeVLLM(delay_s=0.02) as one, FakeVLLM(delay_s=0.02) as two, fleet_of(one, two) as fleet:
        for index in (0, 1):
            fleet.routing.set_cap(index, 3)
        await groups(fleet, count=1, size=6, turns=3)
    members = [{p[1] for p in prompts(server)} for server in (one, two)]
    assert sorted(map(len, members)) == [3, 3] and not members[0] & members[1]
    assert one.max_in_flight == two.max_in_flight == 3


async def test_requests_carry_the_version_of_the_server_they_go_to() -> None:
    versions = [4, 4]
    async with FakeVLLM() as one, FakeVLLM() as two, fleet_of(one, two, versions=versions) as fleet:
        await fleet.generate([1], SAMPLING, 1, "run", affinity=0)
        versions[0] = 5  # the sync has reached the first
        await fleet.generate([1], SAMPLING, 1, "run", affinity=0)
        fleet.routing.servers[0].in_flight += 1
        await fleet.generate([1], SAMPLING, 1, "run", affinity=1)
    assert salts(one) == ["run-4", "run-5"] and salts(two) == ["run-4"]


async def test_one_server_is_a_client_with_a_version() -> None:
    """F071, F094: retries, refusals and errors are the client's own."""
    reasons: list[str] = []
    async with FakeVLLM(fail={1: 503, 2: 429}.get) as server:
        async with fleet_of(server, reasons=reasons, versions=[3]) as fleet:
            await fleet.generate([1], SAMPLING, 1, "run", affinity=0, member=0)
            assert fleet.server_of(0, 0) == 0 and not fleet._watchers
        async with fleet_of(server, version=lambda: 9) as fleet:
            await fleet.generate([1], SAMPLING, 1, "run")
            await fleet.generate([1], SAMPLING, 1)
        async with fleet_of(server) as fleet:
            await fleet.generate([1], SAMPLING, 1, "run")
    assert len(reasons) == 2 and salts(server) == ["run-3"] * 3 + ["run-9", None, "run"]


async def test_settings_reach_every_client() -> None:
    async with FakeVLLM() as one, FakeVLLM() as two, fleet_of(one, two) as fleet:
        fleet.use_token_route, fleet.max_logprobs, fleet.max_retries = False, 5, 1
        assert [(c.use_token_route, c.max_logprobs, c.max_retries) for c in fleet.clients] == [(False, 5, 1)] * 2
        assert fleet.max_logprobs == 5 and fleet.base_url == f"{one.base_url}, {two.base_url}"


async def test_facts_are_what_holds_for_all() -> None:
    async with FakeVLLM(max_model_len=99) as one, FakeVLLM(token_route=False) as two, fleet_of(one, two) as fleet:
        facts = await fleet.facts()
    assert facts.max_model_len == 99 and not facts.token_route and facts.served_models == ("policy",)
    assert [smallest_max_logprobs(b) for b in ([20, -1], [-1], [5, 20], [])] == [20, -1, 5, None]
    many = [ServerFacts(frozenset(), None, ("a", "b"), 8), ServerFacts(frozenset(), 10, ("b",), None)]
    assert ServerFacts.common(many) == ServerFacts(frozenset(), 10, ("b",), 8)


# failures


async def test_a_server_of_500s_costs_a_second_attempt_and_is_left_out() -> None:
    reasons: list[str] = []
    async with (
        FakeVLLM(fail=lambda _n: 500) as bad,
        FakeVLLM() as good,
        fleet_of(bad, good, reasons=reasons, backoff_s=60.0) as fleet,  # no wait is ever needed
    ):
        turns = await groups(fleet, count=6, size=4)
        await until(lambda: fleet.routing.usable() == [1])
    assert len(turns) == 24 and sorted(prompts(good)) == sorted([g, m, 0] for g in range(6) for m in range(4))
    assert len(reasons) == len(bad.requests) >= 3
    assert "fake failure 500" in reasons[0]


class WithoutLogprobs(FakeVLLM):
    async def _generate(self, request: web.Request) -> web.Response:
        return web.json_response({"choices": [{"token_ids": [5], "finish_reason": "stop"}]})


async def test_refusals_and_malformed_replies_are_not_sent_elsewhere() -> None:
    async with FakeVLLM(fail=lambda _n: 400) as one, FakeVLLM() as two, fleet_of(one, two) as fleet:
        with pytest.raises(RequestRejectedError, match="fake failure 400"):
            await fleet.generate([1], SAMPLING, 1)
        assert not two.requests and fleet.routing.servers[0].failures == 0
    async with WithoutLogprobs() as one, FakeVLLM() as two, fleet_of(one, two) as fleet:
        with pytest.raises(ServerError, match="log-probabilities"):
            await fleet.generate([1], SAMPLING, 1)
        assert not two.requests and fleet.routing.servers[0].in_flight == 0


async def test_a_server_that_dies_with_requests_in_flight_loses_and_doubles_none() -> None:
    one, two = FakeVLLM(delay_s=0.2), FakeVLLM(delay_s=0.05)
    async with two:
        await one.__aenter__()
        async with fleet_of(one, two) as fleet:
            running = asyncio.create_task(groups(fleet, count=8, size=4, turns=2))
            await until(lambda: one.in_flight >= 8)
            await one.__aexit__()
            turns = await running
            await until(lambda: fleet.routing.usable() == [1])
    assert len(turns) == 8 * 4 * 2
    assert {tuple(t.prompt_ids) for t in turns} == {(g, m, t) for g in range(8) for m in range(4) for t in (0, 1)}


async def test_a_server_that_hangs_is_found_by_its_health_and_its_requests_move() -> None:
    async with FakeVLLM(delay_s=3600.0) as hung, FakeVLLM() as good, fleet_of(hung, good, timeout_s=3600.0) as fleet:
        running = asyncio.create_task(groups(fleet, count=6, size=2))
        await until(lambda: hung.in_flight >= 1)
        await asyncio.sleep(0.2)
        assert not running.done() and fleet.routing.usable() == [0, 1], "slow is not hung"
        hung.health = 503
        turns = await running
        assert len(turns) == 12 and fleet.routing.usable() == [1]
        assert fleet.routing.servers[0].in_flight == 0


async def test_a_server_comes_back_when_the_same_process_answers_again() -> None:
    """Its counter of generated tokens has not gone down, so it still holds its weights."""
    versions, metrics = [0, 0], "vllm:generation_tokens_total 100\n"
    async with (
        FakeVLLM(metrics=metrics) as one,
        FakeVLLM(metrics=metrics) as two,
        fleet_of(one, two, versions=versions) as fleet,
    ):
        await fleet.loads()
        one.fail = lambda _n: 503
        await groups(fleet, count=6, size=1)
        await until(lambda: fleet.routing.usable() == [1])
        one.fail = lambda _n: None
        await until(lambda: fleet.routing.usable() == [0, 1])
        before = len(one.requests)
        await groups(fleet, count=6, size=1)
        assert len(one.requests) > before


@pytest.mark.parametrize("metrics", ["vllm:generation_tokens_total 2\n", None])
async def test_a_server_that_was_started_again_waits_for_a_proved_sync(metrics) -> None:
    """Another process has other weights; where it cannot be told, it counts as another process."""
    versions, first = [3, 3], FakeVLLM(metrics="vllm:generation_tokens_total 100\n")
    async with FakeVLLM() as other:
        await first.__aenter__()
        port = first._runner.addresses[0][1]
        async with fleet_of(first, other, versions=versions) as fleet:
            await fleet.loads()
            await first.__aexit__()
            await groups(fleet, count=6, size=1)
            await until(lambda: fleet.routing.usable() == [1])
            async with FakeVLLM(metrics=metrics, port=port) as again:
                await until(lambda: fleet.routing.servers[0].healthy)
                await groups(fleet, count=4, size=2)
                assert fleet.routing.usable() == [1] and not again.requests
                versions[0] = versions[1] = 4  # proved by the trainer
                await groups(fleet, count=4, size=2)
                assert fleet.routing.usable() == [0, 1] and set(salts(again)) == {"run-4"}


async def test_a_restart_between_two_requests_is_seen_by_the_tokens_labels_and_by_the_poll() -> None:
    versions = [3, 3]
    async with (
        FakeVLLM(version="3") as one,
        FakeVLLM(version="3") as two,
        fleet_of(one, two, versions=versions) as fleet,
    ):
        await fleet.generate([1], SAMPLING, 1, "run", affinity=0)
        one.version = "default"
        turn = await fleet.generate([1], SAMPLING, 1, "run", affinity=0)
        assert len(one.requests) == 2 and len(two.requests) == 1, "the reply was thrown away"
        assert turn.output_versions and fleet.routing.usable() == [1]
        two.metrics = "vllm:generation_tokens_total 100\n"
        await fleet.loads()
        two.metrics = "vllm:generation_tokens_total 4\n"
        await fleet.loads()
        assert fleet.routing.usable() == []


async def test_a_server_that_missed_a_sync_is_refused_and_its_running_requests_are_thrown_away() -> None:
    versions = [1, 1]
    async with FakeVLLM(delay_s=0.3) as one, FakeVLLM() as two, fleet_of(one, two, versions=versions) as fleet:
        running = asyncio.create_task(fleet.generate([1], SAMPLING, 1, "run", affinity=0))
        await until(lambda: one.in_flight == 1)
        versions[0], versions[1] = LEFT_OUT, 2
        await running
        assert salts(two) == ["run-2"] and fleet.routing.usable() == [1]
        await groups(fleet, count=4, size=2)
        assert len(one.requests) == 1
        versions[0] = 3
        await groups(fleet, count=4, size=2)
        assert len(one.requests) > 1


async def test_a_reply_that_arrives_just_before_the_news_is_thrown_away_too() -> None:
    versions = [1, 1]
    async with FakeVLLM() as one, FakeVLLM() as two, fleet_of(one, two, versions=versions) as fleet:
        one.fail = lambda _n: versions.__setitem__(0, LEFT_OUT)  # a sync fails while the reply is made
        await fleet.generate([1], SAMPLING, 1, "run", affinity=0)
    assert len(one.requests) == 1 and len(two.requests) == 1


async def test_when_all_are_down_it_waits_and_gives_up_like_one_client() -> None:
    """F094: `max_retries` waits that double; the error names every server and the last reason."""
    reasons: list[str] = []
    async with (
        FakeVLLM(fail=lambda _n: 500) as one,
        FakeVLLM(fail=lambda _n: 500) as two,
        fleet_of(one, two, reasons=reasons, max_retries=3) as fleet,
    ):
        with pytest.raises(ServerUnavailableError) as caught:
            await fleet.generate([1], SAMPLING, 1)
    assert one.base_url in str(caught.value) and two.base_url in str(caught.value)
    assert "fake failure 500" in str(caught.value) and "3 waits" in str(caught.value)
    assert 3 <= len(reasons) <= 7


async def test_when_all_come_back_waiting_requests_are_answered() -> None:
    async with (
        FakeVLLM(fail=lambda _n: 500) as one,
        FakeVLLM(fail=lambda _n: 500) as two,
        fleet_of(one, two, max_retries=1000) as fleet,
    ):
        running = asyncio.create_task(groups(fleet, count=4, size=2))
        await until(lambda: fleet.routing.usable() == [])
        one.fail = two.fail = lambda _n: None
        assert len(await running) == 8


async def test_a_cancelled_request_leaves_nothing_behind() -> None:
    async with FakeVLLM(delay_s=3600) as one, FakeVLLM(delay_s=3600) as two, fleet_of(one, two) as fleet:
        running = [asyncio.create_task(fleet.generate([1], SAMPLING, 1, affinity=g)) for g in range(4)]
        await until(lambda: one.in_flight + two.in_flight == 4)
        for task in running:
            task.cancel()
        assert all(
            isinstance(e, asyncio.CancelledError) for e in await asyncio.gather(*running, return_exceptions=True)
        )
        assert [s.in_flight for s in fleet.routing.servers] == [0, 0] and fleet.routing.usable() == [0, 1]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await fleet.generate([1], SAMPLING, 1)
