"""What is said about a run, without mlflow: RUN/mlflow.json, and values in the lengths that MLflow keeps whole."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from asyncgrpo_core.errors import TrackerError
from asyncgrpo_core.tracking.reach import sqlite_path
from asyncgrpo_core.tracking.sink import metric_name

RUN_FILE = "mlflow.json"
# Longer values are cut by MLflow without a word: cut them here, and say so.
MAX_PARAM = 6000
MAX_TAG = 8000
_PARAM_CUT = " ... (cut; whole in config/resolved.json)"
_CHECKPOINT_TAG = "asyncgrpo.checkpoint."
_TAG_CUT = " ... (cut)"


class TrackedRun(NamedTuple):
    """Where a run is tracked. RUN/mlflow.json tells it to processes that come later (a resume, the guard)."""

    uri: str
    run_id: str
    experiment_id: str
    artifact_uri: str


def write_run_file(run_dir: Path, run: TrackedRun) -> None:
    """Leave RUN/mlflow.json, atomically."""
    path = Path(run_dir) / RUN_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(run._asdict(), indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def read_run_file(run_dir: Path) -> TrackedRun | None:
    """What `open_run` left in the run folder; None when the run is not tracked.

    Raises:
        TrackerError: the file is damaged.
    """
    path = Path(run_dir) / RUN_FILE
    try:
        return TrackedRun(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise TrackerError(f"{path} is damaged: {error}.", "Delete it; the next start writes it anew.") from error


def artifact_location(uri: str, experiment: str) -> str | None:
    """Where a new experiment keeps its artifacts: beside a sqlite store, in mlruns/; None where a server decides."""
    if not uri.startswith("sqlite"):
        return None
    return (sqlite_path(uri).parent / "mlruns" / metric_name(experiment).replace("/", "_")).as_uri()


def artifact_path(step: int) -> str:
    """Where the checkpoint of a step lies among the run's artifacts."""
    return f"checkpoints/checkpoint-{step}"


def checkpoint_tag(step: int) -> str:
    """The tag that says whether the logged checkpoint of a step is complete."""
    return f"{_CHECKPOINT_TAG}{step}"


def complete_checkpoints(tags: Mapping[str, str]) -> dict[int, dict[str, Any]]:
    """Step -> note of every checkpoint that a run's tags call complete, oldest first."""
    found = {
        int(name.removeprefix(_CHECKPOINT_TAG)): json.loads(value)
        for name, value in tags.items()
        if name.startswith(_CHECKPOINT_TAG) and name.removeprefix(_CHECKPOINT_TAG).isdigit()
    }
    return {step: found[step] for step in sorted(found) if found[step].get("state") == "complete"}


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested mappings as (dotted key, value) pairs. Example: {"a": {"b": 1}} -> ("a.b", 1)."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def param_text(value: Any) -> str:
    """A config value as MLflow parameter: text as it is, anything else as JSON, at most 6000 characters."""
    return _cut(value if isinstance(value, str) else json.dumps(value, default=str), MAX_PARAM, _PARAM_CUT)


def tag_text(value: str) -> str:
    """A tag's value, at most 8000 characters."""
    return _cut(value, MAX_TAG, _TAG_CUT)


def _cut(text: str, limit: int, mark: str) -> str:
    return text if len(text) <= limit else text[: limit - len(mark)] + mark
