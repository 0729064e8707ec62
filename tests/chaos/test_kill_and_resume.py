"""A run killed with SIGKILL, its whole process group at once, goes on from its last checkpoint (F166, F167).

Real everything: Prefect server, vLLM, trainer, rollout worker, MLflow. `make chaos` runs it: some ten minutes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from asyncgrpo_core.tracking.summary import validate_summary

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800)]


def start(run_dir: Path, store: Path, *more: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "asyncgrpo_core.launch.cli", "train", str(ROOT / "examples" / "quickstart.yaml")]
    command += ["--run-dir", str(run_dir), "--set", "training.max_steps=60", *more]
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    env.pop("PREFECT_API_URL", None)
    with open(store / "console.log", "ab") as log:
        return subprocess.Popen(
            command, cwd=store, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )


def summary(run_dir: Path) -> dict:
    return json.loads((run_dir / "run_summary.json").read_text())


def processes_of(run_dir: Path) -> list[str]:
    """Command lines of every process that names the run folder or carries it in its environment."""
    found = []
    for process in psutil.process_iter():
        try:
            text = " ".join(process.cmdline())
            if str(run_dir) in text or str(run_dir) in " ".join(process.environ().values()):
                found.append(f"{process.pid} {text}")
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def kill_after(run_dir: Path, process: subprocess.Popen, step: int, deadline_s: float = 600.0) -> int:
    """SIGKILL the process group once `step` is reached; the step it was killed at."""
    deadline = time.monotonic() + deadline_s
    while True:
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline, "the run did not reach the step in time"
        reached = summary(run_dir)["global_step"] if (run_dir / "run_summary.json").exists() else 0
        if reached >= step:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
            return reached
        time.sleep(0.2)


def mlflow_steps(store: Path, run_id: str) -> list[int]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{store / 'mlflow.db'}")
    assert client.get_run(run_id).info.status == "FINISHED"
    return [point.step for point in client.get_metric_history(run_id, "loss")]


@pytest.mark.parametrize("disk", ["kept", "checkpoints deleted"])
def test_f166_f167_a_killed_run_loses_nothing(tmp_path, disk):
    run_dir = tmp_path / "run"
    first = start(run_dir, tmp_path)
    killed_at = kill_after(run_dir, first, step=23)
    time.sleep(10)
    assert processes_of(run_dir) == [], "10 s after the kill nothing of the run may be left"
    assert summary(run_dir)["status"] == "interrupted"
    if disk == "checkpoints deleted":
        shutil.rmtree(run_dir / "checkpoints")

    second = start(run_dir, tmp_path, "--resume")
    assert second.wait(900) == 0, (tmp_path / "console.log").read_text()[-3000:]
    end = summary(run_dir)
    assert validate_summary(end) == []
    assert end["status"] == "completed" and end["global_step"] == 60 and end["attempt"] == 2
    assert end["resumed_from"] and int(end["resumed_from"].rsplit("-", 1)[1]) >= 20
    assert killed_at >= 20
    assert end["ledger"]["lost"] == 0 and end["ledger"]["trained_twice"] == 0
    assert end["weight_sync"]["count"] == 60 and end["weight_sync"]["unverified"] == 0
    steps = mlflow_steps(tmp_path, end["mlflow_run_id"])
    assert sorted(set(steps)) == list(range(1, 61)) and len(steps) == 60, "no step is missing or stored twice"
    assert processes_of(run_dir) == []
