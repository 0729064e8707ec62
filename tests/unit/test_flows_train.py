"""The training flow against a real Prefect API and a real MLflow store, with small stand-ins for vLLM and trainer.

What is tested here is who starts, watches and ends what, and which status everything gets. The real server and
trainer run in tests/integration and in the quickstart.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.exceptions import TerminationSignal
from prefect.states import Cancelling, Running
from prefect.testing.utilities import prefect_test_harness

import tasks.flow_state
import tasks.training
from asyncgrpo_core.errors import DataError, RunInterrupted, ServerError, TrackerError
from asyncgrpo_core.guard import start_guarded
from asyncgrpo_core.launch.config import RunConfig
from asyncgrpo_core.launch.failure import TrainerFailed, clear_error
from asyncgrpo_core.launch.loading import parse_config
from asyncgrpo_core.launch.run_folder import read_attempt
from asyncgrpo_core.launch.trainer_process import TrainerProcess
from asyncgrpo_core.tracking.lookup import find_run, open_store
from asyncgrpo_core.tracking.mlflow_store import connect, open_run, run_status
from asyncgrpo_core.tracking.settings import TrackingConfig
from asyncgrpo_core.tracking.summary import read_summary, validate_summary
from flows.train import train
from tasks.flow_state import CancelRequested, close_previous
from tasks.record import status_of

# Listens like vLLM; ends when a file tells it to.
SERVER = """
import os, sys, threading, time
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *args): pass
port = int(sys.argv[sys.argv.index("--port") + 1])
server = HTTPServer(("127.0.0.1", port), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
while not os.path.exists("{end}"):
    time.sleep(0.05)
print("RuntimeError: the engine is gone", flush=True)
os._exit(1)
"""

# Says how far it is, then does what its first argument says.
TRAINER = """
import os, signal, sys, time
from pathlib import Path
from asyncgrpo_core.errors import DataError, RunInterrupted
from asyncgrpo_core.launch.failure import write_error
from asyncgrpo_core.launch.progress import Progress, write_progress
mode, run_dir = sys.argv[1], Path(sys.argv[2])
def save(number, frame):
    (run_dir / "saved").write_text("checkpoint")
    write_error(run_dir, RunInterrupted("stopped by SIGTERM"))
    sys.exit(130)
signal.signal(signal.SIGTERM, save)
write_progress(run_dir, Progress("training", 3, 10, 0.5))
if mode == "fail":
    write_error(run_dir, DataError("no rows.", "Give some."))
    sys.exit(2)
if mode == "die":
    os.kill(os.getpid(), signal.SIGKILL)
(run_dir / "trainer-up").write_text("")
if mode == "wait":
    time.sleep(120)
"""


@pytest.fixture(scope="module", autouse=True)
def prefect_api() -> Iterator[None]:
    with prefect_test_harness(server_startup_timeout=180):
        yield


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> str:
    """One MLflow store for the module: making its tables takes seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


def config(folder: Path, store: str, **sections: Any) -> RunConfig:
    python = folder.parent / "python"
    python.write_text(f"#!{sys.executable}\n" + SERVER.replace("{end}", str(folder / "server-ends")))
    python.chmod(0o755)
    data: dict[str, Any] = {
        "name": "flow-test",
        "run_dir": str(folder),
        "model": {"path": "some/model"},
        "data": {"train": "a:b"},
        "rewards": ["a:b"],
        "training": {"save_strategy": "no", "max_steps": 10},
        "server": {"python": str(python)},
        "resources": {"stop_grace_s": 10},
        "tracking": {"uri": store},
    }
    return parse_config(data | sections, None, source="test")


@pytest.fixture
def trainer(monkeypatch):
    """Replace the trainer process by the stand-in in one of its modes."""

    def use(mode: str) -> None:
        def start(cfg, run_dir, placement):
            clear_error(run_dir)
            process = start_guarded(
                [sys.executable, "-c", TRAINER, mode, str(run_dir)],
                name="trainer-0",
                run_dir=run_dir,
                log_path=run_dir / "logs" / "trainer-0.log",
                grace_s=2.0,
            )
            return TrainerProcess(process, run_dir, cfg.resources.stop_grace_s)

        monkeypatch.setattr(tasks.training, "start_trainer", start)

    return use


def ended(folder: Path, store: str) -> tuple[str, str]:
    """(status in run_summary.json, status in MLflow); no process and no owner is left."""
    assert not list((folder / "guards").glob("*.json"))
    assert not (folder / "owner.json").exists()
    summary = read_summary(folder)
    assert summary is not None and validate_summary(summary) == []
    return summary["status"], run_status(summary["mlflow_run_id"], uri=store)


def read_run(flow_run_id: str):
    with get_client(sync_client=True) as client:
        return client.read_flow_run(UUID(flow_run_id))


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)


