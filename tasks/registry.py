"""Task: the final checkpoint goes into the MLflow model registry."""

from __future__ import annotations

from prefect import task

from asyncgrpo_core.launch.finishing import register_final_checkpoint
from asyncgrpo_core.launch.preparation import PreparedRun
from tasks.options import SIDE_EFFECT


@task(name="register-checkpoint", **SIDE_EFFECT)
def register_checkpoint(run: PreparedRun) -> str | None:
    """Register the newest checkpoint as a version of the run's model; its name and version.

    Raises:
        CheckpointError: training ended and left no whole checkpoint.
    """
    return register_final_checkpoint(run)
