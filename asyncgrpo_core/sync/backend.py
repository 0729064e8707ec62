"""The one interface behind which weights travel, and how a backend is chosen.

backend      trainer and server are                      tensors travel by
shm          on one host, the server computes on CPU     a file in shared memory (our vLLM plugin)
ipc          on one and the same GPU                     CUDA IPC handles
nccl         on different GPUs                           NCCL broadcast

`lora` (an adapter alone, as a folder on a filesystem that both see: lora.py) works between any devices and is chosen
by what the policy is and what the servers offer (training/servers.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from asyncgrpo_core.errors import ConfigError, ServerMismatchError

BACKENDS = ("shm", "ipc", "nccl")

# Yields (Hugging Face name, full tensor), the same names in the same order on every call.
Parameters = Callable[[], Iterable[tuple[str, Tensor]]]


class SyncControl(Protocol):
    """The part of `server.control.VLLMControl` that weight sync uses. Every call raises ServerError."""

    def pause(self, mode: str = "keep", clear_cache: bool = True) -> None: ...
    def resume(self) -> None: ...
    def init_weight_transfer(self, info: dict[str, Any]) -> None: ...
    def start_weight_update(self) -> None: ...
    def update_weights(self, info: dict[str, Any]) -> None: ...
    def finish_weight_update(self, version: str) -> None: ...
    def world_size(self) -> int: ...
    def weight_checker(self, action: str) -> dict[str, Any]: ...
    def weight_fingerprints(self) -> dict[str, str]: ...
    def prompt_logprobs(self, token_ids: list[int]) -> list[float]: ...


@dataclass(frozen=True)
class TensorEvidence:
    """What a comparison of the server's tensors with the sent ones said.

    Attributes:
        kind: "values" (the served model was asked what it computes with), "checksums" (digests of its
            parameters; layouts differ between kernels, so a mismatch alone need not be an error) or "adapter" (every
            engine has loaded the version's folder, at a server that was shown to apply adapters rightly).
        compared: number of tensors that could be compared; of "adapter": engines that loaded it.
        differing: Hugging Face names of those that differ.
        unchecked: names that were sent and could not be compared.
        missing: server-side names of parameters that nothing was sent for.
        matched: of "checksums": names that were found equal.
        constant: of "checksums": names that were not, of what training does not change (`nn.Buffer`).
    """

    kind: str
    compared: int
    differing: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    matched: tuple[str, ...] = ()
    constant: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """True when every sent tensor that training changes was compared and all are equal."""
        return self.compared > 0 and not self.differing and not self.unchecked


@dataclass
class Transfer:
    """One update on its way: what `prepare` made and what `deliver` learned.

    `pauses`: requests in flight are frozen while it is delivered. `canary_requests`: keyword arguments of
    `prompt_logprobs` for the proof, one set for each engine that has to be asked by name.
    """

    version: int
    compare: bool
    payload: Any = None
    num_bytes: int = 0
    pauses: bool = True
    canary_requests: list[dict[str, Any]] = field(default_factory=lambda: [{}])
    evidence: TensorEvidence | None = None
    timing: dict[str, float] = field(default_factory=dict)


class Backend(Protocol):
    """One way for weights to travel. Used by one `Publisher`, on the sending rank.

    `prepare` runs while the server still generates, `deliver` while it is paused; `discard` always follows,
    also after an error. `evidence_by_checksums` says that the server's tensors can be compared through
    /weight_checker (where `deliver` brings no evidence of its own).
    """

    name: str
    evidence_by_checksums: bool

    def connect(self) -> None:
        """Handshake with the server; once, before the first transfer."""

    def prepare(self, version: int, *, compare: bool) -> Transfer: ...

    def deliver(self, transfer: Transfer) -> None:
        """start_weight_update, update_weights, finish_weight_update(version)."""

    def discard(self, transfer: Transfer) -> None: ...

    def close(self) -> None: ...


def select_backend(
    requested: str | None,
    *,
    server_backend: str | None,
    server_device: str | None,
    trainer_device: str,
    same_gpu: bool = False,
) -> str:
    """The backend that fits the devices and what the server was started with.

    Args:
        requested: "shm", "ipc", "nccl", or None / "auto" for the one that the devices call for.
        server_backend: what the server's --weight-transfer-config names; "" when it was started without that
            flag, None where it does not say.
        server_device: "cpu" or "cuda"; None where the server does not say (then the trainer's is assumed).
        trainer_device: "cpu" or "cuda".
        same_gpu: trainer and server share one GPU.

    Raises:
        ConfigError: `requested` is no backend, or cannot work between these devices.
        ServerMismatchError: the server was started for another backend; names the flag.
    """
    server_device = server_device or trainer_device
    if requested not in (None, "auto", *BACKENDS):
        raise ConfigError(f"weight sync backend {requested!r} is unknown.", f"Use one of auto, {', '.join(BACKENDS)}.")
    if requested in (None, "auto"):
        chosen = _by_devices(server_device, trainer_device, same_gpu)
    else:
        chosen = str(requested)
        _refuse_impossible(chosen, server_device, trainer_device, same_gpu)
    if server_backend is not None and server_backend != chosen:
        raise ServerMismatchError(
            f"The server was started {_started_for(server_backend)}, but trainer ({trainer_device}) "
            f"and server ({server_device}{', same GPU' if same_gpu else ''}) need {chosen!r}.",
            f"""Restart the server with --weight-transfer-config '{{"backend": "{chosen}"}}'.""",
        )
    return chosen


def _started_for(server_backend: str) -> str:
    return f"for weight transfer by {server_backend!r}" if server_backend else "without weight transfer"


def _by_devices(server_device: str, trainer_device: str, same_gpu: bool) -> str:
    if server_device == "cpu" or trainer_device == "cpu":
        return "shm"
    return "ipc" if same_gpu else "nccl"


def _refuse_impossible(chosen: str, server_device: str, trainer_device: str, same_gpu: bool) -> None:
    if chosen in ("nccl", "ipc") and "cpu" in (server_device, trainer_device):
        raise ConfigError(
            f"Weight sync backend {chosen!r} moves tensors between GPUs, but the trainer runs on "
            f"{trainer_device} and the server on {server_device}.",
            "Use backend 'shm' (or leave it out).",
        )
    if chosen == "nccl" and same_gpu:
        raise ConfigError(
            "Weight sync backend 'nccl' needs trainer and server on different GPUs; they share one.",
            "Use backend 'ipc', or start the server on another GPU (CUDA_VISIBLE_DEVICES).",
        )
    if chosen == "ipc" and not same_gpu:
        raise ConfigError(
            "Weight sync backend 'ipc' needs trainer and server on the same GPU; they are on different ones.",
            "Use backend 'nccl', or start both on one GPU (CUDA_VISIBLE_DEVICES).",
        )


_DTYPE_WORDS = re.compile(r"(?:torch\.)?(float32|float16|bfloat16|float|half|bf16|fp16|fp32)$")
_DTYPE_NAMES = {"float": "float32", "fp32": "float32", "half": "float16", "fp16": "float16", "bf16": "bfloat16"}


def dtype_name(text: str | torch.dtype | None) -> str | None:
    """ "torch.bfloat16", "bf16", torch.bfloat16 -> "bfloat16"; None for None and for words such as "auto"."""
    match = _DTYPE_WORDS.match(str(text))
    return None if match is None else _DTYPE_NAMES.get(match.group(1), match.group(1))


def name_list(names: Sequence[str], total: int | None = None, shown: int = 8) -> str:
    """Names for an error message: all of few, the first of many."""
    head = ", ".join(names[:shown])
    rest = f" and {len(names) - shown} more" if len(names) > shown else ""
    if total is not None and len(names) >= total > 1:
        return f"all {len(names)} parameters ({head}{rest})"
    return head + rest
