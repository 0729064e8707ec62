"""Where the time of a step goes, and how much of it overlapped with generation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SAMPLE_S = 0.02


class StepClock:
    """Adds up the seconds of named parts of the current step ("fwd", "fwd_bwd", "optimizer", ...)."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.parts: dict[str, float] = {}
        self.optimizer_started: float | None = None  # when the last backward pass of the step ended

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            self.parts[name] = self.parts.get(name, 0.0) + time.monotonic() - begin

    def close_optimizer(self) -> None:
        """The optimizer step (with gradient clipping) ran from the last backward pass until now."""
        if self.optimizer_started is not None:
            self.parts["optimizer"] = time.monotonic() - self.optimizer_started
            self.optimizer_started = None

    def finish_step(self) -> tuple[float, dict[str, float]]:
        """Wall seconds since the previous step ended, and its parts; starts the next step."""
        now = time.monotonic()
        wall, parts = now - self.started, self.parts
        self.started, self.parts = now, {}
        return wall, parts


class OverlapMeter:
    """Share of the training window in which requests were in flight while the trainer computed.

    A thread looks every 20 ms; `computing` is set by the trainer around forward, backward and optimizer.

    Args:
        in_flight: number of requests the rollout worker has in flight.
    """

    def __init__(self, in_flight: Callable[[], int]) -> None:
        self._in_flight = in_flight
        self.computing = False
        self.overlapped_s = 0.0
        self.total_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="overlap-meter", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        last = time.monotonic()
        while not self._stop.wait(_SAMPLE_S):
            now = time.monotonic()
            self.total_s += now - last
            if self.computing and self._in_flight() > 0:
                self.overlapped_s += now - last
            last = now

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
