"""What the nccl and ipc backends share: vLLM's own trainer engine driven through our control client.

vLLM's `send_weights()` makes the whole round (start, update beside the broadcast, finish) through a client of
four methods. A collective cannot time out, so the round runs in a daemon thread with a deadline, and a reply
of the server that failed is raised at once instead of leaving the broadcast waiting for a peer.
"""

from __future__ import annotations

import base64
import math
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from asyncgrpo_core.errors import WeightSyncError
from asyncgrpo_core.sync.backend import Parameters, SyncControl, Transfer

T = TypeVar("T")


class ParameterMeta(NamedTuple):
    """vLLM's `ParamMeta`: what the receiving side allocates."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


class ParameterSource:
    """vLLM's `WeightSource` over our `Parameters` callable (structural: no vllm import).

    Names, dtypes and shapes do not change during a run; they are taken from the first pass.

    Args:
        parameters: the policy's weights.
        served_dtype: what the server holds matrices in. Wider ones are rounded before they are sent, as the server
            would round them: half the bytes of a float32 policy. Vectors travel as they are, because servers keep
            some of them in float32 (biases of routers, decays of recurrent layers). None sends everything as it is.
    """

    def __init__(self, parameters: Parameters, served_dtype: torch.dtype | None = None) -> None:
        self._parameters = parameters
        self._served_dtype = served_dtype
        self._metadata: list[ParameterMeta] | None = None

    def metadata(self) -> list[ParameterMeta]:
        if self._metadata is None:
            self._metadata = [ParameterMeta(n, self._sent_as(t), tuple(t.shape)) for n, t in self._parameters()]
        return self._metadata

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._parameters():
            yield name, tensor.detach().to(self._sent_as(tensor))

    def _sent_as(self, tensor: Tensor) -> torch.dtype:
        served = self._served_dtype
        if served is None or tensor.ndim < 2 or not tensor.is_floating_point():
            return tensor.dtype
        return served if served.itemsize < tensor.dtype.itemsize else tensor.dtype


class ControlClient:
    """vLLM's `VLLMWeightSyncClient` on top of our control client; remembers the first error of the server.

    `version` is what `finish_weight_update` reports. CUDA IPC handles are no JSON: they travel pickled
    (the server accepts them only with VLLM_ALLOW_INSECURE_SERIALIZATION=1).
    """

    def __init__(self, control: SyncControl) -> None:
        self._control = control
        self.version: int | None = None
        self.phase = ""
        self.error: BaseException | None = None
        self.failed = threading.Event()
        self.initialised = threading.Event()  # the server says that its side of the channel is open

    def expect(self) -> threading.Event:
        """Forget earlier errors; the event returned is set when a call from now on fails."""
        self.error, self.phase, self.failed = None, "", threading.Event()
        self.initialised = threading.Event()
        return self.failed

    def fail(self, error: BaseException) -> None:
        """End the work that is running with `error`, although nothing of it returned."""
        self.error = error
        self.failed.set()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init_weight_transfer", lambda: self._control.init_weight_transfer(init_info))
        self.initialised.set()

    def start_weight_update(self) -> None:
        self._call("start_weight_update", self._control.start_weight_update)

    def update_weights(self, update_info: Any) -> None:
        self._call("update_weights", lambda: self._control.update_weights(_json_safe(update_info)))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        version = weight_version if weight_version is not None else str(self.version)
        self._call("finish_weight_update", lambda: self._control.finish_weight_update(version))

    def _call(self, phase: str, call: Callable[[], None]) -> None:
        self.phase = phase
        try:
            call()
        except BaseException as error:
            self.fail(error)
            raise


def _json_safe(update_info: Any) -> Any:
    if isinstance(update_info, list):
        return [_json_safe(info) for info in update_info]
    handles = update_info.get("ipc_handles")
    if handles is None:
        return {key: value for key, value in update_info.items() if not key.startswith("ipc_handles")}
    rest = {key: value for key, value in update_info.items() if not key.startswith("ipc_handles")}
    return {**rest, "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode("ascii")}


def finish_device_work() -> None:
    """Return when everything that was asked of the current GPU is done; at once without one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def run_with_deadline(work: Callable[[], T], *, timeout_s: float, client: ControlClient, what: str) -> T:
    """Run `work` in a daemon thread and wait for it, at most `timeout_s`.

    Raises:
        WeightSyncError: the deadline passed.
        BaseException: what `work` raised, or what the server answered to a call of `client` meanwhile, or what
            `client.fail` was given (then `work` may hang in a collective for ever; its thread is left behind).
    """
    done = threading.Event()
    failed = client.expect()
    outcome: list[Any] = []
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def body() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)  # the current device is a property of the thread
            outcome.append((work(), None))
        except BaseException as error:
            outcome.append((None, error))
        done.set()

    def server_failed() -> None:
        failed.wait()
        done.set()

    threading.Thread(target=body, name=f"asyncgrpo-{what}", daemon=True).start()
    threading.Thread(target=server_failed, name=f"asyncgrpo-{what}-watch", daemon=True).start()
    if not done.wait(timeout_s):
        raise WeightSyncError(
            f"{what} did not finish within {timeout_s:.0f} s (last call to the server: {client.phase or 'none'}).",
            "Look at the server's log; raise vllm_server_timeout if the transfer is only slow.",
        )
    if not outcome:
        assert client.error is not None
        raise client.error
    result, error = outcome[0]
    failed.set()  # lets the watcher end
    if error is not None:
        raise error
    return result


