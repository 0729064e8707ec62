"""Publishing a policy version: the one place where weights go from the trainer to the server.

    prepare -> pause(keep) -> barrier -> start, update, finish(version) -> resume -> proof
    (server       (server paused: requests in flight are frozen)            (server generates again)
     generates)

An adapter (lora.py) is loaded beside the older ones, so nothing is paused then.

Every call is checked and has a deadline. A failure says in which phase, at which version and what the server
answered, and the server is resumed when it can be, so that a failed sync does not leave it frozen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from asyncgrpo_core.errors import AsyncGRPOError, ConfigError, WeightSyncError
from asyncgrpo_core.server.capabilities import WORKER_EXTENSION
from asyncgrpo_core.sync.backend import Backend, Parameters, SyncControl, Transfer, dtype_name, select_backend
from asyncgrpo_core.sync.canary import FAILED, Noise, Verdict, noise_for
from asyncgrpo_core.sync.lora import AdapterVersions, LoraBackend
from asyncgrpo_core.sync.lora_probe import AdapterProbe, PolicyAdapter
from asyncgrpo_core.sync.proof import Prover
from asyncgrpo_core.sync.reports import DeliveryError, Phases, SyncReport, SyncTotals, build_report, delivery_message


class Publisher:
    """Sends policy versions to one server and proves that they arrived. Made by `make_publisher`.

    Args:
        backend: how the tensors travel.
        control: the server.
        prover: the delivery proof.
        verify_sync_every: every how many syncs delivery is proved; the first is always.
        kv_after_sync: "recompute" resets the caches, running requests go on with recomputed keys and values;
            "keep" leaves them.
        barrier: called while the server is paused and before the tensors travel (several trainer ranks).
        on_failed: called when a sync failed and before the server is resumed: what it generates from then on may be
            computed with some of the new weights.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        control: SyncControl,
        prover: Prover,
        verify_sync_every: int,
        kv_after_sync: str,
        barrier: Callable[[], None] | None = None,
        on_failed: Callable[[], None] | None = None,
    ) -> None:
        if verify_sync_every < 1:
            raise ConfigError(f"verify_sync_every is {verify_sync_every}.", "Set it to 1 or more.")
        if kv_after_sync not in ("recompute", "keep"):
            raise ConfigError(f"kv_after_sync is {kv_after_sync!r}.", "Set it to 'recompute' or 'keep'.")
        self.backend = backend
        self._control = control
        self._prover = prover
        self._verify_every = verify_sync_every
        self._clear_cache = kv_after_sync == "recompute"
        self._barrier = barrier or (lambda: None)
        self._on_failed = on_failed or (lambda: None)
        self._connected = False
        self._started = False  # the sync at the start of this attempt is done
        self._num_syncs = 0  # since the start of this attempt, its first sync not counted
        self._totals = SyncTotals()

    def publish(self, version: int, *, verify: bool | None = None) -> SyncReport:
        """Send the policy as it is now as `version`, and prove it when that is due.

        The first sync of a publisher is the one at the start of an attempt: always proved, not counted.

        Args:
            verify: True or False overrides `verify_sync_every` (not at the first call).

        Raises:
            WeightSyncError: a call failed or timed out (phase and the server's words in the message).
            DeliveryError: the server computes with other weights than were sent (names them), or three proofs in
                a row said nothing.
        """
        first = not self._started
        due = first or (self._num_syncs + 1) % self._verify_every == 0
        verifying = due if verify is None or first else verify
        phases = Phases()
        if not self._connected:
            self._connect(version, phases)
        transfer = self._send(version, verifying, phases)
        verdict = None
        if verifying:
            with phases.phase("verify"):
                verdict = self._prove(version, transfer)
        report = build_report(version, transfer, verdict, phases.seconds)
        self._started = True
        if not first:
            self._num_syncs += 1
            self._totals.add(report)
        if verdict is not None:
            self._prover.count(version, verdict)
        return report

    def stats(self, previous: dict[str, Any] | None = None) -> dict[str, Any]:
        """`weight_sync` of run_summary.json, added to `previous` (that of earlier attempts of the run).

        The sync at the start of the attempt is in none of the counts; its difference is in the maximum.
        """
        return self._totals.summary(self.backend.name, previous)

    @property
    def max_abs_logp_diff(self) -> float:
        """The largest canary difference that was seen, failed proofs included, in nats."""
        return self._totals.max_abs_logp_diff

    def close(self) -> None:
        """Release the channel and leave no file behind."""
        self.backend.close()

    def _connect(self, version: int, phases: Phases) -> None:
        phases.current = "connect"
        try:
            self.backend.connect()
            self._prover.before_first_sync()
        except DeliveryError:
            raise
        except AsyncGRPOError as error:
            raise self._error(version, phases, error) from error
        self._connected = True

    def _send(self, version: int, compare: bool, phases: Phases) -> Transfer:
        transfer: Transfer | None = None
        pausing = False
        try:
            with phases.phase("transfer"):
                phases.current = "prepare"
                transfer = self.backend.prepare(version, compare=compare)
            with phases.phase("pause"):
                if transfer.pauses:
                    pausing = True
                    self._control.pause(mode="keep", clear_cache=self._clear_cache)
            with phases.phase("barrier"):
                self._barrier()
            with phases.phase("transfer"):
                self.backend.deliver(transfer)
                if pausing:
                    phases.current = "resume"
                    pausing = False
                    self._control.resume()
        except AsyncGRPOError as error:
            raise self._error(version, phases, error, resume=pausing) from error
        except BaseException:
            if pausing:
                self._try_resume()
            raise
        finally:
            if transfer is not None:
                self.backend.discard(transfer)
        return transfer

    def _prove(self, version: int, transfer: Transfer) -> Verdict:
        try:
            verdict = self._prover.examine(transfer)
        except AsyncGRPOError as error:
            raise WeightSyncError(
                f"Weight sync of policy version {version} could not be proved ({self.backend.name}): {error}"
            ) from error
        self._totals.saw_difference(verdict.max_abs_diff)
        if verdict.state == FAILED:
            raise DeliveryError(*delivery_message(version, self.backend.name, verdict, transfer.evidence))
        return verdict

    def _error(self, version: int, phases: Phases, error: AsyncGRPOError, resume: bool = False) -> WeightSyncError:
        after = self._try_resume() if resume else ""
        return WeightSyncError(
            f"Weight sync of policy version {version} ({self.backend.name}) failed in phase "
            f"{phases.current!r}: {error}{after}"
        )

    def _try_resume(self) -> str:
        """Resume after a failure; says in the error when the server stays paused."""
        self._on_failed()
        try:
            self._control.resume()
        except AsyncGRPOError as error:
            return f" The server could not be resumed either and may stay paused: {error}"
        return " The server was resumed."