def test_a_run_that_ends_well(folder, store, trainer, capsys):
    trainer("end")
    result = train(config(folder, store))
    assert result["run_dir"] == str(folder)
    assert ended(folder, store) == ("completed", "FINISHED")
    attempt = read_attempt(folder)
    assert attempt is not None and attempt.attempt == 1 and attempt.mlflow_run_id == result["mlflow_run_id"]
    assert read_run(attempt.flow_run_id).state.name == "Completed"
    resolved = json.loads((folder / "config.resolved.json").read_text())
    assert resolved["run_dir"] == str(folder)
    out = capsys.readouterr().out
    assert "step 3/10" in out and f"Run folder: {folder}" in out and "mlflow server" in out


def test_the_trainer_s_error_ends_the_run_with_its_type(folder, store, trainer):
    trainer("fail")
    with pytest.raises(DataError, match="no rows"):
        train(config(folder, store))
    assert ended(folder, store) == ("failed", "FAILED")
    assert read_run(read_attempt(folder).flow_run_id).state.name == "Failed"


def test_a_trainer_that_is_killed_fails_the_run(folder, store, trainer):
    trainer("die")
    with pytest.raises(TrainerFailed, match="signal 9"):
        train(config(folder, store))
    assert ended(folder, store) == ("failed", "FAILED")


def test_a_server_that_dies_under_the_run_is_the_cause(folder, store, trainer, monkeypatch):
    trainer("wait")
    real = tasks.training.read_progress

    def read(run_dir):
        if (folder / "trainer-up").exists():
            (folder / "server-ends").write_text("")
        return real(run_dir)

    monkeypatch.setattr(tasks.training, "read_progress", read)
    with pytest.raises(ServerError, match="the engine is gone"):
        train(config(folder, store))
    assert ended(folder, store) == ("failed", "FAILED")
    assert (folder / "saved").exists()  # the trainer was asked, not shot


def test_an_unhealthy_server_fails_the_run(folder, store, trainer):
    trainer("wait")
    folder.mkdir()
    (folder / "server-ends").write_text("")
    with pytest.raises(ServerError):
        train(config(folder, store))
    assert ended(folder, store) == ("failed", "FAILED")


def test_a_cancel_in_prefect_ends_the_run_with_a_checkpoint(folder, store, trainer, monkeypatch):
    """The flow's own look at its state: Prefect's signal does not come when its observer has died."""
    trainer("wait")
    monkeypatch.setattr(tasks.training, "CANCEL_POLL_S", 0.2)
    asked = []
    real = tasks.training.is_cancelled

    def cancel_then_look(flow_run_id):
        if not asked and (folder / "trainer-up").exists():
            asked.append(flow_run_id)
            with get_client(sync_client=True) as client:
                client.set_flow_run_state(UUID(flow_run_id), Cancelling(), force=True)
        return real(flow_run_id)

    monkeypatch.setattr(tasks.training, "is_cancelled", cancel_then_look)
    state = train(config(folder, store), return_state=True)
    assert state.is_cancelled()
    assert ended(folder, store) == ("cancelled", "KILLED")
    assert (folder / "saved").exists()
    assert read_run(asked[0]).state.name == "Cancelled"


