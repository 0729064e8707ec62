"""The `nccl` backend: trainer and server on different GPUs, weights broadcast over NCCL.

A PyNcclCommunicator that cannot load its library *disables itself*: every broadcast becomes a no-op while all
calls answer 200. So the library is tried before the server is asked for anything; a communicator whose `disabled` is
true is refused, at the handshake and before each send; and a server whose side disabled itself is recognised by its
answer: it says that its channel is open while the rendezvous, which needs both sides, goes on.
"""

from __future__ import annotations

import socket
import threading
from typing import Any

from asyncgrpo_core.errors import WeightSyncError
from asyncgrpo_core.sync.gpu_transport import (
    ControlClient,
    ParameterSource,
    TrainerEngineBackend,
    trainer_factory,
)

_PEER_S = 30.0  # a rendezvous ends on both sides at once

_FIX = (
    "Install NCCL >= 2.29.7, or point VLLM_NCCL_SO_PATH at one that vLLM accepts, for the trainer and for the server."
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
        _require_library()
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        info = NCCLTrainerInitInfo(self._host, free_port(), world_size, rank=0)
        done = threading.Event()
        threading.Thread(target=self._watch_peer, args=(client, done), name="asyncgrpo-nccl-peer", daemon=True).start()
        try:
            return factory.trainer_init(info, client=client, source=source)
        finally:
            done.set()

    def _watch_peer(self, client: ControlClient, done: threading.Event) -> None:
        """Ends a rendezvous to which the server will not come, because its communicator disabled itself."""
        if client.initialised.wait(self._timeout_s) and not done.wait(_PEER_S):
            client.fail(
                WeightSyncError(
                    f"The server says that its nccl channel is open, but it did not come to the rendezvous within "
                    f"{_PEER_S:.0f} s: its communicator disabled itself, because the NCCL library that it found is too "
                    "old or cannot be loaded.",
                    _FIX,
                )
            )

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
                _FIX,
            )


def _require_library() -> None:
    """Load the NCCL library as vLLM will, so that a communicator which would disable itself is never made.

    Raises:
        WeightSyncError: vLLM cannot use the library that it finds.
    """
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    try:
        NCCLLibrary()
    except Exception as error:  # vLLM raises what ctypes raises: OSError, AttributeError, ValueError
        raise WeightSyncError(
            f"vLLM cannot use the NCCL library that it finds in the trainer ({error}): its communicator would disable "
            "itself, and every broadcast would do nothing and still report success.",
            _FIX,
        ) from error


def free_port() -> int:
    """A TCP port that is free now, for the rendezvous store of the NCCL group."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
