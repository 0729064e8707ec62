"""Everything before the processes start: the run folder, what a resume continues from, the tracker's run, the plan."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from asyncgrpo_core.errors import ConfigError, TrackerError
from asyncgrpo_core.guard import sweep_stale
from asyncgrpo_core.launch.config import RunConfig
from asyncgrpo_core.launch.loading import read_resolved
from asyncgrpo_core.launch.placement import Placement, place
from asyncgrpo_core.launch.run_folder import (
    CONFIG_FILE,
    Attempt,
    check_same_run,
    choose_run_dir,
    make_run_dir,
    read_attempt,
    resolve,
    take_ownership,
    write_attempt,
    write_json,
)
from asyncgrpo_core.launch.vllm_server import plan_server, served_model_name
from asyncgrpo_core.manifest import newest_checkpoint
from asyncgrpo_core.server.command import ServerCommand
from asyncgrpo_core.tracking.reach import check_reachable
from asyncgrpo_core.tracking.settings import TrackingConfig
from asyncgrpo_core.tracking.summary import read_summary, update_summary

if TYPE_CHECKING:
    from asyncgrpo_core.tracking.lookup import FoundRun

logger = logging.getLogger("asyncgrpo_core.flow")


@dataclass
class PreparedRun:
    """What the tasks need to know about one attempt of a run.

    Attributes:
        cfg: resolved, every path absolute.
        command: of the vLLM server to start; None when one runs already.
        earlier_s: wall time of the earlier attempts, seconds.
        started: when this attempt began, `time.monotonic()`.
    """

    cfg: RunConfig
    run_dir: Path
    attempt: Attempt
    placement: Placement
    command: ServerCommand | None
    tracking_uri: str | None
    earlier_s: float = 0.0
    started: float = field(default_factory=time.monotonic)


def previous_attempt(cfg: RunConfig) -> Attempt | None:
    """The attempt that a resume continues; None for a new run, or when nothing of it is left on this disk."""
    if not cfg.resume:
        return None
    return read_attempt(choose_run_dir(cfg))


def prepare_run(cfg: RunConfig, flow_run_id: str | None) -> PreparedRun:
    """Make or find the run folder, open or continue the tracker's run, write what the children read.

    Raises:
        ConfigError: nothing to resume, a folder in use or not writable, a setting that contradicts the run.
        TrackerError: the tracker cannot be reached, or does not have the run that is resumed.
        CheckpointError: the tracker's checkpoint cannot be fetched.
    """
    started = time.monotonic()
    run_dir = choose_run_dir(cfg)
    resolved = resolve(cfg, run_dir)
    placement = place(resolved)
    command = plan_server(resolved, placement)
    uri = reachable_uri(resolved.tracking)
    make_run_dir(run_dir)
    take_ownership(run_dir)
    previous = read_attempt(run_dir) if cfg.resume else None
    if previous is not None:
        check_same_run(read_resolved(run_dir / CONFIG_FILE), resolved)
        left = sweep_stale(run_dir)
        if left:
            logger.warning("Ended %d processes that the previous attempt had left behind: %s.", len(left), left)
    write_json(run_dir / CONFIG_FILE, resolved.model_dump(mode="json"))
    attempt = Attempt(
        attempt=1 if previous is None else previous.attempt + 1,
        mlflow_run_id=previous.mlflow_run_id if previous is not None else None,
        flow_run_id=flow_run_id,
        server_url=command.base_url if command is not None else resolved.server.url or [],
        served_model_name=served_model_name(resolved),
    )
    run = PreparedRun(resolved, run_dir, attempt, placement, command, uri, started=started)
    _open_tracking(run)
    if cfg.resume:
        attempt.resume_from = _find_checkpoint(run)
    write_attempt(run_dir, attempt)
    _start_summary(run)
    return run


def reachable_uri(tracking: TrackingConfig) -> str | None:
    """The tracking URI when there is tracking; None when it is off, or away and not required.

    Raises:
        TrackerError: it is required and cannot be reached.
    """
    if not tracking.enabled:
        return None
    uri = tracking.resolved_uri()
    try:
        check_reachable(uri, tracking.reach_timeout_s)
    except TrackerError as error:
        if tracking.required:
            raise
        logger.warning("Training without a tracker: %s", error)
        return None
    return uri


def _open_tracking(run: PreparedRun) -> None:
    """Create the MLflow run, or open the one that is resumed; sets `attempt.mlflow_run_id`."""
    if run.tracking_uri is None:
        run.attempt.mlflow_run_id = None
        return
    from asyncgrpo_core.tracking.lookup import find_run
    from asyncgrpo_core.tracking.mlflow_store import open_run

    tracking = run.cfg.tracking.model_copy(update={"uri": run.tracking_uri})
    run_id = run.attempt.mlflow_run_id
    if run_id is None and run.cfg.resume:
        found = find_run(tracking, {"asyncgrpo.name": run.cfg.name})
        if found is None:
            raise ConfigError(
                f"There is nothing to resume: neither {run.run_dir} nor the experiment {tracking.experiment!r} at "
                f"{run.tracking_uri} has a run named {run.cfg.name!r}.",
                "Start it without --resume.",
            )
        _take_over(run, found)
        run_id = found.run_id
    opened = open_run(
        tracking,
        run_dir=run.run_dir,
        params=run.cfg.model_dump(mode="json") | {"training": run.cfg.training.with_defaults()},
        tags={"asyncgrpo.name": run.cfg.name, "asyncgrpo.attempt": str(run.attempt.attempt)},
        run_id=run_id,
    )
    run.attempt.mlflow_run_id = opened.run_id


def _take_over(run: PreparedRun, found: FoundRun) -> None:
    """Go on with the numbers of a run of which nothing is left on this disk."""
    run.attempt.attempt = int(found.tags.get("asyncgrpo.attempt", "0")) + 1
    before = found.metrics.get("heldout/before")
    if before is not None:
        update_summary(run.run_dir, heldout={"n": run.cfg.evaluation.n, "before": before})


def _find_checkpoint(run: PreparedRun) -> str | None:
    """The newest whole checkpoint: on this disk, else in the tracker's run; None restarts from the beginning."""
    folder = run.run_dir / "checkpoints"
    local = newest_checkpoint(folder)
    if local is not None:
        return str(local)
    if run.tracking_uri is None or run.attempt.mlflow_run_id is None:
        return None
    from asyncgrpo_core.tracking.checkpoints import fetch_newest_checkpoint

    fetched = fetch_newest_checkpoint(run.tracking_uri, run.attempt.mlflow_run_id, folder)
    if fetched is None:
        logger.warning("No checkpoint of the run is left; training starts from the beginning.")
        return None
    logger.info("Fetched %s from the MLflow run %s.", fetched.name, run.attempt.mlflow_run_id)
    return str(fetched)


def _start_summary(run: PreparedRun) -> None:
    summary = read_summary(run.run_dir)
    run.earlier_s = float(summary["wall_s"]) if summary is not None else 0.0
    update_summary(
        run.run_dir,
        status="running",
        mlflow_run_id=run.attempt.mlflow_run_id,
        flow_run_id=run.attempt.flow_run_id,
        attempt=run.attempt.attempt,
        resumed_from=run.attempt.resume_from,
    )
