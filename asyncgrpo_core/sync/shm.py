"""The `shm` backend, trainer side: one safetensors file per update, in shared memory.

The file is written while the server still generates; the paused part is the server reading it. Both sides
remove it (the server when it has loaded it, the trainer always), and files of killed trainers are swept.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asyncgrpo_core.errors import ConfigError, WeightSyncError
from asyncgrpo_core.sync.backend import Parameters, SyncControl, TensorEvidence, Transfer
from asyncgrpo_core.sync.shm_files import PREFIX, PROTOCOL, check_fault, read_report, report_path, sweep_stale

DEFAULT_DIRECTORY = Path("/dev/shm")


@dataclass
class _Payload:
    path: Path
    num_tensors: int


class ShmBackend:
    """Weights through a file that trainer and server both see.

    Args:
        control: the server.
        parameters: yields (Hugging Face name, full tensor).
        directory: where files go; memory-backed for speed, any directory that both sides see works.
        fault: injected delivery fault for every update ("lm_head" or "all"); tests of the proof only.

    Raises:
        ConfigError: `directory` is not a writable directory.
    """

    name = "shm"
    evidence_by_checksums = False

    def __init__(
        self,
        control: SyncControl,
        parameters: Parameters,
        *,
        directory: Path = DEFAULT_DIRECTORY,
        fault: str | None = None,
    ) -> None:
        self.fault = check_fault(fault)
        self._control = control
        self._parameters = parameters
        self._directory = Path(directory)
        self._stem = f"{PREFIX}{os.getpid()}-{uuid.uuid4().hex[:8]}"
        if not self._directory.is_dir() or not os.access(self._directory, os.W_OK):
            raise ConfigError(
                f"The shm weight sync writes to {self._directory}, which is no writable directory.",
                "Give a directory that trainer and server both see.",
            )

    def connect(self) -> None:
        sweep_stale(self._directory)
        self._control.init_weight_transfer({"protocol": PROTOCOL})

    def prepare(self, version: int, *, compare: bool) -> Transfer:
        """Write the file (the server is not involved yet).

        Raises:
            WeightSyncError: the directory is full, or there is nothing to send.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        started = time.perf_counter()
        path = self._directory / f"{self._stem}-v{version}.safetensors"
        tensors = _host_tensors(self._parameters())
        if not tensors:
            raise WeightSyncError("The policy has no parameters to send.", "Check what the model freezes.")
        try:
            save_file(tensors, path)
        except (OSError, SafetensorError) as error:
            path.unlink(missing_ok=True)
            needed = sum(t.numel() * t.element_size() for t in tensors.values())
            raise WeightSyncError(
                f"Could not write {needed / 2**20:.0f} MiB of weights to {path}: {error}.",
                "Free space there or give the shm weight sync another directory that the server sees too.",
            ) from error
        transfer = Transfer(version, compare, _Payload(path, len(tensors)), path.stat().st_size)
        transfer.timing["write_s"] = time.perf_counter() - started
        return transfer

    def deliver(self, transfer: Transfer) -> None:
        payload: _Payload = transfer.payload
        info: dict[str, Any] = {
            "path": str(payload.path),
            "version": transfer.version,
            "compare": transfer.compare,
        }
        if self.fault:
            info["fault"] = self.fault
        self._control.start_weight_update()
        self._control.update_weights(info)
        self._control.finish_weight_update(str(transfer.version))
        if transfer.compare:
            self._read_evidence(transfer)

    def discard(self, transfer: Transfer) -> None:
        path: Path = transfer.payload.path
        path.unlink(missing_ok=True)
        report_path(path).unlink(missing_ok=True)

    def close(self) -> None:
        for path in self._directory.glob(f"{self._stem}*"):
            path.unlink(missing_ok=True)

    def _read_evidence(self, transfer: Transfer) -> None:
        path = report_path(transfer.payload.path)
        try:
            report = read_report(path)
        except (FileNotFoundError, ValueError) as error:
            raise WeightSyncError(
                f"The server finished the update of version {transfer.version} but left no delivery report "
                f"at {path} ({error}).",
                "Install the same asyncgrpo in the server's environment, and let both see that directory.",
            ) from error
        transfer.evidence = TensorEvidence(
            kind="values",
            compared=report["checked"],
            differing=tuple(report["differing"]),
            unchecked=tuple(report["unchecked"]),
            missing=tuple(report["missing"]),
        )
        transfer.timing.update(load_s=report["load_s"], compare_s=report["compare_s"])


def _host_tensors(parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Contiguous CPU tensors that share no storage with each other (safetensors refuses shared storage)."""
    tensors: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, tensor in parameters:
        tensor = tensor.detach().to("cpu")
        storage = tensor.untyped_storage()
        whole = storage.nbytes() == tensor.numel() * tensor.element_size() and tensor.is_contiguous()
        if not whole or storage.data_ptr() in taken:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        taken.add(tensor.untyped_storage().data_ptr())
        tensors[name] = tensor
    return tensors
