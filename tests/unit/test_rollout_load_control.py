"""The concurrency cap's transitions (reference, 'vLLM load')."""

from __future__ import annotations

from asyncgrpo_core.rollout.load_control import ConcurrencyCap
from asyncgrpo_core.server.load import LoadSample


def load(usage: float, waiting: float = 0.0) -> LoadSample:
    return LoadSample(usage, 1.0, waiting, 0.0, 10_000)


def started(ceiling: int = 512, max_model_len: int | None = 100) -> ConcurrencyCap:
    cap = ConcurrencyCap(ceiling, max_model_len)
    cap.observe(load(0.0))
    return cap


def finish(cap: ConcurrencyCap, count: int) -> None:
    for _ in range(count):
        cap.rollout_finished()


def test_it_starts_at_the_requests_that_fit_at_full_length() -> None:
    """F110."""
    assert started().value == 100
    assert started(ceiling=64).value == 64
    assert started(max_model_len=20_000).value == 1
    assert started(max_model_len=None).value == 512


def test_without_metrics_it_is_the_ceiling() -> None:
    """F111."""
    cap = ConcurrencyCap(33, 100)
    assert cap.observe(None) == 33 and cap.observe(LoadSample()) == 33


def test_a_poll_that_fails_later_changes_nothing() -> None:
    cap = started()
    assert cap.observe(None) == 100


def test_up_by_a_quarter_once_per_caps_worth_of_finished_rollouts() -> None:
    """F112."""
    cap = started()
    assert cap.observe(load(0.59)) == 100
    finish(cap, 99)
    assert cap.observe(load(0.59)) == 100
    finish(cap, 1)
    assert cap.observe(load(0.59)) == 125
    assert cap.observe(load(0.59)) == 125
    finish(cap, 125)
    assert cap.observe(load(0.59)) == 156


def test_not_up_while_requests_wait_or_the_cache_is_fuller() -> None:
    """F112."""
    cap = started()
    finish(cap, 1000)
    assert cap.observe(load(0.1, waiting=1.0)) == 100
    assert cap.observe(load(0.60)) == 100
    assert cap.observe(load(0.80)) == 100


def test_down_by_30_percent_above_80() -> None:
    """F113."""
    cap = started()
    assert cap.observe(load(0.81)) == 70
    assert cap.observe(load(0.81)) == 49


def test_it_stays_between_one_and_the_ceiling_and_leaves_one() -> None:
    cap = started(ceiling=110)
    finish(cap, 500)
    assert cap.observe(load(0.1)) == 110
    for _ in range(30):
        cap.observe(load(0.99))
    assert cap.value == 1
    finish(cap, 1)
    assert cap.observe(load(0.1)) == 2


def test_lowering_starts_the_count_of_finished_rollouts_anew() -> None:
    """F112, F113: what finished before a cut does not pay for a raise after it."""
    cap = started()
    finish(cap, 100)
    assert cap.observe(load(0.9)) == 70
    finish(cap, 69)
    assert cap.observe(load(0.1)) == 70
    finish(cap, 1)
    assert cap.observe(load(0.1)) == 87


def test_exactly_60_and_80_percent_leave_the_cap_alone() -> None:
    """F112, F113: "below 60%" and "above 80%"."""
    cap = started()
    finish(cap, 1000)
    assert cap.observe(load(0.6)) == cap.observe(load(0.8)) == 100
    assert cap.observe(load(0.5999)) == 125 and cap.observe(load(0.8001)) == 87


def test_the_first_reading_only_starts_the_cap() -> None:
    """F110: a server that is full at the start is not cut below what fits; metrics that come late start it then."""
    cap = ConcurrencyCap(512, 100)
    assert cap.observe(None) == 512
    assert cap.observe(load(0.95)) == 100
    assert cap.observe(load(0.95)) == 70


def test_each_server_counts_its_own_finished_rollouts() -> None:
    """F112 per server: 100 + 100; 100 rollouts of the second raise the second alone."""
    cap = ConcurrencyCap(512, 100, servers=2)
    for server in (0, 1):
        cap.observe(load(0.1), server)
    assert cap.value == 200
    for _ in range(100):
        cap.rollout_finished(1)
    cap.observe(load(0.1), 0)
    assert cap.observe(load(0.1), 1) == 225
    assert [server.value for server in cap.servers] == [100, 125]


def test_the_sum_is_over_servers_in_use_and_bounded() -> None:
    """F111: a server without /metrics has the whole ceiling, and so has the sum."""
    cap = ConcurrencyCap(150, 100, servers=2)
    cap.observe(load(0.1), 0)
    assert cap.observe(None, 1) == 150
    assert cap.set_usable([0]) == 100
    assert cap.set_usable([]) == 150  # nobody answers: not the caps are what holds rollouts back
