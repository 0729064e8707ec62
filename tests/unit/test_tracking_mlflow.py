"""Against the real mlflow with a sqlite store: run lifecycle, metrics, checkpoints, the last word after a kill."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from asyncgrpo_core.errors import TrackerError
from asyncgrpo_core.manifest import problem_with
from asyncgrpo_core.tracking import mlflow_store
from asyncgrpo_core.tracking.checkpoints import CheckpointUploader, fetch_newest_checkpoint
from asyncgrpo_core.tracking.close_run import close_run, main
from asyncgrpo_core.tracking.run_record import TrackedRun, read_run_file, write_run_file
from asyncgrpo_core.tracking.settings import CheckpointTracking, TrackingConfig
from asyncgrpo_core.tracking.summary import read_summary, update_summary
from tests.unit.test_tracking_checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> TrackingConfig:
    """One store for the module: making its tables takes seconds."""
    folder = tmp_path_factory.mktemp("tracking")
    return TrackingConfig(uri=f"sqlite:///{folder / 'mlflow.db'}", tags={"team": "a"})


@pytest.fixture
def run_dir(tmp_path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def run(config, run_dir) -> TrackedRun:
    return mlflow_store.open_run(config, run_dir=run_dir, params={"training": {"lr": 1e-3}})


@pytest.fixture
def client(config):
    return mlflow_store.connect(config.resolved_uri())


def test_run_has_params_tags_config_and_its_file(config, run_dir, client):
    params = {"model": {"path": "m", "long": "x" * 7000}, "rewards": ["a", "b"], "odd (key)": None}
    run = mlflow_store.open_run(config, run_dir=run_dir, params=params, tags={"flow": "f1"})
    stored = client.get_run(run.run_id)
    assert stored.info.status == "RUNNING"
    assert stored.info.run_name == "run"
    assert stored.data.params["model.path"] == "m"
    assert stored.data.params["rewards"] == '["a", "b"]'
    assert stored.data.params["odd _key_"] == "null"
    long = stored.data.params["model.long"]
    assert len(long) == 6000
    assert long.endswith("(cut; whole in config/resolved.json)")
    assert stored.data.tags["team"] == "a"
    assert stored.data.tags["flow"] == "f1"
    whole = json.loads(Path(client.download_artifacts(run.run_id, "config/resolved.json")).read_text())
    assert whole == params
    assert read_run_file(run_dir) == run
    store = Path(config.resolved_uri().removeprefix("sqlite:///")).parent
    assert run.artifact_uri.startswith((store / "mlruns").as_uri())


@pytest.mark.parametrize("status", ["FINISHED", "FAILED", "KILLED"])
def test_status_is_what_the_flow_says(run, client, status):
    mlflow_store.finish_run(run.run_id, status, uri=run.uri)
    assert client.get_run(run.run_id).info.status == status
    assert client.get_run(run.run_id).info.end_time is not None


def test_resume_keeps_the_run_and_names_changed_parameters(config, run, run_dir, client):
    started = client.get_run(run.run_id).info.start_time
    mlflow_store.finish_run(run.run_id, "KILLED", uri=run.uri)
    again = mlflow_store.open_run(
        config, run_dir=run_dir, params={"training": {"lr": 2e-3, "new": 1}}, run_id=run.run_id
    )
    stored = client.get_run(run.run_id)
    assert again.run_id == run.run_id
    assert (stored.info.status, stored.info.start_time) == ("RUNNING", started)
    assert stored.data.params == {"training.lr": "0.001", "training.new": "1"}
    assert stored.data.tags["asyncgrpo.changed_params"] == "training.lr"
    assert stored.data.tags["asyncgrpo.resumes"] == "1"
    assert {f.path for f in client.list_artifacts(run.run_id, "config")} == {
        "config/resolved.json",
        "config/resolved-resume-1.json",
    }


def test_unknown_run_and_deleted_run_are_named(config, run, run_dir, client):
    with pytest.raises(TrackerError, match=f"no MLflow run {'0' * 32}"):
        mlflow_store.open_run(config, run_dir=run_dir, run_id="0" * 32)
    client.delete_run(run.run_id)
    with pytest.raises(TrackerError, match="was deleted"):
        mlflow_store.open_run(config, run_dir=run_dir, run_id=run.run_id)


def test_every_metric_is_stored_once_over_a_resume(run, client):
    """26 steps logged, resumed at 20, on to 30: 30 points, none twice."""
    sink = mlflow_store.MlflowSink(run.uri, run.run_id)
    for step in range(1, 27):
        sink.log({"loss": step / 10, "rewards/len(x)": math.nan}, step)
    assert sink.close(30)
    assert mlflow_store.last_logged_step(run.run_id, uri=run.uri) == 26
    sink = mlflow_store.MlflowSink(run.uri, run.run_id, resume=True)
    for step in range(21, 31):
        sink.log({"loss": step / 5, "rewards/len(x)": 0.5}, step)
    assert sink.close(30)
    for name in ("loss", "rewards/len_x_"):
        points = sorted(client.get_metric_history(run.run_id, name), key=lambda m: m.step)
        assert [m.step for m in points] == list(range(1, 31))
    assert math.isnan(points[25].value)
    assert points[26].value == 0.5


def test_deleted_run_refuses_metrics_for_good(run, client):
    sink = mlflow_store.MlflowSink(run.uri, run.run_id)
    client.delete_run(run.run_id)
    sink.log({"loss": 1.0}, 1)
    assert not sink.close(30)
    assert sink.dropped == 1


def test_system_metrics_reach_the_run_and_go_on_after_a_resume(run, client, monkeypatch):
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.05")
    for resume in (False, True):
        system = mlflow_store.SystemMetrics(run.uri, run.run_id, resume=resume)
        seen = len(client.get_metric_history(run.run_id, "system/cpu_utilization_percentage"))
        system.start()
        done = threading.Event()
        for _ in range(200):
            points = client.get_metric_history(run.run_id, "system/cpu_utilization_percentage")
            if len(points) > seen + 1 or done.wait(0.05):
                break
        system.stop(30)
    points = client.get_metric_history(run.run_id, "system/cpu_utilization_percentage")
    assert len(points) >= 4
    assert len({m.step for m in points}) == len(points)
    assert mlflow_store.last_logged_step(run.run_id, uri=run.uri) is None


def test_checkpoints_go_up_and_come_back_on_an_empty_disk(run, run_dir, client, tmp_path):
    """Issue 1: a resume on an empty disk fetches the newest valid checkpoint from the run."""
    store = mlflow_store.CheckpointArtifacts(run.uri, run.run_id)
    up = CheckpointUploader(store, CheckpointTracking(keep_last=2), run_dir)
    for step in (10, 20, 30):
        up.submit(make_checkpoint(run_dir / "checkpoints", step), step)
    assert up.close(60)
    assert list(store.complete()) == [20, 30]
    artifacts = Path(run.artifact_uri.removeprefix("file://")) / "checkpoints"
    assert sorted(p.name for p in artifacts.iterdir()) == ["checkpoint-20", "checkpoint-30"]
    (artifacts / "checkpoint-30" / "model.safetensors").write_bytes(b"torn")
    fetched = fetch_newest_checkpoint(run.uri, run.run_id, tmp_path / "other")
    assert fetched == tmp_path / "other" / "checkpoint-20"
    assert problem_with(fetched) is None


def test_checkpoint_of_the_same_step_is_replaced_whole(run, run_dir):
    """A resume from an older checkpoint reaches the step again."""
    store = mlflow_store.CheckpointArtifacts(run.uri, run.run_id)
    folder = make_checkpoint(run_dir / "checkpoints", 10)
    (folder / "extra").write_bytes(b"x")
    store.put(folder, 10)
    store.mark(10, {})
    (folder / "extra").unlink()
    store.put(folder, 10)
    assert store.complete() == {}
    assert not list(Path(run.artifact_uri.removeprefix("file://")).rglob("extra"))


def test_final_checkpoint_is_registered_with_an_alias(run, run_dir, client):
    store = mlflow_store.CheckpointArtifacts(run.uri, run.run_id)
    with pytest.raises(TrackerError, match="no complete checkpoint of step 10"):
        mlflow_store.register_final("policy", run.run_id, 10, uri=run.uri)
    store.put(make_checkpoint(run_dir / "checkpoints", 10), 10)
    store.mark(10, {})
    first = mlflow_store.register_final("policy", run.run_id, 10, uri=run.uri)
    second = mlflow_store.register_final("policy", run.run_id, 10, uri=run.uri)
    assert (first, second) == ("1", "2")
    version = client.get_model_version_by_alias("policy", "final")
    assert (version.version, version.run_id) in ((2, run.run_id), ("2", run.run_id))
    assert version.source.endswith("checkpoints/checkpoint-10")


def test_store_that_cannot_be_opened_is_named(tmp_path):
    (tmp_path / "file").touch()
    config = TrackingConfig(uri=f"sqlite:///{tmp_path}/file/mlflow.db")
    with pytest.raises(TrackerError, match=r"file/mlflow\.db refused a call"):
        mlflow_store.open_run(config, run_dir=tmp_path / "run")


# -- the last word ----------------------------------------------------------------------------------------------------


def test_close_run_corrects_what_still_says_running(run, run_dir, client):
    """As the guard runs it: its own process, without importing mlflow."""
    update_summary(run_dir, status="running", global_step=7)
    program = (
        "import sys; from asyncgrpo_core.tracking.close_run import main; "
        f"code = main([{str(run_dir)!r}]); sys.exit(code or 'mlflow' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "interrupted" in done.stdout
    assert "KILLED" in done.stdout
    stored = client.get_run(run.run_id).info
    assert stored.status == "KILLED"
    assert stored.end_time >= stored.start_time
    summary = read_summary(run_dir)
    assert summary is not None
    assert (summary["status"], summary["global_step"]) == ("interrupted", 7)
    assert close_run(run_dir) == []


def test_close_run_leaves_a_finished_run_alone(run, run_dir, client):
    update_summary(run_dir, status="completed")
    mlflow_store.finish_run(run.run_id, "FINISHED", uri=run.uri)
    assert close_run(run_dir) == []
    assert client.get_run(run.run_id).info.status == "FINISHED"


def test_close_run_of_an_untracked_run(tmp_path):
    update_summary(tmp_path, status="running")
    assert main([str(tmp_path)]) == 0
    summary = read_summary(tmp_path)
    assert summary is not None
    assert summary["status"] == "interrupted"


def test_close_run_corrects_the_summary_even_if_the_store_is_gone(tmp_path, capsys):
    update_summary(tmp_path, status="running")
    write_run_file(tmp_path, TrackedRun(f"sqlite:///{tmp_path}/gone.db", "r1", "1", "file:///x"))
    assert main([str(tmp_path)]) == 1
    assert "is gone" in capsys.readouterr().err
    summary = read_summary(tmp_path)
    assert summary is not None
    assert summary["status"] == "interrupted"
    assert not os.path.exists(tmp_path / "gone.db")


def test_close_run_tells_an_mlflow_server_by_http(tmp_path):
    """The calls of MLflow's REST API: runs/get, then runs/update when it says RUNNING."""
    seen: list[tuple[str, str, dict]] = []

    class Handler(BaseHTTPRequestHandler):
        def _answer(self, body: dict) -> None:
            seen.append((self.command, self.path, body))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"run": {"info": {"status": "RUNNING"}}}).encode())

        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def log_message(self, *args: object) -> None:
            """Silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        write_run_file(tmp_path, TrackedRun(f"http://127.0.0.1:{server.server_port}", "r1", "1", "mlflow-artifacts:/x"))
        assert close_run(tmp_path) == ["MLflow run r1 is KILLED"]
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
    assert seen[0][:2] == ("GET", "/api/2.0/mlflow/runs/get?run_id=r1")
    assert seen[1][:2] == ("POST", "/api/2.0/mlflow/runs/update")
    assert seen[1][2]["status"] == "KILLED"
