"""Control flow of the nccl and ipc backends, with a fake engine and recorded replies of a vLLM 0.32 server."""

from __future__ import annotations

import base64
import pickle
import threading
import time
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from asyncgrpo_core.errors import ServerError, WeightSyncError
from asyncgrpo_core.server.control import VLLMControl
from asyncgrpo_core.sync import gpu_transport
from asyncgrpo_core.sync.gpu_transport import ControlClient, ParameterSource
from asyncgrpo_core.sync.ipc import IpcBackend, buffer_bytes
from asyncgrpo_core.sync.nccl import NcclBackend
from asyncgrpo_core.sync.publisher import make_publisher
from tests.unit.sync_fakes import CANARY, FakeServer, Policy

# What vLLM 0.32 answers on these routes.
RECORDED = {
    "/get_world_size": {"world_size": 2},
    "/init_weight_transfer_engine": {"message": "Weight transfer initialized"},
    "/start_weight_update": {"message": "Weight update started"},
    "/update_weights": {"message": "Weights updated"},
    "/finish_weight_update": {"message": "Weight update finished"},
}
REFUSED = {
    "error": {
        "message": "Call to collective_rpc method failed: Worker failed with error 'Refusing to deserialize "
        "`ipc_handles_pickled` without VLLM_ALLOW_INSECURE_SERIALIZATION=1', please check the stack trace above",
        "type": "InternalServerError",
        "param": None,
        "code": 500,
    }
}


class Engine:
    """vLLM's trainer engine in outline: start, update beside a broadcast, finish."""

    def __init__(self, client: ControlClient, source: ParameterSource, world_size: int) -> None:
        self.client, self.source, self.world_size = client, source, world_size
        self.model_update_group = SimpleNamespace(disabled=False)
        self.sent: list[str] = []
        self.broadcast_hangs = False
        self.closed = False
        client.init_weight_transfer_engine({"world_size": world_size, "rank_offset": 1})

    def send_weights(self) -> None:
        meta = self.source.metadata()
        self.client.start_weight_update()
        info = {
            "names": [m.name for m in meta],
            "dtype_names": [str(m.dtype).removeprefix("torch.") for m in meta],
            "shapes": [list(m.shape) for m in meta],
        }
        update = threading.Thread(target=self._update, args=(info,))
        update.start()
        if self.broadcast_hangs:
            time.sleep(30)
        self.sent = [name for name, _ in self.source]
        update.join()
        self.client.finish_weight_update()

    def _update(self, info: dict[str, Any]) -> None:
        try:
            self.client.update_weights(info)
        except ServerError:
            return  # in vLLM the error waits in a future that nobody reads while the broadcast hangs

    def shutdown(self) -> None:
        self.closed = True


def recorded_control(replies: dict[str, Any], seen: list[tuple[str, Any]]) -> VLLMControl:
    """The real control client on a transport that plays back replies."""
    import json

    def answer(request: httpx.Request) -> httpx.Response:
        route = request.url.path
        seen.append((route, json.loads(request.content) if request.content else None))
        reply = replies[route]
        return httpx.Response(500 if "error" in reply else 200, json=reply)

    control = VLLMControl("http://127.0.0.1:1")
    control._http = httpx.Client(base_url="http://127.0.0.1:1", transport=httpx.MockTransport(answer))
    return control


def backend(kind: type, control: Any, **options: Any):
    engines: list[Engine] = []

    def make(client, source, world_size):
        engines.append(Engine(client, source, world_size))
        return engines[-1]

    made = kind(control, Policy().parameters, make_engine=make, **{"timeout_s": 10.0, **options})
    return made, engines


@pytest.mark.parametrize("kind", [NcclBackend, IpcBackend])
def test_round_against_recorded_replies(kind: type) -> None:
    seen: list[tuple[str, Any]] = []
    channel, engines = backend(kind, recorded_control(RECORDED, seen))
    channel.connect()
    transfer = channel.prepare(12, compare=True)
    channel.deliver(transfer)
    assert [route for route, _ in seen] == list(RECORDED)
    bodies = dict(seen)
    assert bodies["/init_weight_transfer_engine"] == {"init_info": {"world_size": 3, "rank_offset": 1}}
    assert bodies["/update_weights"] == {
        "update_info": {"names": ["w", "bias"], "dtype_names": ["float32", "float32"], "shapes": [[8, 8], [8]]}
    }
    assert bodies["/finish_weight_update"] == {"weight_version": "12"}
    assert engines[0].sent == ["w", "bias"]
    assert transfer.num_bytes == (64 + 8) * 4
    channel.close()
    assert engines[0].closed


