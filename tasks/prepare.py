"""Task: the run folder, the tracker's run and the plan of the processes, before anything heavy starts."""

from __future__ import annotations

import logging

from prefect import task

from asyncgrpo_core.launch.config import RunConfig
from asyncgrpo_core.launch.preparation import PreparedRun, prepare_run, previous_attempt
from tasks.flow_state import close_previous, current_flow_run_id
from tasks.options import SIDE_EFFECT

logger = logging.getLogger("asyncgrpo_core.flow")


@task(name="prepare", **SIDE_EFFECT)
def prepare(cfg: RunConfig) -> PreparedRun:
    """Make or find the run folder, open or continue the MLflow run, write what the children read.

    Raises:
        ConfigError: nothing to resume, a folder in use, a setting that contradicts the run.
        TrackerError: the tracker cannot be reached.
    """
    previous = previous_attempt(cfg)
    if previous is not None:
        closed = close_previous(previous.flow_run_id)
        if closed is not None:
            logger.info("The flow run of attempt %d was still open and is now %s.", previous.attempt, closed)
    return prepare_run(cfg, current_flow_run_id())
