"""SIGTERM in the trainer process: end after the current step, with a checkpoint."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from asyncgrpo_core.errors import RunInterrupted


class StopSignal:
    """Turns SIGTERM and SIGINT into a request, or into an exception where there is nothing to save yet.

    Until `arm` is called (imports, loading, building) a signal raises `RunInterrupted` at once.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._request: Callable[[str], None] | None = None

    def install(self) -> None:
        signal.signal(signal.SIGTERM, self._handle)
        signal.signal(signal.SIGINT, self._handle)

    def arm(self, request: Callable[[str], None]) -> None:
        """From now on a signal calls `request(reason)` instead of raising."""
        self._request = request

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        if self._request is None:
            raise RunInterrupted(f"The trainer got {self.received} before training began.")
        self._request(self.received)


def outlive_stdout() -> None:
    """Point stdout and stderr at nothing when their reader has gone.

    The log file's pipe may close first when the whole run is killed; a `print` would then raise BrokenPipeError
    in the middle of the last checkpoint.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
