"""The only module that imports mlflow, and only when it is used (the import takes two seconds).

Everything goes through `MlflowClient` with an explicit tracking URI and run id. The fluent API is not used: in another
thread or process it silently starts a new run, and whoever exits first marks the run FINISHED.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncgrpo_core.errors import TrackerError
from asyncgrpo_core.tracking.run_record import (
    TrackedRun,
    artifact_location,
    artifact_path,
    checkpoint_tag,
    complete_checkpoints,
    flatten,
    param_text,
    tag_text,
    write_run_file,
)
from asyncgrpo_core.tracking.settings import TrackingConfig
from asyncgrpo_core.tracking.sink import BufferedSink, MetricPoint, PointsRefused, metric_name

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

STATUSES = ("FINISHED", "FAILED", "KILLED")
_PARAMS_PER_CALL = 100
# Refusals that stay refusals, however often the same call is made.
_PERMANENT = {"INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS", "BAD_REQUEST"}

logger = logging.getLogger(__name__)


def open_run(
    config: TrackingConfig,
    *,
    run_dir: Path,
    params: Mapping[str, Any] | None = None,
    tags: Mapping[str, str] | None = None,
    run_id: str | None = None,
    working_dir: Path | None = None,
) -> TrackedRun:
    """Create the MLflow run, or open it again on a resume, and log parameters and the resolved config.

    Args:
        config: the `tracking` section.
        run_dir: the run folder; gets mlflow.json.
        params: the resolved config, nested; logged as parameters `a.b.c` and whole as an artifact.
        tags: further tags beside those of the config.
        run_id: the run to continue. Its parameters stay as they are (MLflow's are immutable); what changed is named
            in the tag `asyncgrpo.changed_params`, and the new config lies beside the old one.
        working_dir: holds the default store.

    Raises:
        TrackerError: the store refuses, or there is no run `run_id` in it.
    """
    uri = config.resolved_uri(working_dir)
    with _named(uri):
        client = connect(uri)
        if run_id is None:
            experiment_id = _experiment(client, config.experiment, uri)
            run = client.create_run(experiment_id, run_name=config.run_name or Path(run_dir).name)
        else:
            run = _reopen(client, run_id, uri)
        opened = TrackedRun(uri, run.info.run_id, run.info.experiment_id, run.info.artifact_uri)
        all_tags = {**config.tags, **(tags or {}), "asyncgrpo.run_dir": str(Path(run_dir).absolute())}
        if params is not None:
            all_tags.update(_log_config(client, run, params))
        _log_tags(client, opened.run_id, all_tags)
    write_run_file(run_dir, opened)
    return opened


def finish_run(run_id: str, status: str, *, uri: str) -> None:
    """Set the run's final status: FINISHED, FAILED or KILLED. Nobody else does (MLflow sets none after a kill)."""
    if status not in STATUSES:
        raise ValueError(f"status must be one of {', '.join(STATUSES)}, got {status!r}")
    with _named(uri):
        connect(uri).set_terminated(run_id, status)


def run_status(run_id: str, *, uri: str) -> str:
    """RUNNING, FINISHED, FAILED or KILLED."""
    with _named(uri):
        return connect(uri).get_run(run_id).info.status


def log_files(run_id: str, path: Path, artifact_path: str | None = None, *, uri: str) -> None:
    """Log a file, or everything below a folder, as artifacts."""
    with _named(uri):
        if Path(path).is_dir():
            connect(uri).log_artifacts(run_id, str(path), artifact_path)
        else:
            connect(uri).log_artifact(run_id, str(path), artifact_path)


def last_logged_steps(run_id: str, *, uri: str) -> dict[str, int]:
    """Metric name -> the highest step stored for it (system metrics left out: they count their own steps)."""
    with _named(uri):
        run = connect(uri).get_run(run_id)
    # run.data.metrics has the values alone; MLflow's own system monitor reads the steps from here too.
    return {m.key: m.step for m in run.data._metric_objs if not m.key.startswith("system/")}


def last_logged_step(run_id: str, *, uri: str) -> int | None:
    """The highest step stored in the run; None before the first."""
    return max(last_logged_steps(run_id, uri=uri).values(), default=None)


class MlflowSink(BufferedSink):
    """The buffered sink whose points go to one MLflow run, `log_batch` at a time.

    Args:
        resume: skip what the run has stored already: steps trained again after a resume are not stored twice.
        kwargs: those of BufferedSink.
    """

    def __init__(self, uri: str, run_id: str, *, resume: bool = False, **kwargs: Any) -> None:
        self.uri, self.run_id = uri, run_id
        self._client: MlflowClient | None = None
        super().__init__(self._store, stored=last_logged_steps(run_id, uri=uri) if resume else None, **kwargs)

    def _store(self, points: Sequence[MetricPoint]) -> None:
        from mlflow.entities import Metric
        from mlflow.exceptions import MlflowException

        self._client = self._client or connect(self.uri)
        metrics = [Metric(p.name, p.value, p.time_ms, p.step) for p in points]
        try:
            self._client.log_batch(self.run_id, metrics=metrics, synchronous=True)
        except MlflowException as error:
            if error.error_code in _PERMANENT:
                raise PointsRefused(str(error)) from error
            raise


class SystemMetrics:
    """CPU, memory, disk, network and GPU use of this machine, logged by MLflow's own monitor every 10 s."""

    def __init__(self, uri: str, run_id: str, *, resume: bool = False) -> None:
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        _quiet()
        self._monitor = SystemMetricsMonitor(run_id, resume_logging=resume, tracking_uri=uri)

    def start(self) -> None:
        self._monitor.start()

    def stop(self, timeout_s: float = 15.0) -> None:
        """Stop the monitor. It may hang in a call to a tracker that is away: then it is left to end by itself."""
        thread = threading.Thread(target=self._monitor.finish, name="stop-system-metrics", daemon=True)
        thread.start()
        thread.join(timeout_s)
        if thread.is_alive():
            logger.warning("The system metrics monitor did not stop in %.0f s; the tracker does not answer.", timeout_s)


def register_final(name: str, run_id: str, step: int, *, uri: str, alias: str = "final") -> str:
    """Register the logged checkpoint of `step` as a new version of the model `name`, and point `alias` at it.

    By `create_model_version`: `register_model("runs:/...")` fails in MLflow 3 for plain artifacts.

    Returns:
        The version number.

    Raises:
        TrackerError: that checkpoint is not in the store, or the registry refuses.
    """
    from mlflow.exceptions import MlflowException

    artifacts = CheckpointArtifacts(uri, run_id)
    if step not in artifacts.complete():
        raise TrackerError(
            f"Run {run_id} at {uri} has no complete checkpoint of step {step} to register.",
            "Set tracking.checkpoints.log to all, last or best.",
        )
    with _named(uri):
        client = connect(uri)
        try:
            client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        source = f"{client.get_run(run_id).info.artifact_uri}/{artifact_path(step)}"
        version = client.create_model_version(name, source, run_id=run_id).version
        client.set_registered_model_alias(name, alias, version)
    return str(version)


class CheckpointArtifacts:
    """The checkpoints of one run in its artifact store. A tag, set after the upload, says which are complete."""

    def __init__(self, uri: str, run_id: str) -> None:
        self.uri, self.run_id = uri, run_id

    def put(self, folder: Path, step: int) -> None:
        """Upload a folder; not complete before `mark`. What an earlier upload of this step left is replaced."""
        if any(f.path == artifact_path(step) for f in self._client().list_artifacts(self.run_id, "checkpoints")):
            self.remove(step)
        self._client().log_artifacts(self.run_id, str(folder), artifact_path(step))

    def mark(self, step: int, note: Mapping[str, Any]) -> None:
        """Declare the checkpoint of `step` complete; `note` is kept in the tag."""
        self._client().set_tag(self.run_id, checkpoint_tag(step), json.dumps({"state": "complete", **note}))

    def mark_path(self, step: int, path: Path) -> None:
        """Note where a checkpoint lies on disk, without uploading it."""
        self._client().set_tag(self.run_id, checkpoint_tag(step), json.dumps({"state": "path", "path": str(path)}))

    def complete(self) -> dict[int, dict[str, Any]]:
        """Step -> note of every complete checkpoint, oldest first."""
        with _named(self.uri):
            return complete_checkpoints(self._client().get_run(self.run_id).data.tags)

    def remove(self, step: int) -> None:
        """Take the mark away, then the files (in this order: a kill between leaves garbage, not a torn checkpoint)."""
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        client = self._client()
        run = client.get_run(self.run_id)
        if checkpoint_tag(step) in run.data.tags:
            client.delete_tag(self.run_id, checkpoint_tag(step))
        repository = get_artifact_repository(run.info.artifact_uri, tracking_uri=self.uri)
        repository.delete_artifacts(artifact_path(step))

    def download(self, step: int, folder: Path) -> Path:
        """Fetch a checkpoint; returns the folder with its files."""
        with _named(self.uri):
            return Path(self._client().download_artifacts(self.run_id, artifact_path(step), str(folder)))

    def _client(self) -> MlflowClient:
        return connect(self.uri)


# -- inside -----------------------------------------------------------------------------------------------------------


def _quiet() -> None:
    """Bounds and manners for mlflow's client, unless the user set them: its defaults retry for four minutes."""
    for name, value in (
        ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3"),
        ("MLFLOW_HTTP_REQUEST_TIMEOUT", "30"),
        ("MLFLOW_DISABLE_TELEMETRY", "true"),
        ("DO_NOT_TRACK", "true"),
        ("MLFLOW_LOGGING_LEVEL", "WARNING"),  # or the first start lists fifty migrations of an empty database
    ):
        os.environ.setdefault(name, value)
    logging.getLogger("alembic").setLevel(logging.WARNING)


def connect(uri: str) -> MlflowClient:
    """A client for one tracking URI; never the process-wide one."""
    _quiet()
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=uri, registry_uri=uri)


