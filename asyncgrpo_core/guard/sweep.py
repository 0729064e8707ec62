"""Clean up, at the start of a run, after a run whose guards were killed too."""

from __future__ import annotations

import time
from pathlib import Path

from asyncgrpo_core.errors import AsyncGRPOError
from asyncgrpo_core.guard import process_table as table
from asyncgrpo_core.guard.records import GuardRecord, read_record

_ENDING_S = 25.0  # beyond its grace, what a guard whose owner died may take before it is killed here


def sweep_stale(run_dir: Path) -> list[int]:
    """Kill what dead guards of this run folder left behind; returns the process ids that were killed.

    A record whose guard and owner both run is a live run and is left alone. A guard whose owner died is given the
    time it needs to end its child. Records of another boot or another host name nothing that could be killed here.

    Raises:
        AsyncGRPOError: a record cannot be read, or a process cannot be killed.
    """
    killed: list[int] = []
    for path in sorted((Path(run_dir) / "guards").glob("*.json")):
        try:
            record = read_record(path)
        except ValueError as error:
            raise AsyncGRPOError(
                f"{path} cannot be read: {error}.", "Delete it after checking that no old process of the run is left."
            ) from error
        if record is not None:
            killed += _sweep_one(record, path)
    return killed


def _sweep_one(record: GuardRecord, path: Path) -> list[int]:
    if record.boot_id != table.boot_id():
        path.unlink(missing_ok=True)
        return []
    if table.is_running(record.guard):
        if table.is_running(record.owner):
            return []
        _await_end(record)
    candidates = set(record.descendants) | ({record.child} if record.child else set()) | {record.guard}
    found = {p for p in candidates if table.is_running(p)}
    found |= set(table.marked(table.GUARD_MARK, record.guard_id))
    left = table.kill_leftovers(record.guard_id, sorted(candidates))
    if left:
        raise AsyncGRPOError(
            f"Processes {[p.pid for p in left]}, left by an earlier {record.name!r} of this run, could not be killed.",
            "Look at them with ps and end them by hand.",
        )
    path.unlink(missing_ok=True)
    return sorted(p.pid for p in found)


def _await_end(record: GuardRecord) -> None:
    deadline = time.monotonic() + record.grace_s + _ENDING_S
    while table.is_running(record.guard) and time.monotonic() < deadline:
        time.sleep(0.05)
