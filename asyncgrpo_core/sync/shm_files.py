"""The file protocol between the trainer's shm backend and the engine in the server.

    DIR/asyncgrpo-sync-<pid>-<random>-v<version>.safetensors               written by the trainer, removed by both
    DIR/asyncgrpo-sync-<pid>-<random>-v<version>.safetensors.report.json   written by the server, removed by the trainer

Light on purpose: standard library only, importable in a server's environment.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

PROTOCOL = 1
PREFIX = "asyncgrpo-sync-"
FAULT_ENV = "ASYNCGRPO_SYNC_FAULT"
FAULTS = ("lm_head", "all")
STALE_AFTER_S = 3600.0


def check_fault(value: str | None) -> str | None:
    """The injected delivery fault: None, "lm_head" (its update is skipped) or "all" (everything is skipped).

    Raises:
        ValueError: any other word, so that a misspelt fault cannot pass for a healthy server.
    """
    if not value:
        return None
    if value not in FAULTS:
        raise ValueError(f"unknown weight sync fault {value!r}: {FAULT_ENV} takes one of {', '.join(FAULTS)}")
    return value


def fault_from_environment() -> str | None:
    """The fault that this (server) process was started with, for tests of the delivery proof."""
    return check_fault(os.environ.get(FAULT_ENV))


def report_path(weights: Path) -> Path:
    return weights.with_name(weights.name + ".report.json")


def write_report(path: Path, version: int, report: dict[str, Any]) -> None:
    """Write atomically: the trainer must never read half a report."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps({"version": version, **report}))
    os.replace(partial, path)


def read_report(path: Path) -> dict[str, Any]:
    """Read a report. FileNotFoundError or ValueError where there is none or it is no JSON."""
    return json.loads(path.read_text())


def sweep_stale(directory: Path, *, now: float | None = None) -> list[Path]:
    """Remove what killed trainers left in `directory`: files older than an hour whose process is gone.

    The age matters because another container's processes are not visible here while its files may be.
    """
    removed = []
    for path in directory.glob(f"{PREFIX}*"):
        pid = path.name[len(PREFIX) :].split("-", 1)[0]
        try:
            age = (now if now is not None else time.time()) - path.stat().st_mtime
        except FileNotFoundError:
            continue
        if pid.isdigit() and age > STALE_AFTER_S and not Path(f"/proc/{pid}").exists():
            path.unlink(missing_ok=True)
            removed.append(path)
    return removed
