"""Which devices and threads the processes of a run get, and how weights travel between them. Needs no torch."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from asyncgrpo_core.errors import ConfigError
from asyncgrpo_core.launch.config import ResourcesSection, RunConfig


@dataclass(frozen=True)
class Placement:
    """Where trainer and server compute.

    Attributes:
        device: "cpu" or "cuda".
        trainer: CUDA devices of the trainer; empty on a CPU.
        server: CUDA devices of the server; empty on a CPU.
        backend: weight transfer between the two.
        ranks: trainer processes; on GPUs one for each of the trainer's devices.
    """

    device: str
    trainer: tuple[int, ...]
    server: tuple[int, ...]
    backend: str
    ranks: int = 1


def rank_of_this_process() -> int:
    """Which of the trainer processes this is, as torchrun says; 0 without it."""
    return int(os.environ.get("RANK", "0"))


def num_ranks() -> int:
    """How many trainer processes torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def cpu_count() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def trainer_threads(resources: ResourcesSection, ranks: int = 1) -> int:
    """OpenMP threads of one of `ranks` trainer processes.

    One up to two cores: spinning threads of server and trainer starve each other.
    """
    if resources.omp_threads is not None:
        return resources.omp_threads
    cores = cpu_count()
    return 1 if cores <= 2 else max(1, cores // 2 // ranks)


def visible_gpus() -> list[int]:
    """Indices of the NVIDIA devices of this machine that this process may use."""
    limit = os.environ.get("CUDA_VISIBLE_DEVICES")
    if limit is not None:
        return [int(part) for part in limit.split(",") if part.strip().isdigit()]
    found = (re.fullmatch(r"nvidia(\d+)", path.name) for path in Path("/dev").glob("nvidia*"))
    return sorted(int(match.group(1)) for match in found if match)


def place(cfg: RunConfig) -> Placement:
    """Decide devices and weight transfer.

    Without settings: no GPU, all on the CPU with shared memory; one GPU, shared by both (ipc); more, the trainer
    gets the first and the server the others (nccl).

    Raises:
        ConfigError: devices that are not there, or a backend that does not fit them.
    """
    gpus = [] if cfg.training.use_cpu else visible_gpus()
    wanted = cfg.training.weight_sync_backend
    if wanted == "lora":
        wanted = None  # an adapter travels by the file system; full weights would by what the devices call for
    if not gpus:
        asked = cfg.resources.trainer_devices or cfg.resources.server_devices
        if asked:
            raise ConfigError(f"resources asks for the CUDA devices {asked}; there is none here.", "Remove it.")
        if wanted not in (None, "shm"):
            raise ConfigError(
                f"training.weight_sync_backend = {wanted!r} needs GPUs, and this run is on the CPU.", 'Use "shm".'
            )
        return Placement("cpu", (), (), "shm", cfg.resources.trainer_ranks or 1)
    trainer = tuple(cfg.resources.trainer_devices or gpus[: cfg.resources.trainer_ranks or 1])
    server = tuple(cfg.resources.server_devices or [g for g in gpus if g not in trainer] or gpus[:1])
    missing = sorted(({*trainer, *server}) - set(gpus))
    if missing:
        raise ConfigError(f"resources names the CUDA devices {missing}; visible are {gpus}.", "Correct the numbers.")
    _check_ranks(cfg.resources, trainer)
    shared = bool(set(trainer) & set(server))
    if wanted == "nccl" and shared:
        raise ConfigError(
            "training.weight_sync_backend = 'nccl' needs trainer and server on different GPUs.",
            "Set resources.server_devices, or use 'ipc'.",
        )
    backend = wanted or ("ipc" if shared else "nccl")
    if backend == "ipc" and set(server) != {trainer[0]}:
        raise ConfigError(
            f"Weights go by ipc from the trainer's first device, {trainer[0]}, to a server on the same one, but the "
            f"server is on {list(server)}.",
            "Set resources.server_devices to that device, or to devices that the trainer does not use.",
        )
    return Placement("cuda", trainer, server, backend, len(trainer))


def _check_ranks(resources: ResourcesSection, trainer: tuple[int, ...]) -> None:
    if len(set(trainer)) != len(trainer):
        raise ConfigError(f"resources.trainer_devices = {list(trainer)} names a device twice.", "Name it once.")
    if resources.trainer_ranks not in (None, len(trainer)):
        raise ConfigError(
            f"resources.trainer_ranks = {resources.trainer_ranks}, and there are {len(trainer)} devices for the "
            f"trainer: {list(trainer)}.",
            "A trainer process has one device: correct one of the two.",
        )