def make_publisher(
    *,
    control: Any,
    capabilities: Any,
    backend: str | None,
    parameters: Parameters,
    score: Callable[[list[int]], list[float]],
    canary_ids: list[int],
    verify_sync_every: int = 1,
    kv_after_sync: str = "recompute",
    timeout_s: float = 1800.0,
    trainer_dtype: str | torch.dtype = "float32",
    trainer_device: str = "cpu",
    same_gpu: bool = False,
    noise: Noise | None = None,
    barrier: Callable[[], None] | None = None,
    on_failed: Callable[[], None] | None = None,
    adapters: tuple[AdapterVersions, PolicyAdapter] | None = None,
    **backend_options: Any,
) -> Publisher:
    """Choose the backend from devices and server, and make the publisher of this attempt.

    Args:
        control: `server.control.VLLMControl`; its own deadline bounds every HTTP call.
        capabilities: `server.control.ServerCapabilities` (device_type, dtype, weight_transfer_backend).
        backend: "shm", "nccl", "ipc", or None / "auto".
        timeout_s: deadline of a collective (nccl, ipc), in seconds.
        trainer_device, same_gpu: where the policy is, and whether the server shares that GPU.
        score: the trainer's log-probabilities of canary tokens 1..n-1 under the policy as it is now.
        canary_ids: the canary prompt (token ids, at least two; see `canary.canary_token_ids`).
        parameters: yields (Hugging Face name, full tensor) of the policy as it is now.
        noise: replaces the table in `canary.noise_for`.
        adapters: the run's adapter versions and the trainer's adapter: only the adapter is sent (`backend` is unused).
        backend_options: of the chosen backend (shm: directory, fault; nccl: host; ipc: packed).
        The others: see `Publisher`.

    Raises:
        ConfigError, ServerMismatchError: see `select_backend`.
    """
    server_dtype = dtype_name(capabilities.dtype)
    can_check = server_dtype is not None and "/weight_checker" in capabilities.routes
    noise = noise or noise_for(dtype_name(trainer_dtype), server_dtype)
    if adapters is not None:
        versions, adapter = adapters
        probe = AdapterProbe(versions.store, adapter, score=score, canary_ids=canary_ids, noise=noise)
        channel: Backend = LoraBackend(control, versions, probe, engines=capabilities.data_parallel_size or 1)
    else:
        chosen = select_backend(
            backend,
            server_backend=_configured_backend(capabilities),
            server_device=capabilities.device_type,
            trainer_device=trainer_device,
            same_gpu=same_gpu,
        )
        channel = _make_backend(chosen, control, parameters, timeout_s, server_dtype, backend_options)
    prover = Prover(
        channel,
        control=control,
        parameters=parameters,
        score=score,
        canary_ids=canary_ids,
        noise=noise,
        checksum_dtype=getattr(torch, server_dtype) if can_check and server_dtype else None,
        # /collective_rpc asks one engine, /weight_checker all.
        fingerprints=capabilities.worker_extension == WORKER_EXTENSION and capabilities.data_parallel_size == 1,
    )
    return Publisher(
        channel,
        control=control,
        prover=prover,
        verify_sync_every=verify_sync_every,
        kv_after_sync=kv_after_sync,
        barrier=barrier,
        on_failed=on_failed,
    )


def _configured_backend(capabilities: Any) -> str | None:
    """The server's --weight-transfer-config backend; "" when it says that there is none, None when it says nothing."""
    if capabilities.weight_transfer_backend is not None:
        return capabilities.weight_transfer_backend
    return "" if capabilities.raw.get("/server_info") else None


def _make_backend(
    name: str,
    control: SyncControl,
    parameters: Parameters,
    timeout_s: float,
    server_dtype: str | None,
    options: dict[str, Any],
) -> Backend:
    if name == "shm":
        from asyncgrpo_core.sync.shm import ShmBackend

        return ShmBackend(control, parameters, **options)
    served_dtype = None if server_dtype is None else getattr(torch, server_dtype)
    if name == "nccl":
        from asyncgrpo_core.sync.nccl import NcclBackend

        return NcclBackend(control, parameters, timeout_s=timeout_s, served_dtype=served_dtype, **options)
    from asyncgrpo_core.sync.ipc import IpcBackend

    return IpcBackend(control, parameters, timeout_s=timeout_s, served_dtype=served_dtype, **options)
