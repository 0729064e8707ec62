"""The end of a run: its status, its registered model, and what is told about it."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

from asyncgrpo_core.errors import CheckpointError
from asyncgrpo_core.launch.evaluation_files import read_heldout
from asyncgrpo_core.launch.preparation import PreparedRun
from asyncgrpo_core.launch.run_folder import release_ownership
from asyncgrpo_core.manifest import newest_checkpoint
from asyncgrpo_core.tracking.summary import read_summary, update_summary

logger = logging.getLogger("asyncgrpo_core.flow")


def close_attempt(run: PreparedRun, status: str, mlflow_status: str) -> None:
    """Write the final status to run_summary.json and to the MLflow run, and let go of the folder."""
    update_summary(run.run_dir, status=status, wall_s=run.earlier_s + time.monotonic() - run.started)
    try:
        if run.tracking_uri is not None and run.attempt.mlflow_run_id is not None:
            from asyncgrpo_core.tracking.mlflow_store import finish_run

            finish_run(run.attempt.mlflow_run_id, mlflow_status, uri=run.tracking_uri)
    finally:
        release_ownership(run.run_dir)


def note_wall_time(run: PreparedRun) -> None:
    """Keep `wall_s` of run_summary.json up to date while the run is under way."""
    update_summary(run.run_dir, wall_s=run.earlier_s + time.monotonic() - run.started)


def register_final_checkpoint(run: PreparedRun) -> str | None:
    """Register the newest checkpoint as a version of the model named like the run.

    Returns:
        "name, version N"; None without a tracker, or when checkpoints are not logged to it.

    Raises:
        CheckpointError: training left no whole checkpoint although it saves them.
        TrackerError: the registry refuses.
    """
    folder = run.run_dir / "checkpoints"
    newest = newest_checkpoint(folder)
    if newest is None:
        if run.cfg.training.save_strategy == "no":
            return None
        raise CheckpointError(f"Training ended and left no whole checkpoint in {folder}.", "See logs/trainer-0.log.")
    if run.tracking_uri is None or run.cfg.tracking.checkpoints.log in ("path", "none"):
        return None
    from asyncgrpo_core.tracking.mlflow_store import register_final

    step = int(newest.name.rpartition("-")[2])
    assert run.attempt.mlflow_run_id is not None
    name = re.sub(r"[/:.%\"']", "-", run.cfg.name)
    version = register_final(name, run.attempt.mlflow_run_id, step, uri=run.tracking_uri)
    return f"{name}, version {version}"


def final_text(run: PreparedRun) -> str:
    """What the console says at the end: completions before and after, rewards, and where everything is."""
    summary = read_summary(run.run_dir) or {}
    lines = ["", *_completions(run), *_numbers(summary)]
    lines += ["", f"Run folder: {run.run_dir}"]
    lines += [f"Prefect pages: {prefect_pages(run)}", f"MLflow pages:  {mlflow_pages(run)}"]
    return "\n".join(lines)


def _completions(run: PreparedRun) -> list[str]:
    before, after = read_heldout(run.run_dir, "before"), read_heldout(run.run_dir, "after")
    old = {record["row"]: record for record in before}
    lines = []
    for record in after[: run.cfg.evaluation.show]:
        lines.append(f"Prompt: {_one_line(record['prompt'][-1]['content'])}")
        if record["row"] in old:
            lines.append(f"  before: {_completion(old[record['row']])}")
        lines.append(f"  after:  {_completion(record)}")
    return lines


def _completion(record: dict[str, Any]) -> str:
    return f"{_one_line(record['completion'])!r} (reward {_number(record['reward'])})"


def _numbers(summary: dict[str, Any]) -> list[str]:
    heldout = summary.get("heldout") or {}
    lines = []
    if heldout.get("after") is not None:
        lines.append(
            f"Held-out reward ({heldout['n']} prompts): {_number(heldout.get('before'))} -> {_number(heldout['after'])}"
        )
    lines.append(f"Steps: {summary.get('global_step', 0)}, wall time {summary.get('wall_s', 0.0):.0f} s")
    return lines


def prefect_pages(run: PreparedRun) -> str:
    """The command, or the address, that shows this run's Prefect pages."""
    home = run.run_dir / "prefect"
    if home.is_dir():
        return f"PREFECT_HOME={shown(home)} PREFECT_SERVER_API_PORT=4200 {script('prefect')} server start --port 4200"
    base = os.environ.get("PREFECT_API_URL", "").removesuffix("/").removesuffix("/api")
    return f"{base}/runs/flow-run/{run.attempt.flow_run_id}" if base else "the server of the active Prefect profile"


def mlflow_pages(run: PreparedRun) -> str:
    """The command, or the address, that shows this run's MLflow pages."""
    uri = run.tracking_uri
    if uri is None:
        return "this run has no tracker"
    if uri.startswith("http"):
        return uri
    return f"{script('mlflow')} server --backend-store-uri {uri} --port 5000"


def script(name: str) -> str:
    """A console script of this environment, as it can be typed in the working folder."""
    return shown(Path(sys.executable).parent / name)


def shown(path: Path) -> str:
    """A path as short as it can be typed in the working folder."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def markdown_report(run: PreparedRun, registered: str | None) -> str:
    """The report on the run's Prefect page."""
    summary = read_summary(run.run_dir) or {}
    heldout, sync = summary.get("heldout") or {}, summary.get("weight_sync") or {}
    ledger = summary.get("ledger") or {}
    rows = [
        ("Status", "completed"),
        ("Steps", summary.get("global_step")),
        ("Held-out reward", f"{_number(heldout.get('before'))} -> {_number(heldout.get('after'))}"),
        ("Reward, first and last tenth", _range(summary.get("reward"))),
        ("Prompts trained / lost", f"{ledger.get('trained')} / {ledger.get('lost')}"),
        ("Weight syncs (verified)", f"{sync.get('count')} ({sync.get('verified')})"),
        ("Registered model", registered or "none"),
        ("MLflow", mlflow_pages(run)),
        ("MLflow run", run.attempt.mlflow_run_id),
        ("Run folder", run.run_dir),
    ]
    table = "\n".join(f"| {key} | {value} |" for key, value in rows)
    return f"# {run.cfg.name}\n\n| | |\n|-|-|\n{table}\n"


def _range(reward: dict[str, Any] | None) -> str:
    return "-" if not reward else f"{_number(reward.get('first'))} -> {_number(reward.get('last'))}"


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.3f}"


def _one_line(text: Any) -> str:
    line = " ".join(str(text).split())
    return line if len(line) <= 100 else line[:97] + "..."
