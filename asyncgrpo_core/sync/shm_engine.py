"""The `shm` engine: loads a safetensors file into the served model. Runs inside the vLLM worker.

Only vLLM's factory imports this module (see `vllm_plugin.register`), so vllm is there when it is read.

One update is start -> update_weights({path, version, ...}) -> finish. The model is not touched before the file
has been opened and read, so a wrong path leaves the old weights in place; when loading itself fails, the
layers are put back before the error travels to the trainer, so that the server can go on.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from asyncgrpo_core.sync.delivery import DeliveryReport, compare_delivery
from asyncgrpo_core.sync.shm_files import (
    PROTOCOL,
    check_fault,
    fault_from_environment,
    report_path,
    write_report,
)

logger = logging.getLogger(__name__)


@dataclass
class ShmInitInfo(WeightTransferInitInfo):
    """Handshake: both sides must speak the same `protocol` (they may live in different environments)."""

    protocol: int = 0


@dataclass
class ShmUpdateInfo(WeightTransferUpdateInfo):
    """One update: where the tensors are, and whether delivery is to be compared and reported."""

    path: str
    version: int
    compare: bool = False
    fault: str | None = None


class ShmWeightTransferEngine(WeightTransferEngine[ShmInitInfo, ShmUpdateInfo]):
    """Receives whole checkpoints as files on a filesystem that trainer and server share."""

    init_info_cls = ShmInitInfo
    update_info_cls = ShmUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._update: ShmUpdateInfo | None = None
        self._received: dict[str, torch.Tensor] = {}
        self._fault: str | None = None
        self._load_s = 0.0

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        if init_info.protocol != PROTOCOL:
            raise ValueError(
                f"the trainer speaks version {init_info.protocol} of the shm weight transfer, this server's "
                f"plugin version {PROTOCOL}: install the same asyncgrpo in both environments"
            )

    def start_weight_update(self) -> None:
        self._forget()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one file. Overrides the base, whose version synchronises an accelerator."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: ShmUpdateInfo) -> None:
        started = time.perf_counter()
        self._fault = check_fault(update_info.fault) or fault_from_environment()
        path = Path(update_info.path)
        if not path.is_file():
            raise FileNotFoundError(
                f"no weight file {path} on this host: the shm backend needs trainer and server on one host "
                "(or a directory that both see)"
            )
        self._received = _read_tensors(path)
        self._update = update_info
        self._load(self._received)
        self._load_s = time.perf_counter() - started

    def finish_weight_update(self) -> None:
        if self._update is None:
            raise RuntimeError("finish_weight_update came without a preceding update_weights")
        try:
            self._repack_heads()
            if self._update.compare and self._is_first_rank():
                self._write_report(self._update)
        finally:
            if self._is_first_rank():
                Path(self._update.path).unlink(missing_ok=True)
            self._forget()

    def shutdown(self) -> None:
        self._forget()

    def _load(self, tensors: dict[str, torch.Tensor]) -> None:
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        if self._fault == "all":
            return
        load_weights: Any = self.model.load_weights
        skip_head = self._fault == "lm_head"
        with self._experts_packed_again():
            initialize_layerwise_reload(self.model)
            try:
                load_weights(
                    (name, tensor)
                    for name, tensor in tensors.items()
                    if not (skip_head and name.endswith("lm_head.weight"))
                )
            finally:
                # Also after an error: layers that got nothing take their old tensors back.
                finalize_layerwise_reload(self.model, self.model_config)

    @contextmanager
    def _experts_packed_again(self) -> Iterator[None]:
        """Inside, experts that are reloaded on a CPU are packed as they were at the start.

        vLLM packs a Mixture-of-Experts layer for the CPU only while the layer has no kernel yet; a reload would put
        the plain weights where the kernel reads packed ones. So the kernel is made anew.
        """
        methods: list[Any] = [getattr(module, "quant_method", None) for module in self.model.modules()]
        kernels: dict[Any, Any] = {}
        if self.device.type == "cpu":
            kernels = {m: m.moe_kernel for m in methods if getattr(m, "moe_kernel", None) is not None}
        for method in kernels:
            method.moe_kernel = None
        try:
            yield
        finally:
            for method, kernel in kernels.items():
                if method.moe_kernel is None:  # not reloaded
                    method.moe_kernel = kernel

    def _repack_heads(self) -> None:
        """Pack again the layers that keep both a parameter and a packed copy of it.

        vLLM reloads a layer when something is loaded *into it by name*. Nothing is loaded into a tied
        lm_head: its parameter is the embedding's and is new, its packed copy would stay old.
        """
        if self.device.type != "cpu" or self._fault is not None:
            return
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        for module in self.model.modules():
            weight = getattr(module, "weight", None)
            if hasattr(module, "cpu_linear") and isinstance(weight, torch.Tensor) and weight.numel():
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)

    def _write_report(self, update: ShmUpdateInfo) -> None:
        started = time.perf_counter()
        if self.parallel_config.world_size > 1:
            reason = "the model is sharded over several workers"
            report = DeliveryReport(unchecked=dict.fromkeys(self._received, reason))
        else:
            report = compare_delivery(self.model, self._received, seed=update.version)
        timing = {"load_s": self._load_s, "compare_s": time.perf_counter() - started}
        write_report(report_path(Path(update.path)), update.version, {**report.as_dict(), **timing})
        if report.differing:
            logger.error("weight update %s: differs in %s", update.version, json.dumps(report.differing))

    def _is_first_rank(self) -> bool:
        return self.parallel_config.rank == 0 and self.parallel_config.data_parallel_index == 0

    def _forget(self) -> None:
        self._update = None
        self._received = {}
        self._fault = None


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    if os.path.getsize(path) == 0:
        raise ValueError(f"weight file {path} is empty")
    return load_file(path)
