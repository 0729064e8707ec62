"""`python -m asyncgrpo_core.tracking.close_run RUN_DIR`: the last word on a run whose owner was killed.

The guard runs it after everything below the owner is gone. What still says "running" is set right: run_summary.json to
"interrupted", the MLflow run to KILLED. What has ended in another way is left alone.

It has a few seconds on a machine that is busy dying, and importing mlflow alone can take ten there: so a server is told
by plain HTTP (MLflow's public API) and a sqlite store by one UPDATE (a test reads it back through mlflow's client).
Other databases go through mlflow.
"""

from __future__ import annotations

import argparse
import sqlite3
import sys
import time
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from asyncgrpo_core.errors import AsyncGRPOError, TrackerError
from asyncgrpo_core.tracking.reach import rest_call, sqlite_path
from asyncgrpo_core.tracking.run_record import TrackedRun, read_run_file
from asyncgrpo_core.tracking.summary import read_summary, update_summary

_CALL_TIMEOUT_S = 4.0


def close_run(run_dir: Path) -> list[str]:
    """Correct what still says "running"; returns what was done, as sentences.

    Raises:
        TrackerError: the tracker did not take it (run_summary.json is corrected all the same).
    """
    done = []
    summary = read_summary(run_dir)
    if summary is not None and summary.get("status") == "running":
        update_summary(run_dir, status="interrupted")
        done.append("run_summary.json says interrupted")
    run = read_run_file(run_dir)
    if run is not None and _end_if_running(run):
        done.append(f"MLflow run {run.run_id} is KILLED")
    return done


def _end_if_running(run: TrackedRun) -> bool:
    if run.uri.startswith(("http://", "https://")):
        route = f"runs/get?run_id={quote(run.run_id)}"
        info = rest_call(run.uri, route, {}, _CALL_TIMEOUT_S, method="GET").get("run", {}).get("info", {})
        if info.get("status") != "RUNNING":
            return False
        body = {"run_id": run.run_id, "status": "KILLED", "end_time": int(time.time() * 1000)}
        rest_call(run.uri, "runs/update", body, _CALL_TIMEOUT_S)
        return True
    if run.uri.startswith("sqlite"):
        return _end_in_sqlite(run)
    from asyncgrpo_core.tracking.mlflow_store import finish_run, run_status

    if run_status(run.run_id, uri=run.uri) != "RUNNING":
        return False
    finish_run(run.run_id, "KILLED", uri=run.uri)
    return True


def _end_in_sqlite(run: TrackedRun) -> bool:
    path = sqlite_path(run.uri)
    if not path.exists():
        raise TrackerError(f"The tracking store {path} is gone.", "Its run cannot be marked as killed.")
    try:
        with closing(sqlite3.connect(path, timeout=_CALL_TIMEOUT_S)) as store, store:
            changed = store.execute(
                "UPDATE runs SET status = 'KILLED', end_time = ? WHERE run_uuid = ? AND status = 'RUNNING'",
                (int(time.time() * 1000), run.run_id),
            ).rowcount
    except sqlite3.Error as error:
        raise TrackerError(f"The tracking store {path} did not take the status KILLED: {error}.") from error
    return changed == 1


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m asyncgrpo_core.tracking.close_run", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    run_dir = parser.parse_args(arguments).run_dir
    try:
        for line in close_run(run_dir):
            print(line)
    except AsyncGRPOError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
