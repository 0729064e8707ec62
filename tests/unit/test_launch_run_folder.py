"""The run folder: its name, its owner, what a resume finds; and the errors and progress that travel through it."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from asyncgrpo_core.errors import ConfigError, DataError, RunInterrupted, WeightSyncError
from asyncgrpo_core.launch.config import RunConfig
from asyncgrpo_core.launch.failure import TrainerFailed, clear_error, read_error, write_error
from asyncgrpo_core.launch.loading import parse_config
from asyncgrpo_core.launch.progress import Console, Progress, read_progress, write_progress
from asyncgrpo_core.launch.run_folder import (
    CONFIG_FILE,
    OWNER_FILE,
    Attempt,
    check_same_run,
    choose_run_dir,
    live_owner,
    make_run_dir,
    read_attempt,
    refuse_live_run,
    release_ownership,
    resolve,
    take_ownership,
    write_attempt,
    write_json,
)


def config(**values) -> RunConfig:
    data = {"name": "r", "model": {"path": "some/model"}, "data": {"train": "a:b"}, "rewards": ["a:b"]}
    return parse_config(data | values, None, source="x")


@pytest.fixture(autouse=True)
def in_tmp(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def hold_a_run(path: Path, age_s: float = 0.0) -> Path:
    make_run_dir(path)
    write_json(path / CONFIG_FILE, {})
    then = time.time() - age_s
    os.utime(path / CONFIG_FILE, (then, then))
    return path


# -- where


def test_a_new_run_gets_a_folder_of_its_own():
    first = choose_run_dir(config(), now=0)
    assert first.parent == Path("runs").absolute() and first.name.startswith("r-")
    first.mkdir(parents=True)
    assert choose_run_dir(config(), now=0) != first


def test_a_folder_that_holds_a_run_is_not_used_for_another(tmp_path):
    hold_a_run(tmp_path / "x")
    with pytest.raises(ConfigError, match="already holds a run"):
        choose_run_dir(config(run_dir="x"))
    assert choose_run_dir(config(run_dir="x", resume=True)) == tmp_path / "x"
    (tmp_path / "empty").mkdir()
    assert choose_run_dir(config(run_dir="empty")) == tmp_path / "empty"


def test_resume_takes_the_newest_run_of_that_name(tmp_path):
    hold_a_run(tmp_path / "runs" / "r-1", age_s=5)
    newest = hold_a_run(tmp_path / "runs" / "r-0", age_s=1)
    hold_a_run(tmp_path / "runs" / "other-1")
    (tmp_path / "runs" / "r-9").mkdir()  # never started
    assert choose_run_dir(config(resume=True)) == newest


def test_nothing_to_resume_is_said():
    with pytest.raises(ConfigError, match="no run to resume"):
        choose_run_dir(config(resume=True))


def test_a_folder_that_cannot_be_made_is_a_config_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        make_run_dir(tmp_path / "file" / "run")


# -- who


def test_a_live_owner_keeps_others_out(tmp_path):
    other = subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"], stdout=-1)
    try:
        assert other.stdout is not None
        other.stdout.readline()
        import psutil

        started = psutil.Process(other.pid).create_time()
        write_json(tmp_path / OWNER_FILE, {"pid": other.pid, "started": started})
        assert live_owner(tmp_path) == other.pid
        with pytest.raises(ConfigError, match=f"still running .process {other.pid}"):
            take_ownership(tmp_path)
        # the same pid with another start time is another process
        write_json(tmp_path / OWNER_FILE, {"pid": other.pid, "started": started - 100})
        assert live_owner(tmp_path) is None
        write_json(tmp_path / OWNER_FILE, {"pid": other.pid, "started": started})
    finally:
        other.kill()
        other.wait()
    assert live_owner(tmp_path) is None
    take_ownership(tmp_path)
    assert live_owner(tmp_path) == os.getpid()
    refuse_live_run(tmp_path)  # our own
    release_ownership(tmp_path)
    assert live_owner(tmp_path) is None


def test_a_damaged_owner_file_is_no_owner(tmp_path):
    (tmp_path / OWNER_FILE).write_text("{")
    assert live_owner(tmp_path) is None


# -- attempts and settings


def test_an_attempt_is_read_as_it_was_written(tmp_path):
    assert read_attempt(tmp_path) is None
    attempt = Attempt(2, "mlflow", "flow", "http://127.0.0.1:1", "m", "/x/checkpoint-5")
    write_attempt(tmp_path, attempt)
    assert read_attempt(tmp_path) == attempt
    (tmp_path / "attempt.json").write_text("{}")
    with pytest.raises(ConfigError, match="damaged"):
        read_attempt(tmp_path)


def test_resolve_makes_paths_absolute(tmp_path):
    (tmp_path / "policy").mkdir()
    (tmp_path / "rows.jsonl").write_text("{}")
    cfg = config(model={"path": "policy"}, data={"train": "rows.jsonl", "heldout": "a:b"})
    resolved = resolve(cfg, tmp_path / "run")
    assert resolved.model.path == str(tmp_path / "policy")
    assert resolved.data.train == str(tmp_path / "rows.jsonl")
    assert resolved.data.heldout == "a:b"
    assert resolved.run_dir == str(tmp_path / "run")
    assert cfg.model.path == "policy"  # the argument is left alone


@pytest.mark.parametrize(
    "change",
    [{"training": {"seed": 1}}, {"data": {"train": "a:c"}}, {"model": {"path": "another/model"}}],
)
def test_a_resume_may_not_change_what_the_ledger_counts(change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        check_same_run(config(), config(**change))


def test_a_resume_may_change_the_rest():
    check_same_run(config(), config(training={"learning_rate": 1.0, "max_steps": 5}, evaluation={"n": 1}))


# -- errors across processes


@pytest.mark.parametrize(
    "error",
    [DataError("no rows.", "Give some."), WeightSyncError("lm_head differs."), RunInterrupted("stop", "resume")],
)
def test_our_errors_arrive_with_their_type(tmp_path, error):
    write_error(tmp_path, error)
    again = read_error(tmp_path, 1, [])
    assert type(again) is type(error) and str(again) == str(error) and again.exit_code == error.exit_code
    clear_error(tmp_path)
    assert isinstance(read_error(tmp_path, 1, []), TrainerFailed)


def test_other_errors_arrive_with_their_name_and_traceback(tmp_path):
    try:
        raise KeyError("weights")
    except KeyError as error:
        write_error(tmp_path, error)
    again = read_error(tmp_path, 1, [])
    assert isinstance(again, TrainerFailed) and "KeyError" in str(again) and "weights" in str(again)
    assert "Traceback" in again.__notes__[0]


def test_a_child_that_left_no_error_is_described(tmp_path):
    message = str(read_error(tmp_path, -9, ["loading", "", "half of it"]))
    assert "killed by signal 9" in message and "half of it" in message and "memory" in message


# -- progress


def test_progress_is_read_as_it_was_written(tmp_path):
    assert read_progress(tmp_path) is None
    progress = Progress("training", 3, 10, 0.25, 1200.4, 1.5)
    write_progress(tmp_path, progress)
    assert read_progress(tmp_path) == progress
    assert progress.line() == "step 3/10 | reward 0.250 | 1,200 tokens/s | staleness 1.5"
    assert Progress("training", 3).line() == "step 3"
    assert Progress("loading").line() == "loading"


def test_a_terminal_gets_one_live_line():
    stream = io.StringIO()
    console = Console(stream, live=True)
    for step in (1, 2, 2):
        console.progress(Progress("training", step, 9))
    console.say("done")
    assert stream.getvalue() == "\r\x1b[2Kstep 1/9\r\x1b[2Kstep 2/9\ndone\n"


def test_a_file_gets_a_line_every_few_steps():
    stream = io.StringIO()
    console = Console(stream, live=False)
    console.status("starting vLLM, 5 s")
    console.status("starting vLLM, 10 s")  # the same phase, moments later
    for step in range(1, 13):
        console.progress(Progress("training", step, 12))
    shown = stream.getvalue().split("\n")
    assert shown == ["starting vLLM, 5 s", "step 1/12", "step 6/12", "step 11/12", "step 12/12", ""]


def test_a_closed_pipe_does_not_end_the_run():
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    console = Console(Closed(), live=False)
    console.say("one")
    console.say("two")
    assert console._stream.name == os.devnull


def test_json_files_are_replaced_whole(tmp_path):
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]
