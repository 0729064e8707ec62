"""Callbacks that tie the transformers loop to the pipeline."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Protocol

from transformers import TrainerCallback

if TYPE_CHECKING:
    from asyncgrpo_core.training.trainer import AsyncGRPOTrainer

logger = logging.getLogger(__name__)


class PipelineCallback(TrainerCallback):
    """Starts the pipeline, ends steps, and turns stop conditions into the loop's own flags.

    It is added before the user's callbacks, so at their `on_train_begin` the first sync is proved and generation
    has begun, and at their `on_train_end` generation has ended and the server holds the final weights.
    """

    def __init__(self, trainer: AsyncGRPOTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        state.compute_steps(args, state.max_steps)  # a resumed state brings the intervals of the run before
        self._trainer.start_pipeline()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self._trainer.guard.keep_out(self._trainer.optimizer, self._trainer.accelerator.scaler)

    def on_step_end(self, args, state, control, **kwargs):
        self._trainer.end_step()
        if self._trainer.stop_reason is not None or self._trainer.epochs_are_done():
            control.should_training_stop = True
            control.should_save = True

    def on_train_end(self, args, state, control, **kwargs):
        self._trainer.finish_pipeline()


class MetricSink(Protocol):
    """Where logged metrics go (see tracking/sink.py)."""

    def log(self, metrics: dict[str, float], step: int) -> None: ...


class SinkCallback(TrainerCallback):
    """Hands every log of rank 0 to a metric sink; the sink never blocks."""

    def __init__(self, sink: MetricSink) -> None:
        self._sink = sink

    def on_log(self, args, state, control, logs: dict[str, Any] | None = None, **kwargs):
        if not state.is_world_process_zero or not logs:
            return
        numbers = {name: float(value) for name, value in logs.items() if isinstance(value, int | float)}
        self._sink.log(numbers, state.global_step)
