"""What is said about a run, without mlflow: RUN/mlflow.json, and values in the lengths that MLflow keeps whole."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from asyncgrpo_core.errors import TrackerError

RUN_FILE = "mlflow.json"
# Longer values are cut by MLflow without a word: cut them here, and say so.
MAX_PARAM = 6000
MAX_TAG = 8000
_PARAM_CUT = " ... (cut; whole in config/resolved.json)"
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