def test_disabled_communicator_is_refused_at_the_handshake() -> None:
    """It would make every broadcast a no-op while all calls answer 200."""
    server = FakeServer()
    channel, engines = backend(NcclBackend, server)

    def disabled(client, source, world_size):
        engine = Engine(client, source, world_size)
        engine.model_update_group.disabled = True
        return engine

    channel._make_engine = disabled
    with pytest.raises(WeightSyncError, match=r"disabled itself.*VLLM_NCCL_SO_PATH"):
        channel.connect()
    assert not engines


def test_communicator_that_disables_itself_later_is_refused() -> None:
    server = FakeServer()
    channel, engines = backend(NcclBackend, server)
    channel.connect()
    engines[0].model_update_group.disabled = True
    with pytest.raises(WeightSyncError, match="disabled itself"):
        channel.deliver(channel.prepare(1, compare=False))
    assert "start_weight_update" not in server.names


def test_missing_communicator_is_refused() -> None:
    channel, engines = backend(NcclBackend, FakeServer())
    channel.connect()
    engines[0].model_update_group = None
    with pytest.raises(WeightSyncError, match="no communicator"):
        channel.deliver(channel.prepare(1, compare=False))


def test_servers_refusal_beats_a_hanging_broadcast() -> None:
    """A collective cannot time out: the server's error must surface while the broadcast waits for its peer."""
    server = FakeServer(fail={"update_weights"})
    channel, engines = backend(NcclBackend, server, timeout_s=20.0)
    channel.connect()
    engines[0].broadcast_hangs = True
    started = time.perf_counter()
    with pytest.raises(ServerError, match="engine says no"):
        channel.deliver(channel.prepare(1, compare=False))
    assert time.perf_counter() - started < 5


def test_hanging_transfer_meets_its_deadline() -> None:
    channel, engines = backend(NcclBackend, FakeServer(), timeout_s=0.3)
    channel.connect()
    engines[0].broadcast_hangs = True
    with pytest.raises(WeightSyncError, match=r"transfer of version 4 did not finish within .* update_weights"):
        channel.deliver(channel.prepare(4, compare=False))


def test_hanging_rendezvous_meets_its_deadline() -> None:
    channel, _ = backend(NcclBackend, FakeServer(), timeout_s=0.3)
    channel._make_engine = lambda *_: time.sleep(30)
    with pytest.raises(WeightSyncError, match="rendezvous with the server did not finish"):
        channel.connect()


def test_sending_before_connecting_is_refused() -> None:
    channel, _ = backend(NcclBackend, FakeServer())
    with pytest.raises(WeightSyncError, match="before it was connected"):
        channel.deliver(channel.prepare(0, compare=False))


def test_a_failed_transfer_does_not_poison_the_next() -> None:
    server = FakeServer(fail={"start_weight_update"})
    channel, engines = backend(NcclBackend, server)
    channel.connect()
    with pytest.raises(ServerError):
        channel.deliver(channel.prepare(0, compare=False))
    server.fail = set()
    channel.deliver(channel.prepare(1, compare=False))
    assert engines[0].sent == ["w", "bias"]
    assert ("finish_weight_update", "1") in server.calls


def test_ipc_handles_travel_pickled() -> None:
    server = FakeServer()
    client = ControlClient(server)
    handles = [{"GPU-1": (1, b"raw", "x")}]
    client.update_weights({"names": ["w"], "ipc_handles": handles, "ipc_handles_pickled": None})
    (sent,) = [call[1] for call in server.calls if call[0] == "update_weights"]
    assert set(sent) == {"names", "ipc_handles_pickled"}
    assert pickle.loads(base64.b64decode(sent["ipc_handles_pickled"])) == handles


def test_ipc_names_the_environment_variable_of_the_server() -> None:
    channel, engines = backend(IpcBackend, recorded_control({**RECORDED, "/update_weights": REFUSED}, []))
    channel.connect()
    engines[0].send_weights = lambda: engines[0].client.update_weights({"names": []})  # type: ignore[method-assign]
    with pytest.raises(WeightSyncError, match="Start the server with VLLM_ALLOW_INSECURE_SERIALIZATION=1"):
        channel.deliver(channel.prepare(0, compare=False))


