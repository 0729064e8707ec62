"""The trainer process around the trainer: signals, errors, callbacks, and what is told at the end of a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncgrpo_core.errors import CheckpointError, ConfigError, RunInterrupted
from asyncgrpo_core.launch import evaluation, finishing
from asyncgrpo_core.launch.evaluation import HeldoutCallback
from asyncgrpo_core.launch.evaluation_files import read_heldout, write_heldout
from asyncgrpo_core.launch.failure import read_error
from asyncgrpo_core.launch.finishing import final_text, markdown_report, mlflow_pages, register_final_checkpoint
from asyncgrpo_core.launch.loading import parse_config
from asyncgrpo_core.launch.placement import Placement
from asyncgrpo_core.launch.preparation import PreparedRun
from asyncgrpo_core.launch.progress import read_progress
from asyncgrpo_core.launch.reporting import ProgressCallback, SummarySource
from asyncgrpo_core.launch.run_folder import Attempt, make_run_dir, write_json
from asyncgrpo_core.launch.stopping import StopSignal
from asyncgrpo_core.launch.trainer_main import main
from asyncgrpo_core.launch.trainer_tracking import TrackingCallback
from asyncgrpo_core.manifest import manifest_of
from asyncgrpo_core.tracking.summary import update_summary


def config(**sections: Any):
    data: dict[str, Any] = {"name": "t", "model": {"path": "m"}, "data": {"train": "a:b"}, "rewards": ["a:b"]}
    return parse_config(data | sections, None, source="x")


# -- signals


@pytest.fixture
def stop():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    stop = StopSignal()
    stop.install()
    yield stop
    for number, handler in before.items():
        signal.signal(number, handler)


def test_before_training_a_signal_ends_at_once(stop):
    with pytest.raises(RunInterrupted, match="SIGTERM before training"):
        os.kill(os.getpid(), signal.SIGTERM)


def test_in_training_a_signal_is_a_request(stop):
    asked: list[str] = []
    stop.arm(asked.append)
    os.kill(os.getpid(), signal.SIGTERM)
    assert asked == ["SIGTERM"] and stop.received == "SIGTERM"


# -- the process


def test_the_trainer_process_leaves_its_error(tmp_path):
    """Its own interpreter, as in a run: an impossible config ends with 2 and the error arrives with its type."""
    make_run_dir(tmp_path)
    write_json(tmp_path / "config.resolved.json", {"name": "t"})
    child = subprocess.run(
        [sys.executable, "-m", "asyncgrpo_core.launch.trainer_main", str(tmp_path / "config.resolved.json")],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert child.returncode == 2, child.stderr
    error = read_error(tmp_path, 2, [])
    assert isinstance(error, ConfigError) and "`model` is required" in str(error)


def test_the_trainer_process_wants_one_argument(capsys):
    assert main([]) == 2
    assert "config.resolved.json" in capsys.readouterr().err


# -- callbacks

STATE = SimpleNamespace(global_step=0, is_world_process_zero=True)


def state(step: int) -> SimpleNamespace:
    return SimpleNamespace(global_step=step, is_world_process_zero=True)


def test_progress_keeps_the_last_known_value(tmp_path):
    callback = ProgressCallback(tmp_path)
    callback.on_train_begin(SimpleNamespace(max_steps=9), state(0), None)
    callback.on_log(None, state(1), None, logs={"loss": 1.0, "reward": 0.5, "sample/staleness_mean": 1.0})
    callback.on_log(None, state(2), None, logs={"loss": 1.0, "sample/staleness_mean": 2.0})
    callback.on_log(None, state(2), None, logs={"train_runtime": 3.0})  # the Trainer's last log is none of a step
    progress = read_progress(tmp_path)
    assert progress is not None
    assert (progress.step, progress.max_steps, progress.reward, progress.staleness) == (2, 9, 0.5, 2.0)


def test_an_epoch_run_has_no_last_step_to_show(tmp_path):
    callback = ProgressCallback(tmp_path)
    callback.on_train_begin(SimpleNamespace(max_steps=-1), state(0), None)
    callback.on_log(None, state(1), None, logs={"loss": 1.0})
    progress = read_progress(tmp_path)
    assert progress is not None and progress.max_steps is None


def test_the_summary_has_the_evaluations_from_the_first_moment():
    source = SummarySource()
    assert source() == {}
    source.attach(SimpleNamespace(summary=lambda: {"global_step": 3, "ledger": None}))  # type: ignore[arg-type]
    source.heldout({"n": 4, "before": 0.25})
    assert source() == {"global_step": 3, "heldout": {"n": 4, "before": 0.25}}


def test_tracking_hands_on_numbers_and_checkpoints():
    logged, submitted = [], []
    sink = SimpleNamespace(log=lambda metrics, step: logged.append((metrics, step)))
    uploader = SimpleNamespace(submit=lambda folder, step, metrics: submitted.append((folder, step, metrics)))
    callback = TrackingCallback(sink, uploader)  # type: ignore[arg-type]
    callback.on_log(None, state(2), None, logs={"reward": 0.5, "note": "text"})
    callback.on_save(SimpleNamespace(output_dir="/run/checkpoints"), state(2), None)
    assert logged == [({"reward": 0.5}, 2)]
    assert submitted == [(Path("/run/checkpoints/checkpoint-2"), 2, {"reward": 0.5})]


class Evaluations:
    """Stands for the server: remembers what it was asked and answers with a fixed reward."""

    def __init__(self, monkeypatch) -> None:
        self.calls: list[dict[str, Any]] = []
        monkeypatch.setattr(evaluation, "evaluate_heldout", self)

    def __call__(self, **kwargs):
        self.calls.append(kwargs)
        records = [
            {"row": i, "prompt": row["prompt"], "completion": "5", "reward": 1.0}
            for i, row in enumerate(kwargs["rows"])
        ]
        return SimpleNamespace(n=len(records), mean_reward=1.0, records=records)


def heldout_callback(tmp_path, results, **settings) -> HeldoutCallback:
    cfg = config(evaluation=settings)
    rows = [{"prompt": [{"role": "user", "content": "2 plus 3?"}]}]
    callback = HeldoutCallback(tmp_path, cfg.evaluation, rows, [], lambda result, step: results.append(result))
    callback.trainer = SimpleNamespace(  # type: ignore[assignment]
        args="the run's own config",
        state=state(0),
        stop_reason=None,
        pipeline=SimpleNamespace(model_name="policy", rollout_setup=lambda: {"tools": ["t"], "eos_token_ids": [1]}),
    )
    return callback


def test_the_evaluation_is_generated_like_training(tmp_path, monkeypatch):
    """The run's own config, and what the rollout worker gets: loop, tokenizer, tools, environments."""
    results: list[dict[str, Any]] = []
    evaluations = Evaluations(monkeypatch)
    callback = heldout_callback(tmp_path, results, seed=5)
    callback.on_train_begin(None, state(0), None)
    callback.on_train_end(None, state(9), None)
    before, after = evaluations.calls
    assert before["config"] == "the run's own config" and before["model_name"] == "policy"
    assert before["tools"] == ["t"] and before["eos_token_ids"] == [1]
    assert before["seed"] == after["seed"] == 5
    assert results == [{"n": 1, "before": 1.0}, {"n": 1, "after": 1.0}]
    assert [r["completion"] for r in read_heldout(tmp_path, "after")] == ["5"]


