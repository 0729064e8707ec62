"""The `nccl` backend: trainer and server on different GPUs, weights broadcast over NCCL.

A PyNcclCommunicator that cannot load its library *disables itself*: every broadcast becomes a no-op while all
calls answer 200. So a communicator whose `disabled` is true is refused, at the handshake and before each send.
"""

from __future__ import annotations

import socket
from typing import Any

from asyncgrpo_core.errors import WeightSyncError
from asyncgrpo_core.sync.gpu_transport import (
    ControlClient,
    ParameterSource,
    TrainerEngineBackend,
    trainer_factory,
)


class NcclBackend(TrainerEngineBackend):
    """Weights by NCCL broadcast. Args as in `TrainerEngineBackend`, and:

    Args:
        host: the address under which the server's workers reach this process.
    """

    name = "nccl"

    def __init__(self, *args: Any, host: str = "127.0.0.1", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._host = host

    def _vllm_engine(self, client: ControlClient, source: ParameterSource, world_size: int) -> Any:
        factory = trainer_factory()
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        info = NCCLTrainerInitInfo(self._host, free_port(), world_size, rank=0)
        return factory.trainer_init(info, client=client, source=source)

    def _check_channel(self, engine: Any) -> None:
        group = getattr(engine, "model_update_group", None)
        if group is None:
            raise WeightSyncError(
                "The nccl weight transfer opened no communicator.", "Look for NCCL errors in the trainer's log."
            )
        if getattr(group, "disabled", False):
            raise WeightSyncError(
                "The nccl communicator disabled itself: every broadcast would do nothing and still report success. "
                "The NCCL library that it found is too old or cannot be loaded.",
                "Install NCCL >= 2.29.7, or point VLLM_NCCL_SO_PATH at one that vLLM accepts, "
                "for the trainer and for the server.",
            )


def free_port() -> int:
    """A TCP port that is free now, for the rendezvous store of the NCCL group."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
