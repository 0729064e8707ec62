"""Our client and source are what vLLM's own trainer engines take. In a child process: importing vllm is not free."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration

CODE = """
from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine
from vllm.plugins import load_general_plugins
from asyncgrpo_core.sync.gpu_transport import ControlClient, ParameterSource, trainer_factory
from tests.unit.sync_fakes import FakeServer, Policy

server, policy = FakeServer(), Policy()
client, source = ControlClient(server), ParameterSource(policy.parameters)
assert isinstance(client, VLLMWeightSyncClient)

# The engine's own check of metadata against iteration, and a whole round without a data plane.
engine = NCCLTrainerWeightTransferEngine(client=client, source=source, packed=False)
sent = []
engine._broadcast = lambda source, meta: sent.extend(n for n, _ in engine._checked_iter(source, meta))
client.version = 9
engine.send_weights()
assert sent == ["w", "bias"], sent
assert server.names == ["start_weight_update", "update_weights", "finish_weight_update"], server.names
assert ("finish_weight_update", "9") in server.calls

NCCLTrainerInitInfo("127.0.0.1", 1234, 2, rank=0), IPCTrainerInitInfo(packed=True, rank=0)
assert {"nccl", "ipc"} <= set(trainer_factory()._registry)

load_general_plugins()
engine_class = WeightTransferEngineFactory._registry["shm"]()
assert engine_class.__name__ == "ShmWeightTransferEngine" and not engine_class.__abstractmethods__
print("fits")
"""


def test_vllm_takes_our_client_source_and_engine() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and done.stdout.rstrip().endswith("fits"), done.stderr[-3000:]
