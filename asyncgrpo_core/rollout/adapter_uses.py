"""Under which adapter version each rollout runs, when only an adapter is sent to the servers.

A rollout names one version in all its turns. Numbers in shared memory tell the trainer which versions are named, so
that it unloads none of them; when the servers have no place left, it takes the oldest away, and the rollouts under it
end: they are older than max_staleness, so what they give would be dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, MutableSequence
from types import SimpleNamespace
from typing import Any, TypeVar

from asyncgrpo_core.errors import RolloutError
from asyncgrpo_core.server.adapters import adapter_name

T = TypeVar("T")

PLACES = 256  # versions that can be counted at once; far more than a server holds


class AdapterRevokedError(RolloutError):
    """The version that a rollout ran under was taken away: its group can be generated again."""


class AdapterUses:
    """The versions that running rollouts name.

    Args:
        stem: what the names of all versions begin with.
        current: `.value` is the version that new rollouts start under, written by the trainer.
        counts: running rollouts by version (modulo its length), read by the trainer.
        oldest: `.value`: rollouts under an older version have to end, written by the trainer.
    """

    def __init__(self, stem: str, current: Any, counts: MutableSequence[int], oldest: Any) -> None:
        self.stem = stem
        self._current, self._counts, self._oldest = current, counts, oldest
        self._running: dict[asyncio.Task[Any], int] = {}
        self._revoked: set[asyncio.Task[Any]] = set()

    @classmethod
    def of_one_version(cls, stem: str, version: int) -> AdapterUses:
        """While nobody trains: every rollout names `version`."""
        return cls(stem, SimpleNamespace(value=version), [0] * PLACES, SimpleNamespace(value=0))

    @property
    def newest(self) -> int:
        """The version that a rollout starts under now."""
        return int(self._current.value)

    def name(self, version: int) -> str:
        return adapter_name(self.stem, version)

    async def run(self, rollout: Callable[[int], Coroutine[Any, Any, T]]) -> T:
        """Run a rollout under the newest version, which stays loaded until it has ended.

        Raises:
            AdapterRevokedError: the version was taken away.
        """
        version = self._begin()
        task = asyncio.create_task(rollout(version))
        self._running[task] = version
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if task in self._revoked and not (current is not None and current.cancelling()):
                raise AdapterRevokedError(
                    f"The rollout had not ended when policy version {version} had to make room.",
                    "Rollouts that take longer than max_staleness syncs are dropped: raise max_staleness or "
                    "weight_sync_steps, or restart the server with a larger --max-loras.",
                ) from None
            raise
        finally:
            del self._running[task]
            self._revoked.discard(task)
            self._counts[version % len(self._counts)] -= 1

    def end_revoked(self) -> None:
        """Cancel the rollouts whose version was taken away; to be called every moment."""
        oldest = self._oldest.value
        for task, version in self._running.items():
            if version < oldest and task not in self._revoked:
                self._revoked.add(task)
                task.cancel()

    def _begin(self) -> int:
        """Count first and look again: the trainer writes the version first and reads the count then."""
        while True:
            version = self._current.value
            self._counts[version % len(self._counts)] += 1
            if self._current.value == version:
                return version
            self._counts[version % len(self._counts)] -= 1
