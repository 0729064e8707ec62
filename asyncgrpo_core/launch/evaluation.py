"""The held-out evaluation of a run: before training (after the first proved sync) and after the last sync."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from asyncgrpo_core.launch.config import EvaluationSection
from asyncgrpo_core.launch.evaluation_files import heldout_file, write_heldout
from asyncgrpo_core.launch.progress import Progress, write_progress
from asyncgrpo_core.rollout.heldout import evaluate_heldout

if TYPE_CHECKING:
    from asyncgrpo_core.training.trainer import AsyncGRPOTrainer

logger = logging.getLogger(__name__)


class HeldoutCallback(TrainerCallback):
    """Samples the held-out prompts from the server, at the training temperature, and scores them.

    The trainer's own callback runs first: at `on_train_begin` the first sync is proved, at `on_train_end`
    generation has ended and the server holds the final weights.
    """

    def __init__(
        self,
        run_dir: Path,
        settings: EvaluationSection,
        rows: list[dict[str, Any]],
        rewards: list[Callable[..., Any]],
        on_result: Callable[[dict[str, Any], int], None],
    ) -> None:
        self._run_dir = run_dir
        self._settings = settings
        self._rows = rows
        self._rewards = rewards
        self._on_result = on_result
        self.trainer: AsyncGRPOTrainer | None = None  # set when the trainer is built

    def on_train_begin(self, args, state, control, **kwargs):
        # A resumed policy is not the start policy any more: its first attempt has evaluated that.
        if state.global_step == 0 and not heldout_file(self._run_dir, "before").is_file():
            self._evaluate("before")

    def on_train_end(self, args, state, control, **kwargs):
        assert self.trainer is not None
        if self.trainer.stop_reason is None:  # a stopped run goes on later
            self._evaluate("after")

    def _evaluate(self, when: str) -> None:
        trainer = self.trainer
        assert trainer is not None
        if when not in self._settings.when or not self._rows:
            return
        step = trainer.state.global_step
        text = f"held-out evaluation {when} training ({len(self._rows)} prompts)"
        write_progress(self._run_dir, Progress(text, step))
        result = evaluate_heldout(
            config=trainer.args,
            model_name=trainer.pipeline.model_name,
            rows=self._rows,
            reward_funcs=self._rewards,
            seed=self._settings.seed,
            max_in_flight=self._settings.max_in_flight,
            **trainer.pipeline.rollout_setup(),
        )
        write_heldout(self._run_dir, when, result.records)
        logger.info("Held-out reward %s training: %s (n=%d)", when, result.mean_reward, result.n)
        self._on_result({"n": result.n, when: result.mean_reward}, step)
