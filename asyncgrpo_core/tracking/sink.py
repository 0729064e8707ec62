"""Metrics on their way to the tracker: the caller never waits and never fails.

    trainer.log ──► BufferedSink.log (a queue, microseconds) ──► thread ──► send(points) ──► MLflow log_batch

An outage keeps the points and tries again; only when the queue is full are the oldest dropped, and counted.
"""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

BATCH = 1000  # MLflow takes at most this many metrics in one log_batch
_MAX_NAME = 250
_FORBIDDEN = re.compile(r"[^\w .:/-]", re.ASCII)

logger = logging.getLogger(__name__)


class MetricPoint(NamedTuple):
    """One value of one metric. `time_ms`: Unix time in milliseconds when it was logged."""

    name: str
    value: float
    time_ms: int
    step: int


class PointsRefused(Exception):
    """Raised by a `send` for points that the tracker will never take; sending them again would block the rest."""


class MetricSink(Protocol):
    """Where logged metrics go. `log` must return at once, whatever the state of the tracker."""

    def log(self, metrics: dict[str, float], step: int) -> None: ...

    def flush(self, timeout_s: float) -> bool: ...

    def close(self, timeout_s: float) -> bool: ...


class NullSink:
    """For runs without a tracker."""

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Forget them."""

    def flush(self, timeout_s: float) -> bool:
        return True

    def close(self, timeout_s: float) -> bool:
        return True


def metric_name(name: str) -> str:
    """A name that MLflow takes: letters, digits, `_ . : / -` and spaces, no empty path part, at most 250 long.

    Example: "/rewards//len(x)=3" -> "rewards/len_x__3".
    """
    allowed = _FORBIDDEN.sub("_", name)[:_MAX_NAME]
    return "/".join(part for part in allowed.split("/") if part.strip(" .")) or "_"


class BufferedSink:
    """A MetricSink that hands points to `send` from one thread, in order, at most 1000 at a time.

    Args:
        send: stores points in the tracker; called again with the same points when it raises (PointsRefused: not).
        stored: metric name -> highest step that is stored already; points up to it are skipped (a resume trains some
            steps again). Per metric, because a kill can hit when half of a step's metrics are stored.
        capacity: most points held while the tracker is away (at least 2000).
        retry_s: first wait after a failure, in seconds; doubles up to 30 s.
    """

    def __init__(
        self,
        send: Callable[[Sequence[MetricPoint]], None],
        *,
        stored: Mapping[str, int] | None = None,
        capacity: int = 200_000,
        every_s: float = 1.0,
        retry_s: float = 1.0,
    ) -> None:
        if capacity < 2 * BATCH:
            raise ValueError(f"capacity must be at least {2 * BATCH}, got {capacity}")
        self._send, self._already, self._capacity = send, dict(stored or {}), capacity
        self._every_s, self._retry_s = every_s, retry_s
        self._points: deque[MetricPoint] = deque()
        self._changed = threading.Condition()
        self._hurry = False
        self._closing = False
        self._sending = 0
        self.dropped = 0  # points given up because the queue was full
        self.failures = 0  # failed calls to the tracker
        self.stored = 0  # points stored
        self._thread = threading.Thread(target=self._run, name="metric-sink", daemon=True)
        self._thread.start()

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Queue one step's metrics. Never blocks on the tracker, never raises."""
        now = int(time.time() * 1000)
        points = [MetricPoint(metric_name(name), _number(value), now, step) for name, value in metrics.items()]
        if self._already:
            points = [point for point in points if step > self._already.get(point.name, step - 1)]
        with self._changed:
            if self._closing:
                self.dropped += len(points)
                return
            self._points.extend(points)
            while len(self._points) > self._capacity:
                # What is being sent right now stays at the left end until it is stored.
                del self._points[self._sending]
                self.dropped += 1
            self._changed.notify_all()

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait until everything logged so far is stored. False when it took longer than `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._hurry = True
            self._changed.notify_all()
            while self._points and self._thread.is_alive():
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            self._hurry = False
            return not self._points

    def close(self, timeout_s: float = 30.0) -> bool:
        """Flush and end the thread. False when points had to be given up; says so in the log."""
        stored = self.flush(timeout_s)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(1.0)
        if self._points or self.dropped:
            logger.warning(
                "%d metric values were not stored in the tracker (%d of them given up while it was away).",
                len(self._points) + self.dropped,
                self.dropped,
            )
        return stored and not self.dropped

    def _run(self) -> None:
        wait_s = self._retry_s
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._points or self._closing)
                self._changed.wait_for(self._is_due, timeout=self._every_s)  # gather a batch
                if self._closing:
                    return
                batch = [self._points[i] for i in range(min(BATCH, len(self._points)))]
                self._sending = len(batch)
            failure = self._try(batch)
            with self._changed:
                self._sending = 0
                if failure is None or isinstance(failure, PointsRefused):
                    self._forget(batch, failure)
                    wait_s = self._retry_s
                    continue
                if wait_s == self._retry_s:
                    logger.warning("The tracker does not take metrics (%s); keeping them and trying again.", failure)
                self.failures += 1
                self._changed.wait_for(lambda: self._closing or self._hurry, timeout=wait_s)
                if self._hurry:
                    self._changed.wait_for(lambda: self._closing, timeout=min(wait_s, 0.5))
                wait_s = min(wait_s * 2, 30.0)

    def _is_due(self) -> bool:
        return self._closing or self._hurry or len(self._points) >= BATCH

    def _forget(self, batch: list[MetricPoint], refused: Exception | None) -> None:
        for _ in batch:
            self._points.popleft()
        if refused is None:
            self.stored += len(batch)
        else:
            self.dropped += len(batch)
            names = sorted({point.name for point in batch})[:5]
            logger.error("The tracker refused %d values (%s, ...) for good: %s", len(batch), ", ".join(names), refused)
        self._changed.notify_all()

    def _try(self, batch: list[MetricPoint]) -> Exception | None:
        try:
            self._send(batch)
        except Exception as error:  # a client may raise anything; the points are kept and sent again
            return error
        return None


def _number(value: float) -> float:
    """NaN stays; infinities become the largest float (MLflow stores them so, some databases refuse them)."""
    value = float(value)
    if math.isinf(value):
        return math.copysign(1.7976931348623157e308, value)
    return value
