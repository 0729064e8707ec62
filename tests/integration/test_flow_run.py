"""The main job with every part real but a second server: Prefect flow, trainer process, worker, MLflow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from asyncgrpo_core.ledger_counts import audit
from asyncgrpo_core.manifest import newest_checkpoint
from asyncgrpo_core.tracking.summary import validate_summary

ROOT = Path(__file__).resolve().parents[2]


def run(server, folder: Path, *more: str) -> subprocess.CompletedProcess:
    settings = {
        "server.url": server.base_url,
        "model.path": server.model_path,
        "model.served_model_name": server.served_model_name,
        "training.max_steps": "4",
        "training.gradient_accumulation_steps": "1",
        "checkpoint.every_steps": "2",
        "evaluation.n": "32",
    }
    command = [sys.executable, "-m", "asyncgrpo_core.launch.cli", "train", str(ROOT / "examples" / "quickstart.yaml")]
    command += ["--run-dir", str(folder / "run"), *more]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI"):
        env.pop(name, None)
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=400)


@pytest.fixture(scope="module")
def finished(vllm_server, tmp_path_factory):
    """(what the command printed, folder it ran in) of one run of four steps."""
    folder = tmp_path_factory.mktemp("flow")
    return run(vllm_server, folder), folder


def client(folder: Path):
    from mlflow import MlflowClient

    uri = f"sqlite:///{folder / 'mlflow.db'}"
    return MlflowClient(uri, registry_uri=uri)


def test_the_command_ends_well_and_shows_what_a_person_wants_to_know(finished):
    done, folder = finished
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("before:") == 3 and done.stdout.count("after:") == 3
    for text in ("Held-out reward (32 prompts)", str(folder / "run"), "prefect server start", "mlflow server"):
        assert text in done.stdout, text
    assert "step " in done.stdout and "Steps: 4" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_run_summary_says_how_it_went(finished):
    _, folder = finished
    summary = json.loads((folder / "run" / "run_summary.json").read_text())
    assert validate_summary(summary) == []
    assert (summary["status"], summary["global_step"], summary["attempt"]) == ("completed", 4, 1)
    assert summary["heldout"]["n"] == 32 and summary["heldout"]["after"] is not None
    assert summary["weight_sync"]["count"] == 4 and summary["weight_sync"]["unverified"] == 0
    assert summary["ledger"]["lost"] == 0 and summary["ledger"]["trained_twice"] == 0
    assert 0 <= summary["throughput"]["overlap_frac"] <= 1
    assert audit(folder / "run" / "ledger.sqlite") == []


def test_the_run_folder_has_what_design_says(finished):
    _, folder = finished
    run_dir = folder / "run"
    for name in ("config.resolved.json", "ledger.sqlite", "heldout/before.jsonl", "heldout/after.jsonl"):
        assert (run_dir / name).is_file(), name
    for log in ("flow.log", "trainer-0.log", "rollout.log"):
        assert (run_dir / "logs" / log).stat().st_size > 0, log
    assert newest_checkpoint(run_dir / "checkpoints").name == "checkpoint-4"


def test_mlflow_holds_the_run(finished):
    _, folder = finished
    run_id = json.loads((folder / "run" / "run_summary.json").read_text())["mlflow_run_id"]
    store = client(folder)
    found = store.get_run(run_id)
    assert found.info.status == "FINISHED"
    assert found.data.params["training.max_steps"] == "4"
    assert [point.step for point in store.get_metric_history(run_id, "loss")] == [1, 2, 3, 4]
    for name in ("reward_kept", "heldout/before", "heldout/after"):
        assert name in found.data.metrics, name
    assert any(name.startswith("system/") for name in found.data.metrics)
    artifacts = {item.path for item in store.list_artifacts(run_id, "checkpoints")}
    assert {"checkpoints/checkpoint-2", "checkpoints/checkpoint-4"} <= artifacts
    assert len(store.search_model_versions(f"run_id='{run_id}'")) == 1


def test_nothing_of_the_run_is_left(finished):
    _, folder = finished
    left = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        if str(folder) in " ".join(process.info["cmdline"] or []):
            left.append(process.info)
    assert left == []
