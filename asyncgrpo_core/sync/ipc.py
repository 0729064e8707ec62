"""The `ipc` backend: trainer and server on one GPU, weights by CUDA IPC handles.

The handles are pickled, so the server must run with VLLM_ALLOW_INSECURE_SERIALIZATION=1.
"""

from __future__ import annotations

from typing import Any

from asyncgrpo_core.errors import ServerError, WeightSyncError
from asyncgrpo_core.sync.backend import Transfer
from asyncgrpo_core.sync.gpu_transport import (
    ControlClient,
    ParameterSource,
    TrainerEngineBackend,
    trainer_factory,
)

_BUFFER_BYTES = 1 << 30  # vLLM's own default


class IpcBackend(TrainerEngineBackend):
    """Weights by CUDA IPC. Args as in `TrainerEngineBackend`, and:

    Args:
        packed: send through one reused buffer instead of one handle per tensor (less memory, a little slower).
    """

    name = "ipc"

    def __init__(self, *args: Any, packed: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._packed = packed

    def deliver(self, transfer: Transfer) -> None:
        try:
            super().deliver(transfer)
        except ServerError as error:
            if "INSECURE_SERIALIZATION" in str(error):
                raise WeightSyncError(
                    f"The server refused the CUDA IPC handles: {error}",
                    "Start the server with VLLM_ALLOW_INSECURE_SERIALIZATION=1 in its environment.",
                ) from error
            if "IPC handle not found for GPU UUID" in str(error):
                raise WeightSyncError(
                    f"The server computes on another GPU than the trainer: {error}",
                    "Start both on one GPU (CUDA_VISIBLE_DEVICES), or use the backend 'nccl' on both sides.",
                ) from error
            raise

    def _vllm_engine(self, client: ControlClient, source: ParameterSource, world_size: int) -> Any:
        factory = trainer_factory()
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        size = buffer_bytes([meta.num_bytes for meta in source.metadata()])
        info = IPCTrainerInitInfo(packed=self._packed, packed_buffer_size_bytes=size, rank=0)
        return factory.trainer_init(info, client=client, source=source)


def buffer_bytes(tensor_bytes: list[int]) -> int:
    """Size of the buffer that tensors are packed into: vLLM refuses a tensor that is larger than it.

    All of a small policy, 1 GiB of a large one, and never less than its largest tensor (an embedding of 152k tokens
    and 4,096 features has 1.2 GB in bf16).
    """
    return max(min(sum(tensor_bytes), _BUFFER_BYTES), max(tensor_bytes, default=0), 1)