@contextmanager
def _named(uri: str) -> Iterator[None]:
    """Turn what mlflow raises into a TrackerError that names the store."""
    try:
        yield
    except TrackerError:
        raise
    except Exception as error:  # mlflow raises its own type, requests' and SQLAlchemy's
        raise TrackerError(
            f"MLflow at {uri} refused a call: {type(error).__name__}: {error}.",
            "Check tracking.uri and the server's log; tracking.enabled=false trains without it.",
        ) from error


def _experiment(client: MlflowClient, name: str, uri: str) -> str:
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return client.create_experiment(name, artifact_location=artifact_location(uri, name))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":  # another run was faster
                raise
        found = client.get_experiment_by_name(name)
    if found is None:
        raise TrackerError(f"The experiment {name!r} at {uri} was deleted while it was opened.", "Start again.")
    if found.lifecycle_stage != "active":
        raise TrackerError(
            f"The experiment {name!r} at {uri} was deleted.", "Restore it in MLflow, or set tracking.experiment."
        )
    return found.experiment_id


def _reopen(client: MlflowClient, run_id: str, uri: str) -> Run:
    from mlflow.exceptions import MlflowException

    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        raise TrackerError(
            f"There is no MLflow run {run_id} at {uri}: {error}.",
            "Resume with the tracking.uri of the run, or start a new run.",
        ) from error
    if run.info.lifecycle_stage != "active":
        raise TrackerError(f"The MLflow run {run_id} at {uri} was deleted.", "Restore it, or start a new run.")
    client.update_run(run_id, status="RUNNING")
    resumes = int(run.data.tags.get("asyncgrpo.resumes", 0)) + 1
    client.set_tag(run_id, "asyncgrpo.resumes", str(resumes))
    return client.get_run(run_id)


