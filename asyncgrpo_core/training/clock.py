"""Where the time of a step goes, and how much of it overlapped with generation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_SAMPLE_S = 0.02

_Mark = float | torch.cuda.Event  # time.monotonic(), or an event in the device's queue


class StepClock:
    """Adds up the seconds of named parts of the current step ("fwd", "fwd_bwd", "optimizer", ...).

    On a GPU the parts are timed by events in its own queue: the host runs ahead of the device, so its clock would time
    the launches, and waiting for the device in every part would slow the step down. The host waits once per step.

    Args:
        device: where the parts run; None means the host.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._on_gpu = device is not None and device.type == "cuda"
        self._spans: list[tuple[str, _Mark, _Mark]] = []
        self._optimizer_from: _Mark | None = None
        self.started = time.monotonic()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        begin = self._mark()
        try:
            yield
        finally:
            self._spans.append((name, begin, self._mark()))

    def open_optimizer(self) -> None:
        """A backward pass ended; the last one of a step is where the optimizer step (with gradient clipping) begins."""
        self._optimizer_from = self._mark()

    def close_optimizer(self) -> None:
        """The optimizer step ended."""
        if self._optimizer_from is not None:
            self._spans.append(("optimizer", self._optimizer_from, self._mark()))
            self._optimizer_from = None

    def finish_step(self) -> tuple[float, dict[str, float]]:
        """Wall seconds since the previous step ended, and its parts; starts the next step. Waits for the device."""
        parts: dict[str, float] = {}
        for name, begin, end in self._spans:
            parts[name] = parts.get(name, 0.0) + _seconds(begin, end)
        now = time.monotonic()
        wall, self.started, self._spans = now - self.started, now, []
        return wall, parts

    def _mark(self) -> _Mark:
        if not self._on_gpu:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _seconds(begin: _Mark, end: _Mark) -> float:
    if isinstance(begin, float) or isinstance(end, float):
        return float(end) - float(begin)  # type: ignore[arg-type]
    end.synchronize()
    return begin.elapsed_time(end) / 1000


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
