"""Checkpoints on their way to the MLflow run and back.

    submit(folder) ─► hard links in RUN/uploads/ ─► thread: upload, then the mark that makes it complete
    fetch_newest_checkpoint: newest complete one whose files agree with its manifest, else the next older

The trainer goes on at once: rotation may delete the checkpoint folder while its hard links are still being uploaded.
"""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from asyncgrpo_core.errors import CheckpointError
from asyncgrpo_core.manifest import problem_with
from asyncgrpo_core.tracking.settings import CheckpointTracking

STAGING = "uploads"  # inside the run folder
_TRIES = 5
_RETRY_S = 2.0

logger = logging.getLogger(__name__)


class CheckpointStore(Protocol):
    """Where checkpoints are kept (mlflow_store.CheckpointArtifacts)."""

    def put(self, folder: Path, step: int) -> None: ...

    def mark(self, step: int, note: Mapping[str, Any]) -> None: ...

    def mark_path(self, step: int, path: Path) -> None: ...

    def complete(self) -> dict[int, dict[str, Any]]: ...

    def remove(self, step: int) -> None: ...

    def download(self, step: int, folder: Path) -> Path: ...


class _Job(NamedTuple):
    step: int
    folder: Path  # the staged hard links; with log=path the checkpoint itself
    score: float | None