def _log_config(client: MlflowClient, run: Run, config: Mapping[str, Any]) -> dict[str, str]:
    """Log the config as parameters and artifact; returns the tags that tell what had to be left out."""
    from mlflow.entities import Param

    run_id, known = run.info.run_id, run.data.params
    values = {metric_name(key): param_text(value) for key, value in flatten(config)}
    new = [Param(key, value) for key, value in values.items() if key not in known]
    for start in range(0, len(new), _PARAMS_PER_CALL):
        client.log_batch(run_id, params=new[start : start + _PARAMS_PER_CALL], synchronous=True)
    resumes = run.data.tags.get("asyncgrpo.resumes")
    name = "resolved.json" if resumes is None else f"resolved-resume-{resumes}.json"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_text(json.dumps(config, indent=2, default=str))
        client.log_artifact(run_id, str(path), "config")
    changed = sorted(key for key, value in values.items() if known.get(key, value) != value)
    return {"asyncgrpo.changed_params": ", ".join(changed)} if changed else {}


def _log_tags(client: MlflowClient, run_id: str, tags: Mapping[str, str]) -> None:
    from mlflow.entities import RunTag

    if tags:
        client.log_batch(run_id, tags=[RunTag(key, tag_text(value)) for key, value in tags.items()], synchronous=True)
