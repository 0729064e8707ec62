"""The `lora` backend: only the adapter travels, as a folder that the servers load under a name per policy version.

    write folder -> load at every server -> proof -> (rollouts start under the new name) -> unload what is too old

Nothing is paused: a rollout finishes under the version that it began with, and all its turns name that version. So
`AdapterVersions` keeps max_staleness + 1 versions registered, and those that running rollouts still name as long as
the server has places for them (--max-loras); then the oldest are taken from their rollouts, which would be dropped as
stale anyway. A folder is removed one sync after its version was unloaded: an engine that finds the folder of a
running request gone, ends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from asyncgrpo_core.errors import AsyncGRPOError, WeightSyncError
from asyncgrpo_core.server.adapters import LORA_BACKEND, needed_max_loras
from asyncgrpo_core.sync.backend import TensorEvidence, Transfer
from asyncgrpo_core.sync.lora_probe import AdapterProbe
from asyncgrpo_core.sync.lora_store import AdapterStore

logger = logging.getLogger(__name__)

_REVOKE_WAIT_S = 5.0  # for rollouts whose version is taken away to end
_UNLOAD_S = 5.0


class AdapterControl(Protocol):
    """The part of `server.control.VLLMControl` that is used here. Every call raises ServerError."""

    def adapters(self) -> dict[str, str]: ...
    def load_adapter(self, name: str, folder: str) -> None: ...
    def unload_adapter(self, name: str, timeout_s: float | None = None) -> bool: ...
    def prompt_logprobs(
        self, token_ids: list[int], *, model: str | None = None, engine: int | None = None
    ) -> list[float]: ...


class VersionUses(Protocol):
    """Who generates: the rollout worker."""

    def adapter_in_use(self, version: int) -> bool:
        """Whether a running rollout names the version."""

    def revoke_adapters(self, before: int) -> None:
        """End the rollouts of every version below `before`."""


class AdapterVersions:
    """The versions that the servers of a run hold, and when each goes.

    Args:
        store: the folders.
        max_staleness: max_staleness + 1 versions are kept.
        max_loras: the servers' --max-loras (the smallest); None where they do not say: the least that is accepted.

    Attributes:
        registered: versions that requests may name, oldest first.
        uses: who names them; None while nobody generates.
    """

    def __init__(self, store: AdapterStore, *, max_staleness: int, max_loras: int | None = None) -> None:
        self.store = store
        self.registered: list[int] = []
        self.uses: VersionUses | None = None
        self._kept = max_staleness + 1
        self._limit = max(max_loras or 0, needed_max_loras(max_staleness))
        self._backends: list[LoraBackend] = []
        self._unloaded: list[int] = []  # folders that the next sync removes

    def start(self, controls: Sequence[AdapterControl]) -> None:
        """Unload what earlier attempts left at the servers, then remove their folders."""
        for control in controls:
            self.forget_leftovers(control)
        self.store.clear_leftovers()

    def forget_leftovers(self, control: AdapterControl) -> None:
        for name, folder in control.adapters().items():
            if self.store.owns(folder):
                control.unload_adapter(name)

    def joined(self, backend: LoraBackend) -> None:
        self._backends = [*(b for b in self._backends if b.control is not backend.control), backend]

    def loaded(self, version: int) -> None:
        if version not in self.registered:
            self.registered = sorted([*self.registered, version])

    def left(self, backend: LoraBackend) -> None:
        self._backends = [b for b in self._backends if b is not backend]

    def make_room(self, version: int) -> None:
        """Before `version` is loaded: no more than the servers' --max-loras, the new one included."""
        if version in self.registered:  # another server of the fleet holds it, so there was room
            return
        excess = len(self.registered) + 1 - self._limit
        deadline = time.monotonic() + _REVOKE_WAIT_S
        for old in self.registered[: max(excess, 0)]:
            self._revoke(old)
            while self._in_use(old) and time.monotonic() < deadline:
                time.sleep(0.02)
            if self._in_use(old):
                logger.warning("Rollouts of policy version %d have not ended; it is unloaded nevertheless.", old)
            self._unload(old)

    def retire(self, newest: int) -> None:
        """After rollouts start under `newest`: unload what is out of the window and not named any more."""
        for version in [v for v in self._unloaded if not self._in_use(v)]:
            self.store.delete(version)
            self._unloaded.remove(version)
        for version in [v for v in self.registered if v <= newest - self._kept]:
            if not self._in_use(version):
                self._unload(version)
        excess = len(self.registered) + 1 - self._limit
        if excess > 0:  # now, so that the next sync need not wait for these rollouts to end
            self._revoke(self.registered[excess - 1])

    def _in_use(self, version: int) -> bool:
        return self.uses is not None and self.uses.adapter_in_use(version)

    def _revoke(self, version: int) -> None:
        if self.uses is not None:
            self.uses.revoke_adapters(version + 1)

    def _unload(self, version: int) -> None:
        self.registered.remove(version)
        self._unloaded.append(version)
        for backend in self._backends:
            backend.unload(version)


