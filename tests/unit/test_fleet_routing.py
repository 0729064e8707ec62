"""The routing rule: which server a request goes to, and when a server is out of use."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncgrpo_core.server.freshness import LEFT_OUT, Freshness
from asyncgrpo_core.server.load import LoadSample
from asyncgrpo_core.server.routing import OUT_AFTER, ServerRouting
from asyncgrpo_core.types import TurnRecord


def routing(loads: list[int], caps: list[int] | None = None, **more) -> ServerRouting:
    """Servers with so many requests in flight."""
    made = ServerRouting(len(loads), 10, **more)
    for index, load in enumerate(loads):
        made.servers[index].in_flight = load
        if caps is not None:
            made.set_cap(index, caps[index])
    return made


@pytest.mark.parametrize(
    ("loads", "caps", "chosen"),
    [
        ([3, 1, 2], [10, 10, 10], 1),
        ([0, 0], [10, 10], 0),  # the first of equals
        ([4, 6], [8, 16], 1),  # loads are shares of the cap: 1/2 against 3/8
        ([10, 9], [10, 10], 1),  # room goes before a smaller share ...
        ([5, 40], [5, 50], 1),
        ([10, 12], [10, 10], 0),  # ... and without any, a running rollout's turn goes to the least loaded
    ],
)
def test_a_new_group_goes_to_the_least_loaded_server(loads, caps, chosen) -> None:
    assert routing(loads, caps).choose(group=7) == chosen


def test_a_group_stays_on_its_server_while_that_has_room() -> None:
    made = routing([0, 0])
    assert made.choose(group=1) == 0
    made.started(0, group=1, member=0)
    assert [made.choose(group=1, member=m) for m in range(4)] == [0] * 4  # although server 1 is idle
    assert made.choose(group=2) == 1
    made.servers[0].in_flight = 10
    assert made.choose(group=1, member=5) == 1  # full: elsewhere ...
    made.started(1, group=1, member=5)
    made.servers[0].in_flight = 9
    assert made.choose(group=1, member=6) == 0  # ... but the group's place stays,
    assert made.choose(group=1, member=5) == 1  # and a later turn goes where its earlier turns are
    assert made.server_of(1, 5) == 1 and made.server_of(1, 0) == 0 and made.server_of(1, 6) is None


def test_a_group_moves_when_its_server_is_out() -> None:
    made = routing([0, 0, 0])
    made.started(0, group=1, member=0)
    made.take_out(0, now=0.0)
    assert made.choose(group=1, member=0) == 1
    made.started(1, group=1, member=0)
    made.servers[1].in_flight = 5
    assert made.choose(group=1, member=1) == 1, "the rest follows: the prompt is cached there now"
    made.bring_back(0)
    assert made.choose(group=1, member=1) == 1, "and stays"


def test_affinities_end_with_their_group_and_are_bounded() -> None:
    made = routing([0, 0], max_groups=3)
    for group in range(5):
        made.started(1, group=group, member=0)
    assert made.num_affinities == 3 and made.server_of(0, 0) is None and made.server_of(4, 0) == 1
    made.forget(4)
    assert made.server_of(4, 0) is None and made.num_affinities == 2
    made.forget(4)  # again is fine
    made.started(0)  # a request of no group
    assert made.num_affinities == 2


def test_servers_that_failed_this_request_are_the_last_choice() -> None:
    made = routing([0, 5])
    assert made.choose(avoid={0}) == 1
    assert made.choose(avoid={0, 1}) == 0
    made.set_stale(0, True)
    assert made.choose(avoid={1}) == 1
    made.set_stale(1, True)
    assert made.choose() is None


# in use -> out -> in use


def test_it_goes_out_after_failures_in_a_row_only() -> None:
    made = ServerRouting(2, 10)
    outcomes = []
    for _ in range(OUT_AFTER - 1):
        made.started(0)
        outcomes.append(made.failed(0, now=5.0))
    made.started(0)
    made.finished(0)
    for _ in range(OUT_AFTER):
        made.started(0)
        outcomes.append(made.failed(0, now=5.0))
    assert outcomes == [False] * (2 * OUT_AFTER - 2) + [True]
    assert made.usable() == [1] and made.servers[0].retry_at == 6.0 and made.servers[0].in_flight == 0
    made.started(0)
    assert not made.failed(0, now=9.0), "it is out already"


def test_health_checks_count_like_requests_and_cancelled_requests_do_not() -> None:
    made = ServerRouting(1, 10)
    for _ in range(OUT_AFTER):
        made.started(0)
        made.gave_up(0)
    assert made.usable() == [0] and made.servers[0].in_flight == 0
    assert [made.missed(0, now=1.0) for _ in range(OUT_AFTER)] == [False] * (OUT_AFTER - 1) + [True]


def test_probes_come_later_and_later_until_a_request_succeeds() -> None:
    made = ServerRouting(1, 10)
    made.take_out(0, now=0.0)
    due = []
    for _ in range(7):
        due.append(made.servers[0].retry_at)
        made.probe_failed(0, now=made.servers[0].retry_at)
    assert due == [1.0, 3.0, 7.0, 15.0, 31.0, 61.0, 91.0]
    made.bring_back(0)
    assert made.usable() == [0] and made.servers[0].failures == 0
    made.take_out(0, now=100.0)
    assert made.servers[0].retry_at == 130.0, "healthy, and failing again: not at once"
    made.bring_back(0)
    made.started(0)
    made.finished(0)
    made.take_out(0, now=200.0)
    assert made.servers[0].retry_at == 201.0


EVENTS = st.sampled_from(["send", "send", "send", "finish", "fail", "give up", "out", "back", "stale", "fresh"])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(EVENTS, st.integers(0, 2), st.integers(0, 5)), max_size=60))
def test_whatever_happens_only_usable_servers_are_chosen_and_counts_add_up(events) -> None:
    made, flying = ServerRouting(3, 4, max_groups=4), [0, 0, 0]
    for event, index, group in events:
        if event == "send":
            chosen = made.choose(group, member=index)
            assert (chosen is None) == (not made.usable())
            if chosen is not None:
                assert made.servers[chosen].usable
                if made.servers[chosen].in_flight >= 4:
                    assert all(made.servers[i].in_flight >= 4 for i in made.usable())
                made.started(chosen, group, index)
                flying[chosen] += 1
        elif event in ("finish", "fail", "give up") and flying[index]:
            flying[index] -= 1
            {"finish": made.finished, "give up": made.gave_up, "fail": lambda i: made.failed(i, 0.0)}[event](index)
        elif event == "out":
            made.take_out(index, 0.0)
        elif event == "back":
            made.bring_back(index)
        elif event in ("stale", "fresh"):
            made.set_stale(index, event == "stale")
        assert [server.in_flight for server in made.servers] == flying
        assert made.num_affinities <= 4


# fresh -> stale -> fresh


def turn(versions: list[int] | None) -> TurnRecord:
    return TurnRecord([1], [2], [-1.0], output_versions=versions)


def test_a_server_that_missed_a_sync_is_stale_until_one_reaches_it() -> None:
    versions = [3, 3]
    fresh = Freshness(2, versions)
    assert not fresh.is_stale(1)
    versions[0] = 4  # the sync is under way: one after the other
    assert not fresh.is_stale(0) and not fresh.is_stale(1)
    versions[1] = LEFT_OUT
    assert fresh.is_stale(1) and not fresh.is_stale(0)
    versions[1] = 5
    assert not fresh.is_stale(1)


@pytest.mark.parametrize("at", [7, LEFT_OUT])
def test_a_new_process_is_stale_until_the_next_sync_even_when_its_version_looks_right(at) -> None:
    versions = [at]
    fresh = Freshness(1, versions)
    fresh.lost(0)
    assert fresh.is_stale(0)
    versions[0] = LEFT_OUT
    assert fresh.is_stale(0)
    versions[0] = 8
    assert not fresh.is_stale(0)
    versions[0] = 7
    assert not fresh.is_stale(0), "forgotten once it was proved"


@pytest.mark.parametrize(
    ("readings", "verdicts"),
    [
        ([10, 10, 12], [None, False, False]),
        ([10, 3, 4], [None, True, False]),  # the counter went down: another process
        ([10, None, 11], [None, None, False]),
        ([0, 0], [None, None]),  # nothing generated yet: cannot be told
        ([None], [None]),
    ],
)
def test_a_new_process_is_known_by_its_counter(readings, verdicts) -> None:
    fresh = Freshness(1, [0])
    loads = [None if r is None else LoadSample(generated_tokens=float(r)) for r in readings]
    assert [fresh.saw_load(0, load) for load in loads] == verdicts


def test_a_new_process_is_known_by_tokens_without_a_version() -> None:
    fresh = Freshness(2, [1, 1])
    assert not fresh.saw_turn(0, turn(None)), "an older vLLM never says"
    assert not fresh.saw_turn(1, turn([1]))
    assert not fresh.saw_turn(0, turn(None)) and fresh.saw_turn(1, turn(None))
    assert not fresh.saw_turn(1, TurnRecord([1], [], [])), "no token, nothing to say"


def test_without_a_trainer_nothing_is_stale() -> None:
    fresh = Freshness(1, None)
    fresh.lost(0)
    assert not fresh.is_stale(0)
