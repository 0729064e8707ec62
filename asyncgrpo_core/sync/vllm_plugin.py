"""vLLM plugin: registers the `shm` weight-transfer engine (entry point group `vllm.general_plugins`).

vLLM calls `register` in every one of its processes, possibly more than once, also in processes that never
load a model: so importing this module imports nothing, and a second call changes nothing.
"""

from __future__ import annotations

ENGINE_NAME = "shm"


def register() -> None:
    """Make `--weight-transfer-config '{"backend": "shm"}'` known to this vLLM process (idempotent)."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if ENGINE_NAME in WeightTransferEngineFactory._registry:
        return
    WeightTransferEngineFactory.register_engine(
        ENGINE_NAME, "asyncgrpo_core.sync.shm_engine", "ShmWeightTransferEngine"
    )