class LoraBackend:
    """Adapter versions at one server.

    Args:
        control: the server.
        versions: shared by the backends of all servers.
        probe: shows at the first contact that the server applies adapters as the trainer does.
        engines: data-parallel replicas behind the server's HTTP front, each of which is asked for the canary.
    """

    name = LORA_BACKEND
    evidence_by_checksums = False

    def __init__(
        self, control: AdapterControl, versions: AdapterVersions, probe: AdapterProbe, *, engines: int = 1
    ) -> None:
        self.control = control
        self._versions = versions
        self._probe = probe
        # One replica is not asked for by number: a server without data parallelism may refuse that.
        self._engines: list[int | None] = list(range(engines)) if engines > 1 else [None]
        self._holds: set[int] = set()

    def connect(self) -> None:
        """Prove the way, and give a server that is met again the versions that rollouts may still name.

        Raises:
            ServerError: a call failed.
            DeliveryError: the server does not apply adapters as the trainer does.
        """
        self._versions.forget_leftovers(self.control)
        self._probe.check(self.control, self._engines)
        for version in self._versions.registered:
            self._load(version)
        self._versions.joined(self)

    def prepare(self, version: int, *, compare: bool) -> Transfer:
        self._versions.make_room(version)
        folder = self._versions.store.write(version)
        name = self._versions.store.name(version)
        return Transfer(
            version,
            compare,
            payload=folder,
            num_bytes=self._versions.store.num_bytes(version),
            pauses=False,
            canary_requests=[
                {"model": name} if engine is None else {"model": name, "engine": engine} for engine in self._engines
            ],
        )

    def deliver(self, transfer: Transfer) -> None:
        self._load(transfer.version)
        self._versions.loaded(transfer.version)
        transfer.evidence = TensorEvidence(kind="adapter", compared=len(self._engines))

    def discard(self, transfer: Transfer) -> None:
        """The folder stays until the version is retired."""

    def unload(self, version: int) -> bool:
        """Make the version unknown; False when the server did not answer (it is met anew before it is asked again)."""
        self._holds.discard(version)
        try:
            self.control.unload_adapter(self._versions.store.name(version), timeout_s=_UNLOAD_S)
        except AsyncGRPOError as error:
            logger.warning("Policy version %d could not be unloaded: %s", version, error)
            return False
        return True

    def close(self) -> None:
        """Leave the newest version at the server, as a merged sync leaves the newest weights."""
        self._versions.left(self)
        for version in self._versions.registered[:-1]:
            if not self.unload(version):
                break

    def _load(self, version: int) -> None:
        if version in self._holds:  # met during this very sync
            return
        name, folder = self._versions.store.name(version), self._versions.store.write(version)
        self.control.load_adapter(name, str(folder))
        listed = self.control.adapters().get(name)
        if listed is None or Path(listed) != folder:
            raise WeightSyncError(
                f"The server took the adapter {name} from {folder}, but lists it as {listed or 'unknown'}.",
                "If several HTTP processes answer at its address, start it with --api-server-count 1.",
            )
        self._holds.add(version)