class TrainerEngineBackend:
    """Base of the nccl and ipc backends: vLLM's trainer engine, made once, sending on every update."""

    name = ""
    evidence_by_checksums = True

    def __init__(
        self,
        control: SyncControl,
        parameters: Parameters,
        *,
        timeout_s: float = 1800.0,
        served_dtype: torch.dtype | None = None,
        make_engine: Callable[[ControlClient, ParameterSource, int], Any] | None = None,
    ) -> None:
        self._control = control
        self._client = ControlClient(control)
        self._source = ParameterSource(parameters, served_dtype)
        self._timeout_s = timeout_s
        self._make_engine = make_engine or self._vllm_engine
        self._engine: Any = None

    def connect(self) -> None:
        """Rendezvous with the server.

        Raises:
            WeightSyncError: deadline passed, or the backend found its channel unusable.
            ServerError: what the server answered.
        """
        world_size = int(self._control.world_size()) + 1  # the sender and every server worker
        self._engine = run_with_deadline(
            lambda: self._make_engine(self._client, self._source, world_size),
            timeout_s=self._timeout_s,
            client=self._client,
            what=f"{self.name} rendezvous with the server",
        )
        self._check_channel(self._engine)

    def prepare(self, version: int, *, compare: bool) -> Transfer:
        """Wait for the optimizer's kernels: vLLM reads the weights on streams of its own, which wait for nothing."""
        finish_device_work()
        return Transfer(version, compare, num_bytes=sum(m.num_bytes for m in self._source.metadata()))

    def deliver(self, transfer: Transfer) -> None:
        if self._engine is None:
            raise WeightSyncError(f"The {self.name} backend was asked to send before it was connected.")
        self._check_channel(self._engine)
        self._client.version = transfer.version
        run_with_deadline(
            self._engine.send_weights,
            timeout_s=self._timeout_s,
            client=self._client,
            what=f"{self.name} transfer of version {transfer.version}",
        )

    def discard(self, transfer: Transfer) -> None:
        """Nothing is left behind by a transfer."""

    def close(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None

    def _vllm_engine(self, client: ControlClient, source: ParameterSource, world_size: int) -> Any:
        raise TypeError(f"{type(self).__name__} does not say how its engine is made")

    def _check_channel(self, engine: Any) -> None:
        """Refuse an engine that would answer without transferring anything."""


def trainer_factory() -> Any:
    """vLLM's factory of trainer engines.

    Raises:
        WeightSyncError: this environment's vLLM has none (or there is no vLLM).
    """
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    except ImportError as error:
        raise WeightSyncError(
            f"The trainer's environment has no vLLM with trainer-side weight transfer ({error}).",
            "Install vllm 0.32 or newer beside the trainer.",
        ) from error
    return WeightTransferTrainerFactory
