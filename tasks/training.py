"""The long task: one trainer process, watched until it ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast
from uuid import UUID

from prefect import task
from prefect.artifacts import create_progress_artifact, update_progress_artifact

from asyncgrpo_core.launch.finishing import note_wall_time
from asyncgrpo_core.launch.preparation import PreparedRun
from asyncgrpo_core.launch.progress import Progress, console, read_progress
from asyncgrpo_core.launch.trainer_process import TrainerProcess, start_trainer
from asyncgrpo_core.launch.vllm_server import ServerSlot
from tasks.flow_state import CancelRequested, is_cancelled
from tasks.options import SIDE_EFFECT

POLL_S = 0.5
NOTE_EVERY_S = 2.0
CANCEL_POLL_S = 10.0
ARTIFACT_EVERY_S = 5.0
ARTIFACT_RETRY_S = 60.0

logger = logging.getLogger("asyncgrpo_core.flow")


@contextmanager
def trainer_process(run: PreparedRun) -> Iterator[TrainerProcess]:
    """The trainer, started at once and ended with the block: TERM lets it save a checkpoint first."""
    trainer = start_trainer(run.cfg, run.run_dir, run.placement)
    try:
        yield trainer
    except BaseException:
        if trainer.is_running():
            console().say("Stopping: the trainer finishes its step and saves a checkpoint.")
        raise
    finally:
        trainer.stop()


@task(name="train-policy", **SIDE_EFFECT)
def train_policy(run: PreparedRun, trainer: TrainerProcess, server: ServerSlot) -> None:
    """Watch the trainer until it ends; show its progress here and in Prefect.

    Called directly, never submitted: a cancel would not reach a task in another thread.

    Raises:
        AsyncGRPOError: the trainer's own error, or the server's when that died.
        CancelRequested: the flow run was cancelled.
    """
    bar = _ProgressBar()
    next_note = time.monotonic()
    next_cancel_poll = time.monotonic() + CANCEL_POLL_S
    while trainer.is_running():
        progress = read_progress(run.run_dir)
        if progress is not None:
            console().progress(progress)
            bar.show(progress)
        server.raise_if_dead()
        if time.monotonic() >= next_note:
            next_note = time.monotonic() + NOTE_EVERY_S
            note_wall_time(run)
        if time.monotonic() >= next_cancel_poll:
            next_cancel_poll = time.monotonic() + CANCEL_POLL_S
            if is_cancelled(run.attempt.flow_run_id):
                raise CancelRequested("The flow run was cancelled in Prefect.", "Continue the run with --resume.")
        time.sleep(POLL_S)
    server.raise_if_dead()  # the cause, where the trainer has only seen a lost connection
    trainer.raise_if_failed()
    progress = read_progress(run.run_dir)
    if progress is not None:
        console().progress(progress)
        bar.show(progress, at_once=True)


class _ProgressBar:
    """The run's progress on its Prefect page: one artifact, updated every few seconds."""

    def __init__(self) -> None:
        self._id: UUID | None = None
        self._next = 0.0

    def show(self, progress: Progress, at_once: bool = False) -> None:
        if not progress.max_steps or (time.monotonic() < self._next and not at_once):
            return
        self._next = time.monotonic() + ARTIFACT_EVERY_S
        try:
            self._update(100.0 * progress.step / progress.max_steps, progress.line())
        except Exception as error:  # any kind of outage: the page is a little late, training goes on
            logger.warning("Prefect did not take the progress (%s); tried again in %.0f s.", error, ARTIFACT_RETRY_S)
            self._next = time.monotonic() + ARTIFACT_RETRY_S

    def _update(self, percent: float, line: str) -> None:
        if self._id is None:
            made = create_progress_artifact(progress=percent, key="training", description="Optimizer steps")
            self._id = cast(UUID, made)  # a coroutine only inside an event loop
        else:
            update_progress_artifact(artifact_id=self._id, progress=percent, description=line)
