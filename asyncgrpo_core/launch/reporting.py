"""What the trainer process tells about itself while it runs: run_summary.json and progress.json."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from asyncgrpo_core.launch.progress import Progress, write_progress

if TYPE_CHECKING:
    from asyncgrpo_core.training.trainer import AsyncGRPOTrainer

# metric -> field of Progress
_SHOWN = {
    "reward": "reward",
    "rollout/generated_tokens_per_s": "tokens_per_s",
    "sample/staleness_mean": "staleness",
}


class ProgressCallback(TrainerCallback):
    """Writes progress.json at every log (rank 0)."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._max_steps: int | None = None
        self._known: dict[str, float] = {}

    def on_train_begin(self, args, state, control, **kwargs):
        # Without max_steps the loop's own limit is only a ceiling, not where training ends.
        self._max_steps = args.max_steps if args.max_steps > 0 else None

    def on_log(self, args, state, control, logs: dict[str, Any] | None = None, **kwargs):
        if not state.is_world_process_zero or not logs or "loss" not in logs:
            return
        # A window without a finished group has no reward: the last known one stays on the line.
        self._known |= {name: logs[name] for name in _SHOWN if name in logs}
        values = {field: self._known.get(name) for name, field in _SHOWN.items()}
        write_progress(self._run_dir, Progress("training", state.global_step, self._max_steps, **values))

    def on_save(self, args, state, control, **kwargs):
        if control.should_training_stop:
            write_progress(self._run_dir, Progress("saving the last checkpoint", state.global_step))


class SummarySource:
    """The trainer's part of run_summary.json, asked every 2 s from another thread."""

    def __init__(self) -> None:
        self._trainer: AsyncGRPOTrainer | None = None
        self._heldout: dict[str, Any] = {}
        self._lock = threading.Lock()

    def attach(self, trainer: AsyncGRPOTrainer) -> None:
        self._trainer = trainer

    def heldout(self, result: dict[str, Any]) -> None:
        with self._lock:
            self._heldout |= result

    def __call__(self) -> dict[str, Any]:
        if self._trainer is None:
            return {}
        changes = {key: value for key, value in self._trainer.summary().items() if value is not None}
        with self._lock:
            if self._heldout:
                changes["heldout"] = dict(self._heldout)
        return changes
