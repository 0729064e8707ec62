"""The run folder: where it is, who owns it, and what a resume finds in it.

RUN/config.resolved.json   what the children read           RUN/owner.json     the process that runs it now
RUN/attempt.json           what one attempt adds to it      RUN/error.json     what made the trainer end
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import psutil

from asyncgrpo_core.errors import ConfigError
from asyncgrpo_core.launch.config import RunConfig
from asyncgrpo_core.launch.imports import resolve_model_path

CONFIG_FILE = "config.resolved.json"
ATTEMPT_FILE = "attempt.json"
OWNER_FILE = "owner.json"
RUNS_FOLDER = "runs"


@dataclass
class Attempt:
    """What one start of a run adds to its config.

    Attributes:
        attempt: 1 for the first start, one more with each resume.
        mlflow_run_id: the MLflow run, the same for every attempt; None without a tracker.
        flow_run_id: the Prefect flow run of this attempt; None outside Prefect.
        server_url: base URL of the vLLM server; a list of those that run already.
        served_model_name: the policy's name at that server.
        resume_from: checkpoint folder to continue from; None starts anew.
    """

    attempt: int
    mlflow_run_id: str | None
    flow_run_id: str | None
    server_url: str | list[str]
    served_model_name: str
    resume_from: str | None = None


def write_json(path: Path, data: Any) -> None:
    """Write a JSON file so that a reader sees the old or the new content, never a part."""
    tmp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    tmp.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    tmp.replace(path)


def write_attempt(run_dir: Path, attempt: Attempt) -> None:
    write_json(run_dir / ATTEMPT_FILE, asdict(attempt))


def read_attempt(run_dir: Path) -> Attempt | None:
    """The newest attempt of a run; None when it never started.

    Raises:
        ConfigError: the file is damaged.
    """
    path = run_dir / ATTEMPT_FILE
    if not path.is_file():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return Attempt(**{f.name: data[f.name] for f in fields(Attempt)})
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise ConfigError(f"{path} is damaged: {exc!r}.", "Start a new run, in another run folder.") from exc


def choose_run_dir(cfg: RunConfig, now: float | None = None) -> Path:
    """The folder of a run: `run_dir`, else runs/<name>-<time>; with `resume`, the newest runs/<name>-*.

    Raises:
        ConfigError: the folder already holds a run and `resume` is not set, or there is nothing to resume.
    """
    if cfg.run_dir is not None:
        run_dir = Path(cfg.run_dir).expanduser().resolve()
        if not cfg.resume and (run_dir / CONFIG_FILE).exists():
            raise ConfigError(
                f"The run folder {run_dir} already holds a run.",
                "Continue it with --resume, or give another --run-dir.",
            )
        return run_dir
    if cfg.resume:
        return _newest_run(cfg.name)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    base = Path(RUNS_FOLDER).resolve() / f"{cfg.name}-{stamp}"
    run_dir, n = base, 2
    while run_dir.exists():  # two runs started in the same second
        run_dir, n = base.with_name(f"{base.name}-{n}"), n + 1
    return run_dir


def _newest_run(name: str) -> Path:
    folder = Path(RUNS_FOLDER).resolve()
    found = [p for p in folder.glob(f"{name}-*") if (p / CONFIG_FILE).is_file()]
    if not found:
        raise ConfigError(
            f"There is no run to resume: no {RUNS_FOLDER}/{name}-* in {Path.cwd()} holds a {CONFIG_FILE}.",
            "Give its folder with --run-dir, or start without --resume.",
        )
    return max(found, key=lambda p: (p / CONFIG_FILE).stat().st_mtime)


def make_run_dir(run_dir: Path, folders: Iterable[str] = ("logs", "checkpoints", "buffer", "heldout")) -> None:
    """Make the folder and the ones in it.

    Raises:
        ConfigError: it cannot be made or written.
    """
    try:
        for name in folders:
            (run_dir / name).mkdir(parents=True, exist_ok=True)
        probe = run_dir / f".probe-{os.getpid()}"
        probe.write_text("")
        probe.unlink()
    except OSError as exc:
        raise ConfigError(f"The run folder {run_dir} cannot be written: {exc}.", "Give another --run-dir.") from exc


def refuse_live_run(run_dir: Path) -> None:
    """Two processes may not run one folder.

    Raises:
        ConfigError: another live process runs it.
    """
    owner = live_owner(run_dir)
    if owner is not None and owner != os.getpid():
        raise ConfigError(
            f"The run in {run_dir} is still running (process {owner}).",
            f"Wait for it, or stop it first: kill -TERM {owner}.",
        )


def take_ownership(run_dir: Path) -> None:
    """Record that this process runs the folder.

    Raises:
        ConfigError: another live process does.
    """
    refuse_live_run(run_dir)
    write_json(run_dir / OWNER_FILE, {"pid": os.getpid(), "started": psutil.Process().create_time()})


def live_owner(run_dir: Path) -> int | None:
    """Process id of the live process that runs the folder, None when there is none."""
    try:
        data = json.loads((run_dir / OWNER_FILE).read_text(encoding="utf-8"))
        pid, started = int(data["pid"]), float(data["started"])
        # A pid is used again after a while: the start time tells the two apart.
        alive = abs(psutil.Process(pid).create_time() - started) < 1.0
    except (OSError, ValueError, KeyError, psutil.NoSuchProcess):
        return None
    return pid if alive and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE else None


def release_ownership(run_dir: Path) -> None:
    if live_owner(run_dir) == os.getpid():
        (run_dir / OWNER_FILE).unlink(missing_ok=True)


def resolve(cfg: RunConfig, run_dir: Path) -> RunConfig:
    """The config with every path absolute, as the children read it."""
    cfg = cfg.model_copy(deep=True)
    cfg.run_dir = str(run_dir)
    cfg.model.path = resolve_model_path(cfg.model.path)
    for key in ("train", "heldout"):
        source = getattr(cfg.data, key)
        if source is not None and Path(source).expanduser().is_file():
            setattr(cfg.data, key, str(Path(source).expanduser().resolve()))
    return cfg


# What may not change between the attempts of a run: the ledger's slots are rows in this order.
_FIXED = (
    "model.path",
    "data.train",
    "data.train_args",
    "data.train_split",
    "training.seed",
    "training.train_sampling_strategy",
    "training.num_generations",
)


def check_same_run(old: RunConfig, new: RunConfig) -> None:
    """A resume may change most settings, but not what the ledger counts.

    Raises:
        ConfigError: names the first setting that differs.
    """
    for key in _FIXED:
        section, name = key.split(".")
        before, after = getattr(getattr(old, section), name), getattr(getattr(new, section), name)
        if before != after:
            raise ConfigError(
                f"The run in {old.run_dir} was started with {key} = {before!r}; the config now says {after!r}.",
                f"Set {key} back to resume it, or start a new run.",
            )
