"""Carry an error from a child process to the flow: RUN/error.json, raised there again with its type."""

from __future__ import annotations

import base64
import json
import os
import pickle
import traceback
from pathlib import Path

from asyncgrpo_core.errors import AsyncGRPOError, RankLostError

ERROR_FILE = "error.json"


class TrainerFailed(AsyncGRPOError):
    """The trainer process ended with an error that is none of this project's, or with none at all."""


def write_error(run_dir: Path, error: BaseException, rank: int = 0) -> None:
    """Write the error of this process for the flow, with its traceback; atomically.

    Ranks other than 0 write error-<rank>.json: their error may be why rank 0 has one too, or none.
    """
    record = {
        "type": type(error).__name__,
        "message": str(error),
        "rank": rank,
        "exit_code": getattr(error, "exit_code", 1),
        "traceback": "".join(traceback.format_exception(error)),
        "pickle": _pickled(error),
    }
    path = run_dir / (ERROR_FILE if rank == 0 else f"error-{rank}.json")
    tmp = path.with_suffix(f".{os.getpid()}.tmp")
    tmp.write_text(json.dumps(record, indent=1), encoding="utf-8")
    tmp.replace(path)


def clear_error(run_dir: Path) -> None:
    for path in _error_files(run_dir):
        path.unlink(missing_ok=True)


def _error_files(run_dir: Path) -> list[Path]:
    """The errors that the ranks left, the first one first: the others are often what it led to."""
    found = [path for path in (run_dir / ERROR_FILE, *run_dir.glob("error-*.json")) if path.is_file()]
    return sorted(found, key=lambda path: path.stat().st_mtime_ns)


def read_error(run_dir: Path, exit_code: int | None, log_tail: list[str]) -> AsyncGRPOError:
    """The error a child left, or one that says how it ended.

    Args:
        run_dir: where `write_error` wrote.
        exit_code: of the child; negative when a signal ended it.
        log_tail: the last lines of its log, quoted when it left no error.
    """
    paths = _error_files(run_dir)
    if not paths:
        how = f"was killed by signal {-exit_code}" if exit_code and exit_code < 0 else f"ended with {exit_code}"
        said = " | ".join(line.strip() for line in log_tail[-5:] if line.strip()) or "nothing"
        return TrainerFailed(
            f"The trainer process {how} and left no error; its log ends with: {said}.",
            f"Look at {run_dir / 'logs' / 'trainer-0.log'}; killed by signal 9 usually means out of memory.",
        )
    records = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    record = next((record for record in records if record["type"] != RankLostError.__name__), records[0])
    who = f"The trainer process failed{f' on rank {rank}' if (rank := record.get('rank', 0)) else ''}"
    error = _unpickled(record["pickle"])
    if error is None:
        message = " ".join(record["message"].split())
        error = TrainerFailed(
            f"{who} with {record['type']}: {message}.",
            f"The traceback is in {run_dir / 'logs' / f'trainer-{rank}.log'}.",
        )
        error.exit_code = record["exit_code"]
    error.add_note(record["traceback"])
    return error


def _pickled(error: BaseException) -> str | None:
    """One of our errors; None for others, and where a subclass of user code does not let itself be pickled."""
    if not isinstance(error, AsyncGRPOError):
        return None
    try:
        return base64.b64encode(pickle.dumps(error)).decode()
    except Exception:  # user code may raise anything here; the record's words are enough
        return None


def _unpickled(text: str | None) -> AsyncGRPOError | None:
    """The error, unless its class is of a module that this process lacks, or is made of other arguments."""
    if text is None:
        return None
    try:
        error = pickle.loads(base64.b64decode(text))  # written by our own child into our own folder
    except Exception:  # as above
        return None
    return error if isinstance(error, AsyncGRPOError) else None
