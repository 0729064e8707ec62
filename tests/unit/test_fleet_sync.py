"""Policy versions to several servers: every server has it proved, or is left out until it has."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from asyncgrpo_core.errors import ServerError, ServerMismatchError, WeightSyncError
from asyncgrpo_core.server.freshness import LEFT_OUT
from asyncgrpo_core.sync.fleet import FleetPublisher, SyncServer, combined
from asyncgrpo_core.sync.reports import DeliveryError, SyncReport
from asyncgrpo_core.tracking.summary import update_summary, validate_summary
from tests.unit.sync_fakes import FakeServer, Policy
from tests.unit.test_sync_publisher import publisher


class Server(FakeServer):
    """Also answers /health; `restart()` is what a new process knows: other weights, no channel."""

    def __init__(self, **settings) -> None:
        super().__init__(**settings)
        self.healthy = True
        self.connected = False
        self.health_s = 0.0

    def is_healthy(self) -> bool:
        time.sleep(self.health_s)
        return self.healthy

    def restart(self) -> None:
        self.weights, self.connected, self.healthy, self.paused = Policy(seed=5).weights, False, True, False

    def _called(self, name: str, *details) -> None:
        super()._called(name, *details)
        if not self.healthy:
            raise ServerError(f"cannot be reached for /{name}")
        if name == "init_weight_transfer":
            self.connected = True
        if name == "start_weight_update" and not self.connected:
            raise ServerError("the weight transfer engine is not initialised")


class Fleet:
    def __init__(self, tmp_path: Path, count: int = 2, **options) -> None:
        self.policy = Policy()
        self.servers = [Server() for _ in range(count)]
        self.said: list[tuple[int, int]] = []
        self.made = [0] * count

        def maker(index: int):
            def make(on_failed):
                self.made[index] += 1
                return publisher(self.servers[index], self.policy, tmp_path, on_failed=on_failed, **options)

            return make

        self.publisher = FleetPublisher(
            [SyncServer(f"http://s{i}", server, maker(i)) for i, server in enumerate(self.servers)],
            lambda index, version: self.said.append((index, version)),
        )

    def sync(self, version: int) -> SyncReport:
        self.policy.step()
        self.said.clear()
        return self.publisher.publish(version)

    def holds_it(self, index: int) -> bool:
        return torch.equal(self.servers[index].weights["w"], self.policy.weights["w"])


@pytest.fixture(autouse=True)
def asked_again_at_once(request, monkeypatch) -> None:
    """Else how long a server that failed is left alone depends on how long a busy machine took to find that out."""
    if "hanging" not in request.node.name:
        monkeypatch.setattr("asyncgrpo_core.sync.fleet._HANGING_SHARE", 0.0)


def test_every_server_gets_and_proves_the_version_one_after_the_other(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 3)
    report = fleet.sync(0)
    assert [fleet.holds_it(i) for i in range(3)] == [True] * 3 and report.verified is True
    order: list[str] = []
    for i, server in enumerate(fleet.servers):
        server._called = lambda name, *_, i=i: order.append(f"{i}{name}")  # type: ignore[method-assign]
    fleet.sync(1)
    assert fleet.said == [(0, 1), (1, 1), (2, 1)] and fleet.publisher.versions == [1, 1, 1]
    assert [call[0] for call in order] == sorted(call[0] for call in order), "the others generate meanwhile"
    assert list(tmp_path.iterdir()) == []


def test_syncs_are_counted_once_and_times_add_up(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.sync(0)
    for server in fleet.servers:
        server.delay_s = {"pause": 0.03, "update_weights": 0.05}
    report = fleet.sync(1)
    assert report.pause_s >= 0.06 and report.transfer_s >= 0.10
    assert report.total_s == pytest.approx(report.pause_s + report.barrier_s + report.transfer_s)
    stats = fleet.publisher.stats({"count": 4, "verified": 4, "unverified": 0, "mean_s": 0.0, "left_out": 2})
    assert (stats["backend"], stats["count"], stats["verified"]) == ("shm", 5, 5)
    assert stats["left_out"] == 2


def test_the_summary_has_room_for_servers_left_out(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.sync(0)
    fleet.servers[0].healthy = False
    fleet.sync(1)
    update_summary(tmp_path, weight_sync=fleet.publisher.stats())
    content = update_summary(tmp_path, weight_sync=fleet.publisher.stats({"left_out": 3}))
    assert content["weight_sync"]["left_out"] == 4
    assert not [problem for problem in validate_summary(content) if "weight_sync" in problem]


def test_one_server_is_what_a_publisher_is(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 1)
    fleet.sync(0)
    fleet.sync(1)
    stats = fleet.publisher.stats()
    assert stats["count"] == 1 and "left_out" not in stats and fleet.said == [(0, 1)]
    fleet.servers[0].fail = {"update_weights"}
    with pytest.raises(WeightSyncError, match="version 2 .*engine says no"):
        fleet.sync(2)
    assert fleet.made == [1] and fleet.said == [], "its failure ends the run; it is not met again"


def test_a_dead_server_is_left_out_and_taken_in_by_a_later_proved_sync(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, verify_sync_every=5)
    fleet.sync(0)
    fleet.servers[0].healthy = False
    report = fleet.sync(1)
    assert fleet.said == [(0, LEFT_OUT), (1, 1)] and fleet.publisher.left_out == ["http://s0"]
    assert fleet.holds_it(1) and report.verified is None
    fleet.servers[0].restart()
    fleet.sync(2)
    assert fleet.said == [(0, 2), (1, 2)] and fleet.holds_it(0) and fleet.publisher.left_out == []
    assert "prompt_logprobs" in fleet.servers[0].names[-2:], "a server that is met again proves its weights"
    stats = fleet.publisher.stats()
    assert (stats["count"], stats["left_out"]) == (2, 1)


def test_a_long_outage_is_said_when_it_begins_ends_and_now_and_then(tmp_path: Path, caplog) -> None:
    fleet = Fleet(tmp_path)
    fleet.sync(1)
    fleet.servers[1].healthy = False
    for version in range(2, 252):
        fleet.sync(version)
    fleet.servers[1].restart()
    fleet.sync(252)
    fleet.sync(253)
    said = [r.getMessage() for r in caplog.records if r.name.endswith("sync.fleet") and r.levelname == "WARNING"]
    assert [m.split(":")[1].split("//")[1].split()[0] for m in said] == ["s1"] * 4
    assert "from policy version 2 on (1 in a row" in said[0] and "does not answer /health" in said[0]
    assert ["(100 in a row" in said[1], "(200 in a row" in said[2]] == [True, True]
    assert "in use again with policy version 252; it missed 250" in said[3]


def test_a_server_that_was_started_again_between_two_syncs_is_met_anew_at_once(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.sync(0)
    fleet.servers[1].restart()
    fleet.sync(1)
    assert fleet.said[0] == (0, 1) and fleet.said[-1] == (1, 1) and fleet.holds_it(1)
    assert fleet.made == [1, 2] and fleet.publisher.stats()["left_out"] == 0


def test_a_failed_update_is_announced_before_the_server_generates_again(tmp_path: Path) -> None:
    """Frozen requests go on with half of the new weights: whoever reads their replies must know by then."""
    fleet = Fleet(tmp_path)
    fleet.sync(0)
    server, seen = fleet.servers[0], []
    server.fail = {"update_weights"}
    resume = server.resume

    def resuming() -> None:
        seen.append(list(fleet.said))
        resume()

    server.resume = resuming  # type: ignore[method-assign]
    fleet.sync(1)
    assert seen and all((0, LEFT_OUT) in said for said in seen) and not server.paused
    assert fleet.publisher.versions == [LEFT_OUT, 1]


def test_wrong_weights_at_one_server_stop_the_run(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.sync(0)
    fleet.servers[1].deaf = True
    with pytest.raises(DeliveryError, match=r"all 2 parameters \(w, bias\)"):
        fleet.sync(1)
    assert fleet.publisher.stats()["max_abs_logp_diff"] > 0.1


def test_when_no_server_is_left_the_sync_raises_what_happened(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.sync(0)
    for server in fleet.servers:
        server.healthy = False
    with pytest.raises(ServerError, match="http://s1 does not answer /health"):
        fleet.sync(1)
    assert fleet.said == [(0, LEFT_OUT), (1, LEFT_OUT)]
    fleet.servers[0].restart()
    fleet.sync(1)  # a run that was not stopped for it may go on
    assert fleet.publisher.versions == [1, LEFT_OUT]


def test_the_first_sync_has_to_reach_every_server(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.servers[1].fail = {"start_weight_update"}
    with pytest.raises(WeightSyncError, match="version 0 .*engine says no"):
        fleet.sync(0)


def test_a_server_that_comes_back_with_other_flags_stays_left_out(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.sync(0)
    fleet.servers[0].healthy = False
    fleet.sync(1)
    fleet.servers[0].restart()

    def refuse(_on_failed):
        raise ServerMismatchError("--max-logprobs is 0")

    fleet.publisher._servers[0].make_publisher = refuse
    fleet.sync(2)
    assert fleet.said == [(0, LEFT_OUT), (1, 2)]


def test_a_hanging_server_costs_a_small_share_of_the_time(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.sync(0)
    fleet.servers[0].healthy, fleet.servers[0].health_s = False, 0.05
    fleet.sync(1)
    asked = time.monotonic()
    fleet.sync(2)
    assert time.monotonic() - asked < 0.05, "not asked again within twenty times of what the question took"
    assert fleet.said == [(0, LEFT_OUT), (1, 2)]


def test_a_channel_that_cannot_be_released_holds_nothing_up(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("asyncgrpo_core.sync.fleet._CLOSE_S", 0.05)
    fleet = Fleet(tmp_path)
    fleet.sync(0)
    fleet.publisher._servers[0].publisher.close = lambda: time.sleep(5)
    fleet.servers[0].healthy = False
    started = time.monotonic()
    fleet.sync(1)
    assert time.monotonic() - started < 2


@pytest.mark.parametrize(
    ("states", "expected"),
    [([True, True], True), ([True, False], False), ([None, False], False), ([None, True], None), ([None, None], None)],
)
def test_a_sync_is_proved_when_every_server_proved_it(states, expected) -> None:
    reports = [SyncReport(3, state, 0.1 * i, 1, 2, 3, 6, 4, 5, "why") for i, state in enumerate(states)]
    got = combined(reports)
    assert got == SyncReport(3, expected, 0.1, 2, 4, 6, 12, 8, 10, "why")
