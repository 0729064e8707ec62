"""The metric sink: the caller never waits, an outage loses nothing, names fit the tracker."""

from __future__ import annotations

import math
import threading
import time

import pytest

from asyncgrpo_core.tracking.sink import BATCH, BufferedSink, PointsRefused, metric_name


class Tracker:
    """Takes points, or fails as long as `away` is set."""

    def __init__(self) -> None:
        self.points: list = []
        self.calls: list[int] = []
        self.away = threading.Event()
        self.refuse = ""

    def send(self, points) -> None:
        self.calls.append(len(points))
        if self.away.is_set():
            raise ConnectionError("tracker is away")
        if self.refuse and any(point.name == self.refuse for point in points):
            raise PointsRefused("no such name")
        self.points.extend(points)


@pytest.fixture
def tracker():
    return Tracker()


def test_points_arrive_in_order_and_in_batches_of_at_most_a_thousand(tracker):
    sink = BufferedSink(tracker.send, every_s=0.01)
    for step in range(30):
        sink.log({f"m{k}": step * k for k in range(120)}, step)
    assert sink.close(10)
    assert max(tracker.calls) <= BATCH
    assert [(p.name, p.value, p.step) for p in tracker.points] == [
        (f"m{k}", step * k, step) for step in range(30) for k in range(120)
    ]
    assert sink.stored == 3600


def test_outage_keeps_the_points_and_sends_them_later(tracker):
    sink = BufferedSink(tracker.send, every_s=0.01, retry_s=0.01)
    tracker.away.set()
    sink.log({"reward": 1.0}, 1)
    sink.log({"reward": 2.0}, 2)
    assert not sink.flush(0.2)
    assert sink.failures > 0
    tracker.away.clear()
    assert sink.close(10)
    assert [p.value for p in tracker.points] == [1.0, 2.0]
    assert sink.dropped == 0


def test_caller_does_not_wait_while_the_tracker_hangs():
    release = threading.Event()
    sink = BufferedSink(lambda points: release.wait(30) and None, every_s=0.001)
    longest = 0.0
    for step in range(200):
        started = time.perf_counter()
        sink.log({"a": 1.0, "b": 2.0}, step)
        longest = max(longest, time.perf_counter() - started)
    assert not sink.flush(0.05)
    release.set()
    assert sink.close(10)
    assert longest < 5.0  # the hanging call lasts 30 s


def test_full_queue_drops_the_oldest_and_counts_them(tracker):
    tracker.away.set()
    sink = BufferedSink(tracker.send, every_s=0.001, retry_s=0.01, capacity=2 * BATCH)
    for step in range(3 * BATCH):
        sink.log({"x": float(step)}, step)
    tracker.away.clear()
    assert not sink.close(10)  # something was lost, and it says so
    assert sink.dropped == BATCH
    assert sink.stored == 2 * BATCH
    assert tracker.points[-1].step == 3 * BATCH - 1


def test_refused_points_do_not_block_the_others(tracker, caplog):
    tracker.refuse = "bad"
    sink = BufferedSink(tracker.send, every_s=0.01)
    sink.log({"bad": 1.0}, 1)
    sink.flush(10)
    sink.log({"good": 1.0}, 1)
    assert not sink.close(10)
    assert [p.name for p in tracker.points] == ["good"]
    assert sink.dropped == 1
    assert "refused" in caplog.text


def test_steps_that_are_stored_already_are_skipped_per_metric(tracker):
    """A resume at step 20 of a run that logged up to 26, killed half-way through step 26's metrics."""
    sink = BufferedSink(tracker.send, stored={"loss": 26, "reward": 25}, every_s=0.01)
    for step in range(21, 28):
        sink.log({"loss": 0.0, "reward": 0.0, "heldout": 0.0}, step)
    assert sink.close(10)
    steps = {name: [p.step for p in tracker.points if p.name == name] for name in ("loss", "reward", "heldout")}
    assert steps == {"loss": [27], "reward": [26, 27], "heldout": list(range(21, 28))}


def test_nan_stays_and_infinity_becomes_the_largest_float(tracker):
    sink = BufferedSink(tracker.send, every_s=0.01)
    sink.log({"a": math.nan, "b": math.inf, "c": -math.inf}, 0)
    sink.close(10)
    a, b, c = (p.value for p in tracker.points)
    assert math.isnan(a)
    assert (b, c) == (1.7976931348623157e308, -1.7976931348623157e308)


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("rollout/generated_tokens_per_s", "rollout/generated_tokens_per_s"),
        ("/rewards//len(x)=3/", "rewards/len_x__3"),
        ("a/../b", "a/b"),
        ("50%", "50_"),
        ("größe", "gr__e"),
        ("//", "_"),
        ("x" * 300, "x" * 250),
    ],
)
def test_names_fit_mlflow(name, clean):
    assert metric_name(name) == clean


def test_logging_after_close_is_counted_not_raised(tracker):
    sink = BufferedSink(tracker.send)
    assert sink.close(5)
    sink.log({"a": 1.0}, 1)
    assert sink.dropped == 1
