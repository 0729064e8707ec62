"""The trainer's side of tracking: metrics, settings, system metrics and checkpoints of one attempt (rank 0 only).

The flow owns the run and its status; here things are only added to it, in the background.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from asyncgrpo_core.launch.config import RunConfig
from asyncgrpo_core.launch.run_folder import Attempt, write_json
from asyncgrpo_core.tracking.checkpoints import CheckpointUploader
from asyncgrpo_core.tracking.mlflow_store import CheckpointArtifacts, MlflowSink, SystemMetrics, log_files
from asyncgrpo_core.tracking.run_record import read_run_file

if TYPE_CHECKING:
    from asyncgrpo_core.training.trainer import AsyncGRPOTrainer

logger = logging.getLogger(__name__)

METRICS_CLOSE_S = 30.0


class Tracking:
    """`with Tracking(...) as tracking:` writes to the attempt's MLflow run; does nothing without one."""

    def __init__(self, cfg: RunConfig, run_dir: Path, attempt: Attempt) -> None:
        self._cfg = cfg
        self._run_dir = run_dir
        self._resumed = attempt.attempt > 1
        self._resume_from = attempt.resume_from
        self._run = read_run_file(run_dir) if attempt.mlflow_run_id is not None else None
        self._sink: MlflowSink | None = None
        self._system: SystemMetrics | None = None
        self._uploader: CheckpointUploader | None = None
        self.callback: TrainerCallback = TrainerCallback()

    def __enter__(self) -> Tracking:
        if self._run is None:
            return self
        uri, run_id = self._run.uri, self._run.run_id
        self._sink = MlflowSink(uri, run_id, resume=self._resumed)
        store = CheckpointArtifacts(uri, run_id)
        self._uploader = CheckpointUploader(store, self._cfg.tracking.checkpoints, self._run_dir)
        if self._resume_from is not None:
            resumed = Path(self._resume_from)
            self._uploader.submit_missing(resumed.parent, int(resumed.name.rpartition("-")[2]))
        if self._cfg.tracking.system_metrics:
            self._system = SystemMetrics(uri, run_id, resume=self._resumed)
            self._system.start()
        self.callback = TrackingCallback(self._sink, self._uploader)
        return self

    def log(self, metrics: Mapping[str, float | None], step: int) -> None:
        """Metrics beside the trainer's own; None values are left out."""
        if self._sink is not None:
            self._sink.log({name: value for name, value in metrics.items() if value is not None}, step)

    def log_settings(self, trainer: AsyncGRPOTrainer) -> None:
        """The trainer's own arguments as they were resolved, beside the run's config (RUN/training_args.json)."""
        path = self._run_dir / "training_args.json"
        write_json(path, json.loads(trainer.args.to_json_string()))
        if self._run is not None:
            log_files(self._run.run_id, path, "config", uri=self._run.uri)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        closers: list[Callable[[], object]] = []
        if self._system is not None:
            closers.append(self._system.stop)
        if self._uploader is not None:
            closers.append(self._uploader.close)
        if self._sink is not None:
            sink = self._sink
            closers.append(lambda: sink.close(METRICS_CLOSE_S))
        for close in closers:
            try:
                close()
            except Exception:  # a tracker may not turn a finished training into a failure
                logger.exception("A part of the tracking did not close cleanly")


class TrackingCallback(TrainerCallback):
    """Hands logs to the sink and saved checkpoints to the uploader; neither blocks."""

    def __init__(self, sink: MlflowSink, uploader: CheckpointUploader) -> None:
        self._sink = sink
        self._uploader = uploader
        self._metrics: dict[str, float] = {}

    def on_log(self, args, state, control, logs: dict[str, Any] | None = None, **kwargs):
        if not state.is_world_process_zero or not logs:
            return
        numbers = {name: float(value) for name, value in logs.items() if isinstance(value, int | float)}
        self._metrics |= numbers
        self._sink.log(numbers, state.global_step)

    def on_save(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            self._uploader.submit(folder, state.global_step, metrics=dict(self._metrics))
