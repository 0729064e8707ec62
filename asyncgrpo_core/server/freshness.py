"""Which servers hold the run's newest weights, as far as requests can tell. No I/O, no clock.

The trainer writes the policy version of every server, `LEFT_OUT` for one that missed a sync. A server that was started
again between two syncs holds other weights than that says: it is known by its counter of generated tokens, which went
down, or by tokens that no longer carry a version, and has to wait for the next sync.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncgrpo_core.server.load import LoadSample
from asyncgrpo_core.types import TurnRecord

LEFT_OUT = -1  # in place of a policy version: the server does not hold a proved policy


class Freshness:
    """What is known about the weights of `count` servers.

    Args:
        versions: policy version of each server, written by the trainer; None: nobody says, nothing is ever stale.
    """

    def __init__(self, count: int, versions: Sequence[int] | None) -> None:
        self.versions = versions
        self._lost: list[int | None] = [None] * count  # the version it was said to hold when it had lost it
        self._tokens: list[float | None] = [None] * count
        self._labels = [False] * count  # it has reported the policy version of its tokens

    def is_stale(self, index: int) -> bool:
        """Whether the server must not be asked: it missed a sync, or lost its weights after the last one."""
        if self.versions is None:
            return False
        version = self.versions[index]
        if self._lost[index] is not None and version not in (self._lost[index], LEFT_OUT):
            self._lost[index] = None
        return version == LEFT_OUT or self._lost[index] is not None

    def lost(self, index: int) -> None:
        """The server's process is a new one."""
        if self.versions is not None:
            self._lost[index] = self.versions[index]
            self._labels[index] = False

    def saw_turn(self, index: int, turn: TurnRecord) -> bool:
        """Take a reply; True when it shows that the process is a new one (before its first sync it labels nothing)."""
        if not turn.output_ids:
            return False
        labelled = turn.output_versions is not None
        restarted = self._labels[index] and not labelled
        self._labels[index] = labelled or self._labels[index]
        return restarted

    def saw_load(self, index: int, load: LoadSample | None) -> bool | None:
        """Take a reading of /metrics; whether it is of another process than the ones before. None: cannot be told."""
        before, now = self._tokens[index], load.generated_tokens if load is not None else None
        if now is not None:
            self._tokens[index] = now
        return None if not before or now is None else now < before