class CheckpointUploader:
    """Logs checkpoints in the background, by the policy of `tracking.checkpoints`.

    Args:
        store: the run's artifacts.
        config: which ones to keep.
        run_dir: holds the hard links of checkpoints that wait (uploads/), on the same file system.

    Attributes:
        uploaded: steps whose checkpoint is complete in the store because of this object.
        failed: steps given up after five tries; they stay on disk.
    """

    def __init__(self, store: CheckpointStore, config: CheckpointTracking, run_dir: Path, *, retry_s: float = _RETRY_S):
        self._store, self._config, self._retry_s = store, config, retry_s
        self._staging = Path(run_dir) / STAGING
        shutil.rmtree(self._staging, ignore_errors=True)  # links that a killed attempt left
        self._numbers = itertools.count()  # the same step may be saved again while its first upload runs
        self._jobs: deque[_Job] = deque()
        self._busy = False
        self._closing = threading.Event()
        self._changed = threading.Condition()
        self.uploaded: list[int] = []
        self.failed: list[int] = []
        self._thread = threading.Thread(target=self._run, name="checkpoint-uploader", daemon=True)
        self._thread.start()

    def submit(self, folder: Path, step: int, metrics: Mapping[str, float] | None = None) -> bool:
        """Queue a finished checkpoint folder. Takes as long as hard-linking its files; never raises.

        Args:
            folder: checkpoint-N, complete.
            step: N.
            metrics: the newest logged metrics; log=best reads its metric from them.

        Returns:
            Whether it will be logged. What could not be queued is in `failed`, and the log says why.
        """
        if self._config.log == "none" or self._closing.is_set():
            return False
        score = (metrics or {}).get(self._config.metric)
        if self._config.log == "best" and score is None:
            logger.warning("Checkpoint %d is not logged: metric %r is not known.", step, self._config.metric)
            return False
        try:
            problem = problem_with(folder)
            if problem is not None:
                raise CheckpointError(f"it is not complete: {problem}")
            staged = folder if self._config.log == "path" else self._stage(folder, step)
        except (OSError, shutil.Error, CheckpointError) as error:  # a full disk may not end the training
            logger.error("Checkpoint %s is not logged to MLflow: %s", folder, error)
            self.failed.append(step)
            return False
        with self._changed:
            if self._config.log == "last":  # one that still waits is out of date now
                for job in self._jobs:
                    shutil.rmtree(job.folder, ignore_errors=True)
                self._jobs.clear()
            self._jobs.append(_Job(step, staged, score))
            self._changed.notify_all()
        return True

    def submit_missing(self, output_dir: Path, up_to_step: int) -> list[int]:
        """After a resume: queue whole checkpoints on disk, up to the resumed step, that never became complete."""
        if self._config.log not in ("all", "last"):
            return []
        stored = self._store.complete()
        folders = {int(path.name.rpartition("-")[2]): path for path in output_dir.glob("checkpoint-[0-9]*")}
        steps = [s for s in sorted(folders) if s <= up_to_step and s not in stored and problem_with(folders[s]) is None]
        if self._config.log == "last":
            steps = [step for step in steps[-1:] if step > max(stored, default=-1)]
        for step in steps:
            self.submit(folders[step], step)
        return steps

    def flush(self, timeout_s: float) -> bool:
        """Wait for everything submitted. False when something is left after `timeout_s` or was given up."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while (self._jobs or self._busy) and time.monotonic() < deadline:
                self._changed.wait(min(0.5, max(deadline - time.monotonic(), 0.01)))
            return not self._jobs and not self._busy and not self.failed

    def close(self, timeout_s: float | None = None) -> bool:
        """Flush (default: tracking.checkpoints.flush_timeout_s), then end the thread."""
        done = self.flush(self._config.flush_timeout_s if timeout_s is None else timeout_s)
        self._closing.set()
        with self._changed:
            left = [job.step for job in self._jobs]
            self._changed.notify_all()
        if not done:
            logger.warning("Checkpoints not logged to MLflow: %s; they are on disk.", sorted({*left, *self.failed}))
        self._thread.join(2.0)
        return done

    # -- thread -------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closing.is_set())
                if self._closing.is_set():
                    return
                job = self._jobs.popleft()
                self._busy = True
            try:
                self._log_with_retries(job)
            finally:
                if self._config.log != "path":
                    shutil.rmtree(job.folder, ignore_errors=True)
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()

    def _log_with_retries(self, job: _Job) -> None:
        for attempt in range(1, _TRIES + 1):
            try:
                if self._log(job):
                    self.uploaded.append(job.step)
                return
            except Exception as error:  # a store may raise anything; training does not depend on it
                logger.warning("Logging checkpoint %d failed (try %d of %d): %s", job.step, attempt, _TRIES, error)
                if attempt < _TRIES and self._closing.wait(self._retry_s * 2 ** (attempt - 1)):
                    break
        self.failed.append(job.step)

    def _log(self, job: _Job) -> bool:
        if self._config.log == "path":
            self._store.mark_path(job.step, job.folder)
            return True
        before = self._store.complete()
        if self._config.log == "best" and not self._is_best(job.score, before):
            return False
        self._store.put(job.folder, job.step)
        note: dict[str, Any] = {"at": time.time(), "bytes": _size(job.folder)}
        if job.score is not None:
            note["score"] = job.score
        self._store.mark(job.step, note)
        for step in self._outdated([*(s for s in before if s != job.step), job.step]):
            self._store.remove(step)
        return True

    def _is_best(self, score: float | None, before: dict[int, dict[str, Any]]) -> bool:
        known = [note["score"] for note in before.values() if "score" in note]
        if score is None or not known:
            return score is not None
        return score > max(known) if self._config.higher_is_better else score < min(known)

    def _outdated(self, steps: list[int]) -> list[int]:
        """What the policy removes, once the last of `steps` (in order of logging) is complete."""
        if self._config.log in ("last", "best"):
            return steps[:-1]
        return steps[: -self._config.keep_last] if self._config.keep_last else []

    def _stage(self, folder: Path, step: int) -> Path:
        self._staging.mkdir(parents=True, exist_ok=True)
        target = self._staging / f"checkpoint-{step}-{next(self._numbers)}"
        shutil.copytree(folder, target, copy_function=_link)
        return target


def fetch_newest_checkpoint(uri: str, run_id: str, output_dir: Path) -> Path | None:
    """Download the newest checkpoint of an MLflow run that is complete there and whole on arrival.

    Args:
        uri: the tracking URI.
        output_dir: gets checkpoint-N.

    Returns:
        The folder; None when the run has no complete checkpoint.

    Raises:
        CheckpointError: there are complete checkpoints, and none of them arrived whole; says why for each.
        TrackerError: the tracker does not answer.
    """
    from asyncgrpo_core.tracking.mlflow_store import CheckpointArtifacts

    return fetch_newest(CheckpointArtifacts(uri, run_id), output_dir)


def fetch_newest(store: CheckpointStore, output_dir: Path) -> Path | None:
    """`fetch_newest_checkpoint` from any store."""
    problems = []
    output_dir.mkdir(parents=True, exist_ok=True)
    for step in sorted(store.complete(), reverse=True):
        target = output_dir / f"checkpoint-{step}"
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=output_dir) as temporary:
            try:
                folder = store.download(step, Path(temporary))
            except Exception as error:  # one that cannot be fetched is as good as torn: the next older may be there
                problems.append(f"checkpoint-{step}: {error}")
                continue
            problem = problem_with(folder)
            if problem is not None:
                problems.append(f"checkpoint-{step}: {problem}")
                logger.warning("The logged checkpoint %d is not whole: %s; trying an older one.", step, problem)
                continue
            shutil.rmtree(target, ignore_errors=True)
            os.replace(folder, target)
        return target
    if problems:
        raise CheckpointError(
            "No logged checkpoint could be fetched whole: " + "; ".join(problems) + ".",
            "Give the path of a checkpoint, or start a new run.",
        )
    return None


def _link(source: str, target: str) -> None:
    """Hard link; a copy where the file system has none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
