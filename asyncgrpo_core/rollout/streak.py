"""Tells that nothing succeeds any more from failures now and then. A pure state machine: the clock is passed in."""

from __future__ import annotations

from asyncgrpo_core.errors import RolloutError


class FailureStreak:
    """Counts failures since the last success.

    Calls that time out end together, long after they began, with others' successes before and after them: a share of
    the last calls would misjudge such a burst, "nothing succeeded since" does not.

    Args:
        name: what fails, for the message.
        count: failures in a row that end the run ...
        seconds: ... when the last success is at least so long ago.
        fix: what to do about it.
    """

    def __init__(self, name: str, *, count: int, seconds: float, fix: str) -> None:
        self._name, self._count, self._seconds, self._fix = name, count, seconds, fix
        self._failures = 0
        self._last_success: float | None = None

    def succeeded(self, now: float) -> None:
        self._failures = 0
        self._last_success = now

    def failed(self, now: float, error: str) -> None:
        """Take one failure.

        Raises:
            RolloutError: nothing succeeds any more.
        """
        self._failures += 1
        silent = self._last_success is None or now - self._last_success >= self._seconds
        if self._failures >= self._count and silent:
            raise RolloutError(
                f"{self._name} failed for {self._failures} groups in a row, last with: {error}", self._fix
            )
