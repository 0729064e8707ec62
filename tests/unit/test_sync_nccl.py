"""NCCL that cannot work is refused at once: in the trainer before the server is asked, at the server by its silence."""

from __future__ import annotations

import sys
import threading
import time
from types import SimpleNamespace

import pytest

from asyncgrpo_core.errors import WeightSyncError
from asyncgrpo_core.sync import nccl
from asyncgrpo_core.sync.nccl import NcclBackend
from tests.unit.sync_fakes import FakeServer, Policy
from tests.unit.test_sync_transport import Engine


class FakeVLLM:
    """The parts of vLLM that the nccl backend imports. `library` is what loading NCCL does, `init` the rendezvous."""

    def __init__(self, monkeypatch, *, library=lambda: None, init=None) -> None:
        self.engines: list[Engine] = []
        parents = (
            "vllm",
            "vllm.distributed",
            "vllm.distributed.weight_transfer",
            "vllm.distributed.device_communicators",
        )
        for name in parents:
            monkeypatch.setitem(sys.modules, name, SimpleNamespace(__path__=[]))
        wrapper = SimpleNamespace(NCCLLibrary=library)
        monkeypatch.setitem(sys.modules, "vllm.distributed.device_communicators.pynccl_wrapper", wrapper)
        engine = SimpleNamespace(NCCLTrainerInitInfo=lambda *values, rank: SimpleNamespace(values=values, rank=rank))
        monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.nccl_engine", engine)
        monkeypatch.setattr(nccl, "trainer_factory", lambda: SimpleNamespace(trainer_init=init or self._init))

    def _init(self, info, *, client, source) -> Engine:
        self.engines.append(Engine(client, source, info.values[2]))
        return self.engines[-1]


def test_a_library_that_vllm_cannot_use_is_refused_before_the_server_is_asked(monkeypatch) -> None:
    """The server would wait in the rendezvous for a trainer whose communicator disabled itself."""

    def too_old():
        raise AttributeError("libnccl.so.2: undefined symbol: ncclCommSuspend")

    server = FakeServer()
    FakeVLLM(monkeypatch, library=too_old)
    channel = NcclBackend(server, Policy().parameters, timeout_s=10.0)
    with pytest.raises(WeightSyncError, match=r"undefined symbol: ncclCommSuspend.*disable itself.*VLLM_NCCL_SO_PATH"):
        channel.connect()
    assert "init_weight_transfer" not in server.names


def test_a_server_whose_communicator_disabled_itself_is_refused(monkeypatch) -> None:
    """It answers at once that its channel is open; the trainer would wait for it until vllm_server_timeout."""
    released = threading.Event()

    def rendezvous(info, *, client, source):
        client.init_weight_transfer_engine({})
        released.wait(30)  # ncclCommInitRank, in which the other side never arrives

    FakeVLLM(monkeypatch, init=rendezvous)
    monkeypatch.setattr(nccl, "_PEER_S", 0.2)
    channel = NcclBackend(FakeServer(), Policy().parameters, timeout_s=20.0)
    started = time.perf_counter()
    with pytest.raises(WeightSyncError, match=r"did not come to the rendezvous.*VLLM_NCCL_SO_PATH"):
        channel.connect()
    assert time.perf_counter() - started < 5
    released.set()


def test_a_rendezvous_that_both_sides_reach_is_no_fault(monkeypatch) -> None:
    vllm = FakeVLLM(monkeypatch)
    monkeypatch.setattr(nccl, "_PEER_S", 0.05)
    channel = NcclBackend(FakeServer(), Policy().parameters, timeout_s=10.0)
    channel.connect()
    time.sleep(0.2)
    channel.deliver(channel.prepare(3, compare=False))
    assert vllm.engines[0].sent == ["w", "bias"]