def test_ipc_says_that_trainer_and_server_are_on_different_gpus() -> None:
    text = "Worker failed with error 'IPC handle not found for GPU UUID 1a-b. Available UUIDs: ['2c-d']'"
    replies = {**RECORDED, "/update_weights": {"error": {**REFUSED["error"], "message": text}}}
    channel, engines = backend(IpcBackend, recorded_control(replies, []))
    channel.connect()
    engines[0].send_weights = lambda: engines[0].client.update_weights({"names": []})  # type: ignore[method-assign]
    with pytest.raises(WeightSyncError, match="another GPU than the trainer.*one GPU"):
        channel.deliver(channel.prepare(0, compare=False))


def test_source_gives_the_same_names_each_round_and_no_gradients() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 3))
    source = ParameterSource(lambda: iter([("a", weight)]))
    assert [(m.name, m.dtype, m.shape) for m in source.metadata()] == [("a", torch.float32, (2, 3))]
    for _ in range(2):
        ((name, tensor),) = list(source)
        assert name == "a" and not tensor.requires_grad


def test_matrices_travel_in_the_servers_dtype_and_nothing_is_widened() -> None:
    """A float32 policy for a bf16 server: half the bytes, and the numbers that the server would have made of them."""
    weights = {
        "matrix": torch.nn.Parameter(torch.randn(4, 6, generator=torch.Generator().manual_seed(0))),
        "vector": torch.linspace(0, 1, 6),
        "narrow": torch.ones(2, 2, dtype=torch.float16),
        "whole": torch.ones(2, 2, dtype=torch.int64),
    }
    source = ParameterSource(lambda: weights.items(), torch.bfloat16)
    sent = dict(source)
    assert [m.dtype for m in source.metadata()] == [torch.bfloat16, torch.float32, torch.float16, torch.int64]
    assert {name: t.dtype for name, t in sent.items()} == {m.name: m.dtype for m in source.metadata()}
    held = torch.empty(4, 6, dtype=torch.bfloat16).copy_(weights["matrix"])  # what a server does with float32
    assert torch.equal(sent["matrix"], held) and not sent["matrix"].requires_grad
    assert torch.equal(sent["vector"], weights["vector"])
    as_they_are = ParameterSource(lambda: weights.items(), torch.float32)
    assert all(t is not None and t.dtype == weights[name].dtype for name, t in as_they_are)


@pytest.mark.parametrize("name", ["nccl", "ipc"])
def test_the_publisher_tells_the_backend_what_the_server_holds(name) -> None:
    says = SimpleNamespace(
        weight_transfer_backend=name,
        device_type="cuda",
        dtype="bfloat16",
        routes=frozenset(),
        raw={},
        worker_extension=None,
        data_parallel_size=None,
    )
    policy = Policy()
    made = make_publisher(
        control=FakeServer(), capabilities=says, backend=None, parameters=policy.parameters, score=policy.score,
        canary_ids=CANARY, trainer_device="cuda", same_gpu=name == "ipc",
    )  # fmt: skip
    assert made.backend.prepare(0, compare=False).num_bytes == 64 * 2 + 8 * 4


@pytest.mark.parametrize("kind", [NcclBackend, IpcBackend])
def test_the_optimizers_kernels_have_finished_before_the_server_is_asked_for_anything(monkeypatch, kind) -> None:
    """vLLM packs the weights on streams that do not wait for the optimizer's: half of a step could be sent."""
    server = FakeServer()
    done: list[list[str]] = []
    monkeypatch.setattr(gpu_transport, "finish_device_work", lambda: done.append(list(server.names)))
    channel, _ = backend(kind, server)
    channel.connect()
    before = list(server.names)
    channel.deliver(channel.prepare(1, compare=False))
    assert done == [before] and "start_weight_update" not in before


@pytest.mark.parametrize(
    ("tensors", "wanted"),
    [([10, 20], 30), ([600 << 20, 900 << 20], 1 << 30), ([5, 1244 << 20], 1244 << 20), ([], 1)],
)
def test_the_ipc_buffer_holds_the_largest_tensor(tensors, wanted) -> None:
    """vLLM's own 1 GiB is too small for the embedding of an 8B model."""
    assert buffer_bytes(tensors) == wanted