def test_a_resumed_policy_is_not_evaluated_as_the_start(tmp_path, monkeypatch):
    evaluations = Evaluations(monkeypatch)
    callback = heldout_callback(tmp_path, [])
    callback.on_train_begin(None, state(10), None)
    assert evaluations.calls == []
    write_heldout(tmp_path, "before", [])
    callback.on_train_begin(None, state(0), None)
    assert evaluations.calls == []


def test_a_stopped_run_is_not_evaluated_after(tmp_path, monkeypatch):
    evaluations = Evaluations(monkeypatch)
    callback = heldout_callback(tmp_path, [])
    assert callback.trainer is not None
    callback.trainer.stop_reason = "SIGTERM"  # type: ignore[misc]
    callback.on_train_end(None, state(9), None)
    assert evaluations.calls == []


def test_only_the_wanted_evaluations_are_made(tmp_path, monkeypatch):
    evaluations = Evaluations(monkeypatch)
    callback = heldout_callback(tmp_path, [], when=["after"])
    callback.on_train_begin(None, state(0), None)
    assert evaluations.calls == []
    callback.on_train_end(None, state(9), None)
    assert len(evaluations.calls) == 1


# -- the end of a run


def prepared(tmp_path: Path, uri: str | None = None, **sections: Any) -> PreparedRun:
    make_run_dir(tmp_path)
    attempt = Attempt(1, "mlflow-id", "flow-id", "http://127.0.0.1:1", "policy")
    return PreparedRun(config(**sections), tmp_path, attempt, Placement("cpu", (), (), "shm"), None, uri)