def test_ctrl_c_ends_the_run_with_a_checkpoint(folder, store, trainer, monkeypatch):
    trainer("wait")
    real = tasks.training.read_progress

    def interrupt(run_dir):
        if (folder / "trainer-up").exists():
            raise KeyboardInterrupt
        return real(run_dir)

    monkeypatch.setattr(tasks.training, "read_progress", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(config(folder, store))
    assert ended(folder, store) == ("interrupted", "KILLED")
    assert (folder / "saved").exists()


def test_a_resume_is_the_next_attempt_of_the_same_run(folder, store, trainer):
    trainer("fail")
    with pytest.raises(DataError):
        train(config(folder, store))
    first = read_attempt(folder)
    assert first is not None
    with get_client(sync_client=True) as client:  # as a kill -9 leaves it
        client.set_flow_run_state(UUID(first.flow_run_id), Running(), force=True)
    trainer("end")
    train(config(folder, store, resume=True))
    second = read_attempt(folder)
    assert second is not None and second.attempt == 2 and second.mlflow_run_id == first.mlflow_run_id
    assert second.flow_run_id != first.flow_run_id
    assert read_run(first.flow_run_id).state.name == "Crashed"
    assert ended(folder, store) == ("completed", "FINISHED")


def test_a_resume_on_an_empty_disk_finds_the_run_by_its_name(folder, store, trainer):
    name = "lost-disk"
    trainer("fail")
    with pytest.raises(DataError):
        train(config(folder, store, name=name))
    first = read_attempt(folder)
    connect(store).log_metric(first.mlflow_run_id, "heldout/before", 0.25, step=0)
    trainer("end")
    elsewhere = folder.parent / "elsewhere"
    train(config(folder, store, name=name, run_dir=str(elsewhere), resume=True))
    second = read_attempt(elsewhere)
    assert (second.mlflow_run_id, second.attempt) == (first.mlflow_run_id, 2)
    assert read_summary(elsewhere)["heldout"]["before"] == 0.25


def test_what_was_cancelling_becomes_cancelled(prefect_api):
    with get_client(sync_client=True) as client:
        run = client.create_flow_run(train, state=Cancelling())
    assert close_previous(str(run.id)) == "Cancelled"
    assert read_run(str(run.id)).state.name == "Cancelled"
    assert close_previous(str(run.id)) is None  # nothing left to do
    assert close_previous(str(UUID(int=1))) is None  # another server's run
    assert close_previous(None) is None


@pytest.mark.parametrize(
    ("error", "cancelled", "status"),
    [
        (None, False, "completed"),
        (CancelRequested("x"), False, "cancelled"),
        (asyncio.CancelledError(), False, "cancelled"),
        (TerminationSignal(15), True, "cancelled"),
        (TerminationSignal(15), False, "interrupted"),
        (KeyboardInterrupt(), False, "interrupted"),
        (RunInterrupted("x"), False, "interrupted"),
        (SystemExit(1), False, "interrupted"),
        (DataError("x"), False, "failed"),
        (MemoryError(), False, "failed"),
    ],
)
def test_the_status_of_an_end(monkeypatch, error, cancelled, status):
    monkeypatch.setattr("tasks.record.is_cancelled", lambda flow_run_id: cancelled)
    assert status_of(error, "id") == status


def test_an_api_that_is_away_does_not_stop_training(monkeypatch):
    def away(**kwargs):
        raise ConnectionError("away")

    monkeypatch.setattr(tasks.flow_state, "get_client", away)
    assert tasks.flow_state.is_cancelled(str(UUID(int=1))) is False


def test_the_ui_form_refuses_an_unknown_key():
    """`extra="forbid"`: Prefect checks parameters against this schema before a run exists."""
    schema = RunConfig.model_json_schema()
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["ModelSection"]["additionalProperties"] is False


def test_a_store_is_made_once_and_searched_by_tags(tmp_path):
    settings = TrackingConfig(uri=f"sqlite:///{tmp_path / 'mlflow.db'}", experiment="e")
    open_store(settings)
    assert (tmp_path / "mlflow.db").is_file()
    assert find_run(settings, {"asyncgrpo.name": "a"}) is None  # no experiment yet
    for name in ("a", "b", "a"):
        newest = open_run(settings, run_dir=tmp_path / name, tags={"asyncgrpo.name": name})
    assert find_run(settings, {"asyncgrpo.name": "a"}).run_id == newest.run_id
    assert find_run(settings, {"asyncgrpo.name": "c"}) is None
    with pytest.raises(TrackerError, match="no_such_driver"):
        open_store(TrackingConfig(uri="postgresql+no_such_driver://host/db"))
