"""This flow run as Prefect's API sees it: was it cancelled, and what an earlier attempt left behind."""

from __future__ import annotations

import logging
from typing import Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import StateType
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run
from prefect.states import Cancelled, Crashed, State

from asyncgrpo_core.errors import RunInterrupted

logger = logging.getLogger("asyncgrpo_core.flow")

_OPEN = {StateType.RUNNING, StateType.CANCELLING, StateType.PENDING}


class CancelRequested(RunInterrupted):
    """The flow run was cancelled in Prefect; seen by asking for its state."""


def current_flow_run_id() -> str | None:
    """Id of the flow run this code is in, None outside one."""
    return flow_run.id or None


def is_cancelled(flow_run_id: str | None) -> bool:
    """Whether Prefect says that this flow run is being cancelled.

    The second way to notice a cancel: Prefect's own stops working after its server was away for a while. A server
    that is away now says nothing: training goes on.
    """
    if flow_run_id is None:
        return False
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(UUID(flow_run_id)).state
    except Exception as error:  # any kind of outage; looked at again 10 s later
        logger.warning("The Prefect API does not answer (%s); training goes on.", error)
        return False
    return state is not None and state.type in (StateType.CANCELLING, StateType.CANCELLED)


def close_previous(flow_run_id: str | None) -> str | None:
    """Give the flow run of an attempt that no process works on any more its final state.

    A run that was killed stays Running for ever, one that was killed while it was being cancelled stays Cancelling
    and keeps its deployment's concurrency slot.

    Returns:
        The new state's name; None when there was nothing to do (also: another Prefect server keeps that run).
    """
    if flow_run_id is None or flow_run_id == current_flow_run_id():
        return None
    with get_client(sync_client=True) as client:
        try:
            run = client.read_flow_run(UUID(flow_run_id))
        except ObjectNotFound:
            return None
        if run.state is None or run.state.type not in _OPEN:
            return None
        text = "Its processes ended without a word; the run was resumed."
        cancelled = run.state.type == StateType.CANCELLING
        state: State[Any] = Cancelled(message=text) if cancelled else Crashed(message=text)
        client.set_flow_run_state(run.id, state, force=True)
        for task in client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run.id]))):
            if task.state is not None and task.state.type in _OPEN:
                client.set_task_run_state(task.id, Crashed(message=text), force=True)
        return state.name