def record(row: int, completion: str, reward: float | None) -> dict[str, Any]:
    prompt = [{"role": "user", "content": f"What is {row} plus 3?"}]
    return {"row": row, "prompt": prompt, "completion": completion, "reward": reward}


def test_the_end_shows_three_prompts_before_and_after(tmp_path):
    run = prepared(tmp_path, "sqlite:////store/mlflow.db")
    write_heldout(tmp_path, "before", [record(i, "wrong", 0.0) for i in range(5)])
    write_heldout(tmp_path, "after", [record(i, f"right\n{i}", 1.0) for i in range(5)])
    update_summary(tmp_path, global_step=7, heldout={"n": 5, "before": 0.0, "after": 1.0})
    text = final_text(run)
    assert text.count("Prompt:") == 3
    assert "What is 2 plus 3?" in text and "What is 3 plus 3?" not in text
    assert "before: 'wrong' (reward 0.000)" in text and "after:  'right 2' (reward 1.000)" in text
    assert "0.000 -> 1.000" in text and str(tmp_path) in text
    assert "--backend-store-uri sqlite:////store/mlflow.db" in text


def test_the_pages_of_an_embedded_and_of_a_configured_prefect(tmp_path, monkeypatch):
    run = prepared(tmp_path)
    monkeypatch.setenv("PREFECT_API_URL", "http://prefect:4200/api")
    assert finishing.prefect_pages(run) == "http://prefect:4200/runs/flow-run/flow-id"
    (tmp_path / "prefect").mkdir()
    command = finishing.prefect_pages(run)
    assert f"PREFECT_HOME={tmp_path / 'prefect'}" in command and "server start" in command
    assert mlflow_pages(run) == "this run has no tracker"
    assert mlflow_pages(prepared(tmp_path, "http://mlflow:5000")) == "http://mlflow:5000"


def test_the_printed_commands_exist():
    for name in ("prefect", "mlflow"):
        assert (Path.cwd() / finishing.script(name)).is_file()


def test_the_report_has_the_numbers(tmp_path):
    run = prepared(tmp_path)
    update_summary(
        tmp_path, global_step=7, reward={"first": 0.25, "last": 0.75}, weight_sync={"count": 7, "verified": 7}
    )
    text = markdown_report(run, "t, version 3")
    for part in ("| Steps | 7 |", "0.250 -> 0.750", "7 (7)", "t, version 3", "mlflow-id"):
        assert part in text


def whole_checkpoint(run_dir: Path, step: int) -> None:
    folder = run_dir / "checkpoints" / f"checkpoint-{step}"
    folder.mkdir()
    (folder / "model.safetensors").write_text("weights")
    (folder / "rollout_state.json").write_text(json.dumps({"manifest": manifest_of(folder)}))


def test_the_newest_whole_checkpoint_is_registered(tmp_path, monkeypatch):
    run = prepared(tmp_path, "sqlite:///x", name="my.run")
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        register_final_checkpoint(run)
    whole_checkpoint(tmp_path, 5)
    whole_checkpoint(tmp_path, 10)
    (tmp_path / "checkpoints" / "checkpoint-15").mkdir()  # torn
    calls = []

    def register(name, run_id, step, *, uri):
        calls.append((name, run_id, step, uri))
        return "3"

    monkeypatch.setattr("asyncgrpo_core.tracking.mlflow_store.register_final", register)
    assert register_final_checkpoint(run) == "my-run, version 3"
    assert calls == [("my-run", "mlflow-id", 10, "sqlite:///x")]


@pytest.mark.parametrize("sections", [{"tracking": {"checkpoints": {"log": "none"}}}, {"tracking": {"enabled": False}}])
def test_nothing_is_registered_that_was_not_logged(tmp_path, sections):
    uri = "sqlite:///x" if "checkpoints" in sections["tracking"] else None
    run = prepared(tmp_path, uri, **sections)
    whole_checkpoint(tmp_path, 5)
    assert register_final_checkpoint(run) is None
