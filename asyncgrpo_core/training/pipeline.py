"""Everything around the optimizer: server, weight sync, rollout worker, sample source, books.

start():  server ready and fitting -> books (new or resumed) -> first sync, proved -> worker -> source
step():   rows of one step                     finish_step(): books, then sync when due
stop():   worker, publisher, books; each closed on its own, whatever failed before
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncgrpo_core.errors import ServerError, WeightSyncError
from asyncgrpo_core.ledger import LedgerWriter
from asyncgrpo_core.ledger_counts import CountsReader
from asyncgrpo_core.metrics import MetricWindow
from asyncgrpo_core.packing.planner import CostModel
from asyncgrpo_core.rollout.buffer import SampleBuffer
from asyncgrpo_core.rollout.worker import RolloutWorker
from asyncgrpo_core.slots import SlotBook
from asyncgrpo_core.sync.fleet import FleetPublisher
from asyncgrpo_core.sync.lora import AdapterVersions
from asyncgrpo_core.sync.reports import SyncReport
from asyncgrpo_core.training.checkpoint import RolloutState
from asyncgrpo_core.training.clock import OverlapMeter
from asyncgrpo_core.training.config import AsyncGRPOConfig
from asyncgrpo_core.training.run_context import Counters, PolicyLink, RunContext, close_all, count_one_more, set_aside
from asyncgrpo_core.training.servers import meet_servers
from asyncgrpo_core.training.source import SampleSource, Step, TokenAllowance
from asyncgrpo_core.training.sync_metrics import record_sync
from asyncgrpo_core.types import TrainingSample

logger = logging.getLogger(__name__)

_STOP_MAY_FOLLOW_S = 1.0


class Pipeline:
    """Owns what runs beside the optimizer for one call of `train()`.

    Args:
        worker_arguments: keyword arguments for `RolloutWorker` that come from the trainer's constructor.
        should_stop: asked while waiting for samples: asked to stop, or everything is trained.
        stop_requested: whether somebody asked the run to stop early.
    """

    def __init__(
        self,
        args: AsyncGRPOConfig,
        run: RunContext,
        *,
        model_name: str,
        num_rows: int | None,
        worker_arguments: dict[str, Any],
        window: MetricWindow,
        should_stop: Callable[[], bool],
        stop_requested: Callable[[], bool],
    ) -> None:
        self.args, self.run, self.window = args, run, window
        self.model_name = run.served_model_name or model_name
        self.num_rows = num_rows
        self.worker_arguments = worker_arguments
        self._should_stop, self._stop_requested = should_stop, stop_requested
        self.counters = Counters()
        self.policy_version = 0
        self.publisher: FleetPublisher | None = None
        self.adapters: AdapterVersions | None = None  # where a sync sends only the adapter
        self.worker: RolloutWorker | None = None
        self.ledger: LedgerWriter | None = None
        self.source: SampleSource | None = None
        self.overlap: OverlapMeter | None = None
        self.buffer = SampleBuffer(run.run_dir / "buffer")
        self.book = SlotBook(num_rows=num_rows, regenerate=args.regenerate_dropped)
        self.token_budget = args.token_budget or 0
        self.worker_settings: dict[str, Any] = {}  # what the worker need not ask the server again
        self._started_at = time.monotonic()
        self._unsynced_steps = 0
        self._first_sync_is_due = False
        self._loop_state: Any = None  # of a custom loop, from the checkpoint
        self._counts = CountsReader(run.run_dir / "ledger.sqlite")
        self._stopped = False

    # -- start ----------------------------------------------------------------------------------------------------

    def start(self, policy: PolicyLink, resumed: tuple[RolloutState, list[TrainingSample], Path] | None) -> None:
        """Bring everything up; on return samples are on their way.

        Raises:
            ServerError, ServerMismatchError: the server is away or contradicts the config.
            WeightSyncError: the first sync could not be proved.
        """
        self._started_at = time.monotonic()
        self._stopped = False
        servers = meet_servers(self.args, self.model_name, policy)
        self.token_budget = self.args.token_budget or servers.token_budget()
        self.worker_settings = servers.worker_settings()
        self.adapters = servers.adapters
        samples = self._open_books(resumed)
        self.publisher = FleetPublisher(servers.sync_servers(), self._server_has)
        report = self.publisher.publish(self.policy_version, verify=True)
        if self._first_sync_is_due:  # the checkpoint's last steps were never sent: this was their sync
            self.counters.sync = count_one_more(self.counters.sync)
        logger.info(
            "Policy version %d is on %s (largest log-probability difference %.1e).",
            self.policy_version,
            ", ".join(self.args.server_urls),
            report.max_abs_logp_diff,
        )
        self._start_worker(samples, policy.row_cost)

    def _open_books(self, resumed: tuple[RolloutState, list[TrainingSample], Path] | None) -> list[TrainingSample]:
        self.buffer.clear()
        path = self.run.run_dir / "ledger.sqlite"
        if resumed is None:
            if self.run.attempt <= 1:  # a later attempt without a checkpoint rolls back what the earlier ones wrote
                set_aside(path)
            self.ledger = LedgerWriter(path, num_rows=self.num_rows)
            self.book.continue_after(self.ledger.last_seq)
            return []
        state, samples, folder = resumed
        self._first_sync_is_due = state.unsynced_steps > 0
        self._loop_state = state.loop_state
        self.policy_version = state.policy_version + self._first_sync_is_due
        self.counters = Counters(**state.counters)
        self.book.load_state_dict(state.slots)
        snapshot = folder / "ledger.sqlite"
        self.ledger = LedgerWriter(
            path,
            num_rows=self.num_rows,
            checkpoint_seq=self.book.ledger_seq,
            snapshot=snapshot if snapshot.is_file() else None,
        )
        self.book.continue_after(self.ledger.last_seq)
        return samples

    def _server_has(self, index: int, version: int) -> None:
        """A server holds a policy version now, or was left out by a sync."""
        if self.worker is not None:
            self.worker.set_server_version(index, version)

    def _start_worker(self, samples: list[TrainingSample], row_cost: CostModel) -> None:
        args = self.args
        allowance = TokenAllowance(
            max_staleness=0 if args.synchronous else args.max_staleness,
            step_tokens=args.gradient_accumulation_steps * args.world_size * self.token_budget,
        )
        self.worker = RolloutWorker(
            config=args,
            model_name=self.model_name,
            buffer=self.buffer,
            resume_state=self.book.worker_resume_state(
                {sample.slot for sample in samples}, buffered_samples={sample.sample_id for sample in samples}
            )
            | {"loop_state": self._loop_state},
            initial_allowance=0 if args.synchronous else allowance.value,
            initial_version=self.policy_version,
            log_path=self.run.run_dir / "logs" / "rollout.log",
            lora_name=self.adapters.store.stem if self.adapters is not None else None,
            run_settings=self.worker_settings,
            **self.worker_arguments,
        )
        if self.adapters is not None:
            self.adapters.uses = self.worker
        assert self.ledger is not None
        self.source = SampleSource(
            buffer=self.buffer,
            book=self.book,
            ledger=self.ledger,
            window=self.window,
            worker=self.worker,
            allowance=allowance,
            token_budget=self.token_budget,
            max_staleness=args.max_staleness,
            version=lambda: self.policy_version,
            should_stop=self._should_stop,
            world_size=args.world_size,
            row_cost=row_cost,
            synchronous=args.synchronous,
        )
        self.source.loop_state = self._loop_state
        self.source.preload(samples)
        self.ledger.write(self.book.drain_rows())
        for slot, generation in self.book.pending_regenerations():
            self.buffer.request_regeneration(slot, generation)
        self.source.publish_allowance()
        self.worker.start()
        self.overlap = OverlapMeter(self.worker.in_flight)
        self.overlap.start()

    # -- the clock's side -----------------------------------------------------------------------------------------

    def next_step(self, num_microbatches: int) -> Step | None:
        assert self.source is not None
        return self.source.next_step(num_microbatches)

    def finish_step(self, step: Step, step_number: int, *, skipped: bool = False) -> None:
        """Write the step into the books and send the weights when they are due.

        Args:
            skipped: the step did not reach the weights: its samples are given up, and there is nothing to send.

        Raises:
            ServerError, WeightSyncError: the sync failed, and nobody had asked the run to stop.
        """
        assert self.source is not None
        if skipped:
            self.source.drop_step(step)
            return
        self.source.finish_step(step, step_number)
        self._unsynced_steps += 1
        if self._unsynced_steps >= self.args.weight_sync_steps:
            self._sync_unless_stopping()

    def _sync_unless_stopping(self) -> None:
        # A killed launcher takes the server down while it asks the trainer to stop: a sync that fails then must
        # not cost the last checkpoint. The next attempt's first sync sends these weights.
        try:
            self.sync()
        except (ServerError, WeightSyncError) as error:
            deadline = time.monotonic() + _STOP_MAY_FOLLOW_S  # the server may be gone before the signal is here
            while not self._stop_requested():
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
            logger.warning("The last weights were not sent, because the run is stopping: %s", error)

    def sync(self) -> SyncReport:
        """Send the current weights to every server as the next policy version."""
        assert self.publisher is not None and self.worker is not None
        report = self.publisher.publish(self.policy_version + 1)
        self.policy_version += 1
        self._unsynced_steps = 0
        self.worker.set_version(self.policy_version)
        if self.adapters is not None:
            self.adapters.retire(self.policy_version)
        record_sync(self.window, report, self.publisher)
        return report

    def finish(self) -> None:
        """End generation and make sure the server holds the final weights."""
        assert self.worker is not None
        self.worker.stop(timeout_s=30.0)
        if self._unsynced_steps:
            self._sync_unless_stopping()

    def stop(self) -> None:
        """Close everything that was opened. The first error is raised after all were tried."""
        closers: list[Callable[[], object]] = []
        if self.overlap is not None:
            closers.append(self.overlap.stop)
        if self.worker is not None:
            closers.append(lambda: self.worker.stop(timeout_s=30.0) if self.worker else None)
        if self.publisher is not None:
            closers.append(self.publisher.close)
        if self.source is not None:
            closers.append(self.source.drain)
        if self.ledger is not None:
            closers.append(self.ledger.close)
        self._stopped = True
        close_all(closers)

    # -- what is known --------------------------------------------------------------------------------------------

    def current_counters(self) -> Counters:
        """The cumulative counters as of now: earlier attempts plus this one."""
        base, now = self.counters, Counters(**vars(self.counters))
        now.train_s = base.train_s + time.monotonic() - self._started_at
        if self.worker is not None:
            now.generated_tokens = base.generated_tokens + self.worker.generated_tokens()
        if self.overlap is not None:
            now.overlapped_s = base.overlapped_s + self.overlap.overlapped_s
            now.window_s = base.window_s + self.overlap.total_s
        if self.publisher is not None:
            now.sync = self.publisher.stats(base.sync)
        return now

    def rollout_setup(self) -> dict[str, Any]:
        """How the rollout worker generates, for the held-out evaluation: keyword arguments of `evaluate_heldout`."""
        names = ("loop_cls", "processing_class", "eos_token_ids", "tools", "environment_factory")
        return {name: self.worker_arguments[name] for name in names} | {
            "run_settings": self.worker_settings,
            "server_versions": self.publisher.versions if self.publisher is not None else None,
            "lora_name": self.adapters.store.stem if self.adapters is not None else None,
            "model_version": self.policy_version,
        }

    def ledger_counts(self) -> dict[str, Any] | None:
        """The `ledger` block of run_summary.json; at most a moment old, exact once the pipeline has stopped."""
        return None if self.ledger is None else self._counts.read(fresh=self._stopped)

    def rollout_state(self, global_step: int) -> RolloutState:
        return RolloutState(
            global_step=global_step,
            policy_version=self.policy_version,
            slots=self.book.state_dict(),
            counters=vars(self.current_counters()),
            unsynced_steps=self._unsynced_steps,
            loop_state=self.source.loop_state if self.source is not None else self._loop_state,
        )

    def buffered_samples(self) -> list[TrainingSample]:
        """Samples generated and not yet trained, oldest first; the buffer is drained first."""
        assert self.source is not None
        self.source.drain()
        return list(self.source.pending)
