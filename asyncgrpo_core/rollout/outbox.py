"""In-process ends of the channels that `AsyncRolloutLoop` is built with (the names are the reference's)."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from asyncgrpo_core.metrics import MetricEvent, kind_of
from asyncgrpo_core.rollout.buffer import SampleBuffer


class MetricOutbox:
    """`metrics_queue` of the loop: events wait here and leave with the next buffer record. Thread-safe."""

    def __init__(self) -> None:
        self._events: list[MetricEvent] = []
        self._lock = threading.Lock()

    def put(self, event: MetricEvent) -> None:
        with self._lock:
            self._events.append(event)

    def record(self, name: str, value: float) -> None:
        """One value; the name decides how the window reduces it (metrics.kind_of)."""
        kind = kind_of(name)
        self.put((name, kind, float(value), 1.0 if kind == "mean" else 0.0))

    def extend(self, events: Iterable[MetricEvent]) -> None:
        with self._lock:
            self._events.extend(events)

    def drain(self) -> list[MetricEvent]:
        with self._lock:
            events, self._events = self._events, []
        return events


class ErrorOutbox:
    """`exception_info_queue` of the loop: `put((exception, traceback text))` leaves it in the buffer's folder."""

    def __init__(self, buffer: SampleBuffer) -> None:
        self._buffer = buffer

    def put(self, info: tuple[BaseException, str]) -> None:
        self._buffer.put_error(*info)
