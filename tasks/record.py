"""The status of a run, in MLflow and in run_summary.json: owned by the flow, whatever happens."""

from __future__ import annotations

import asyncio
import logging
from types import TracebackType

from prefect.exceptions import TerminationSignal

from asyncgrpo_core.errors import RunInterrupted
from asyncgrpo_core.launch.finishing import close_attempt
from asyncgrpo_core.launch.preparation import PreparedRun
from tasks.flow_state import CancelRequested, is_cancelled

logger = logging.getLogger("asyncgrpo_core.flow")

# status in run_summary.json -> status of the MLflow run
MLFLOW_STATUS = {"completed": "FINISHED", "failed": "FAILED", "cancelled": "KILLED", "interrupted": "KILLED"}


def status_of(error: BaseException | None, flow_run_id: str | None) -> str:
    """The status a run ends with.

    Args:
        error: what ended the flow's block; None for a normal end.
        flow_run_id: asked whether a termination was a cancel in Prefect.
    """
    if error is None:
        return "completed"
    if isinstance(error, CancelRequested | asyncio.CancelledError):
        return "cancelled"
    if isinstance(error, TerminationSignal):  # Prefect's SIGTERM: a cancel, or the machine's
        return "cancelled" if is_cancelled(flow_run_id) else "interrupted"
    if isinstance(error, KeyboardInterrupt | RunInterrupted | SystemExit):
        return "interrupted"
    return "failed"


class RunRecord:
    """`with RunRecord(run):` closes the attempt with the right status. Exceptions go on."""

    def __init__(self, run: PreparedRun) -> None:
        self._run = run

    def __enter__(self) -> RunRecord:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        status = status_of(error, self._run.attempt.flow_run_id)
        try:
            close_attempt(self._run, status, MLFLOW_STATUS[status])
        except Exception:
            if error is None:
                raise
            # The run's own error matters more than the tracker's.
            logger.exception("The status %s could not be written", status)
