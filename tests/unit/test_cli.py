"""The command line: exit codes, and one paragraph for every bad input (issue 1, point 10).

The commands run in this process; what they are given is wrong before any server or trainer starts.
"""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from asyncgrpo_core.errors import RunInterrupted
from asyncgrpo_core.launch import cli, session
from asyncgrpo_core.launch.imports import resolve_model_path
from asyncgrpo_core.server.process import free_port

ROOT = Path(__file__).resolve().parents[2]
ROW = {"prompt": [{"role": "user", "content": "What is 2 plus 3?"}], "answer": "5"}
POLICY = "package://asyncgrpo_core.quickstart/policy"

REWARDS = """
def good(completions, **kwargs):
    return [0.0] * len(completions)

def one_for_all(completions, **kwargs):
    return [1.0]

def words(completions, **kwargs):
    return ["good"] * len(completions)

def nan(completions, **kwargs):
    return [float("nan")] * len(completions)

def raises(completions, **kwargs):
    raise RuntimeError("the judge is away")

unpicklable = lambda completions, **kwargs: [0.0] * len(completions)
"""


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """A folder with rows, rewards and a config, and no Prefect or MLflow configured."""
    for name in ("PREFECT_API_URL", "PREFECT_PROFILE", "PREFECT_PROFILES_PATH", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect-home"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    write_config()
    root = logging.getLogger()
    before = list(root.handlers), root.level
    yield tmp_path
    for handler in [h for h in root.handlers if h not in before[0]]:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(before[1])
    logging.captureWarnings(False)
    sys.modules.pop("my_rewards", None)


def write_config(**sections) -> None:
    config = {
        "name": "t",
        "model": {"path": POLICY},
        "data": {"train": "rows.jsonl", "heldout": "rows.jsonl"},
        "rewards": ["my_rewards:good"],
        "training": {"max_steps": 2, "max_completion_length": 8},
    }
    Path("run.yaml").write_text(yaml.safe_dump(config | sections))


def run(capsys, *argv: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    code = cli.main(list(argv))
    out, err = capsys.readouterr()
    return code, out, err


def bad(capsys, *argv: str, code: int = 2) -> str:
    """The one-paragraph error of a command that fails."""
    got, _, err = run(capsys, *argv)
    assert got == code, err
    assert len(err.strip().splitlines()) == 1, err
    assert "Traceback" not in err
    return err


@pytest.fixture
def no_servers(monkeypatch):
    """These commands must fail before they start anything."""

    def refuse(*args, **kwargs):
        raise AssertionError("a server was started")

    monkeypatch.setattr(session, "start_embedded", refuse)


# -- arguments


@pytest.mark.parametrize("argv", [[], ["dance"], ["train"], ["train", "run.yaml", "--nonsense"], ["serve"]])
def test_bad_arguments_end_with_2(capsys, argv):
    assert run(capsys, *argv)[0] == 2


def test_help_ends_with_0_and_names_the_commands(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for command in ("quickstart", "train", "serve", "doctor"):
        assert command in out


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from asyncgrpo_core.launch.cli import main; main(['--help']); "
        "print(sorted({'pydantic', 'yaml', 'torch', 'prefect', 'numpy'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert out.stdout.strip().endswith("[]"), out.stderr


# -- the config


@pytest.mark.usefixtures("no_servers")
@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("training.learning_rat=1.0", ["training.learning_rat", "training.learning_rate"]),  # unknown key
        ("sever.port=5", ["`sever`", "`server`"]),
        ("training.max_steps=ten", ["training.max_steps", "'ten'", "integer"]),  # wrong type
        ("training.num_generations=1", ["training.num_generations", "2"]),
        ("model.path=./nowhere", ["model.path", "./nowhere"]),
        ("training.weight_sync_backend=nccl", ["nccl"]),
    ],
)
@pytest.mark.parametrize("command", ["train", "doctor"])
def test_a_wrong_setting_ends_with_2(capsys, monkeypatch, command, override, parts):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    if command == "doctor" and parts[0] in ("model.path", "nccl"):
        code, out, _ = run(capsys, command, "run.yaml", "--set", override)
        assert code == 2 and all(part in out for part in parts)
        return
    err = bad(capsys, command, "run.yaml", "--set", override)
    for part in parts:
        assert part in err
    assert not list(Path().glob("runs/*"))


@pytest.mark.usefixtures("no_servers")
def test_a_missing_config_ends_with_2(capsys):
    assert "nowhere.yaml" in bad(capsys, "train", "nowhere.yaml")


@pytest.mark.usefixtures("no_servers")
def test_a_model_folder_without_tokenizer_ends_with_2(capsys, tmp_path):
    policy = Path(resolve_model_path(POLICY))
    folder = tmp_path / "no-tokenizer"
    folder.mkdir()
    (folder / "config.json").write_text((policy / "config.json").read_text())
    err = bad(capsys, "train", "run.yaml", "--set", f"model.path={folder}")
    assert "has no tokenizer" in err and str(folder) in err and "save_pretrained" in err


@pytest.mark.usefixtures("no_servers")
def test_resume_without_a_run_ends_with_2(capsys):
    assert "no run to resume" in bad(capsys, "train", "run.yaml", "--resume")


@pytest.mark.usefixtures("no_servers")
def test_a_used_run_folder_ends_with_2(capsys):
    Path("used").mkdir()
    Path("used/config.resolved.json").write_text("{}")
    assert "already holds a run" in bad(capsys, "train", "run.yaml", "--run-dir", "used")


# -- what the config names; found while Prefect's server would be starting


@pytest.fixture
def idle_prefect(monkeypatch, tmp_path):
    """In place of the embedded server: something that only counts its stops."""
    stops = []

    class Idle:
        api_url, home = "http://127.0.0.1:1/api", tmp_path

        def stop(self):
            stops.append(1)

    monkeypatch.setattr(session, "start_embedded", lambda run_dir: Idle())
    return stops


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        ({"question": "x"}, ["no column 'prompt'", "question"]),
        ({"prompt": "What is 2 plus 3?"}, ["What is 2 plus 3?", "role"]),
    ],
)
def test_rows_of_the_wrong_shape_end_with_2(capsys, idle_prefect, row, parts):
    Path("rows.jsonl").write_text(json.dumps(row) + "\n")
    err = bad(capsys, "train", "run.yaml", "--run-dir", "out")
    for part in parts:
        assert part in err
    assert idle_prefect == [1]


@pytest.mark.parametrize(
    ("reward", "part"),
    [
        ("my_rewards:unpicklable", "top level of a module"),
        ("my_rewards:goood", "my_rewards:good"),
        ("no_module:f", "no module 'no_module'"),
    ],
)
def test_a_reward_that_cannot_be_used_ends_with_2(capsys, idle_prefect, reward, part):
    err = bad(capsys, "train", "run.yaml", "--run-dir", "out", "--set", f"rewards=['{reward}']")
    assert part in err
    assert idle_prefect == [1]
    assert "Traceback" in Path("out/logs/flow.log").read_text()


# -- trackers


@pytest.mark.usefixtures("no_servers")
def test_an_unreachable_mlflow_ends_with_1_in_seconds(capsys):
    uri = f"http://127.0.0.1:{free_port()}"
    began = time.monotonic()
    err = bad(capsys, "train", "run.yaml", "--set", f"tracking.uri={uri}", code=1)
    assert uri in err and "MLflow" in err
    assert time.monotonic() - began < 20


@pytest.mark.usefixtures("no_servers")
def test_an_unreachable_prefect_ends_with_1_in_seconds(capsys, monkeypatch):
    url = f"http://127.0.0.1:{free_port()}/api"
    monkeypatch.setenv("PREFECT_API_URL", url)
    began = time.monotonic()
    err = bad(capsys, "train", "run.yaml", "--run-dir", "out", code=1)
    assert url in err and "PREFECT_API_URL" in err
    assert time.monotonic() - began < 20


# -- how commands end


def test_an_interrupt_ends_with_130(capsys, monkeypatch):
    def interrupted(cfg):
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "run_training", interrupted)
    assert run(capsys, "train", "run.yaml")[0] == 130
    monkeypatch.setattr(session, "run_training", lambda cfg: (_ for _ in ()).throw(RunInterrupted("SIGTERM")))
    code, _, err = run(capsys, "train", "run.yaml")
    assert code == 130 and "SIGTERM" in err


def test_the_arguments_reach_the_run(capsys, monkeypatch):
    seen = []
    monkeypatch.setattr(session, "run_training", lambda cfg: seen.append(cfg) or 0)
    assert run(capsys, "quickstart", "--run-dir", "d", "--set", "training.max_steps=3")[0] == 0
    assert (seen[0].name, seen[0].run_dir, seen[0].training.max_steps) == ("quickstart", "d", 3)
    assert run(capsys, "train", "run.yaml", "--resume")[0] == 0
    assert seen[1].resume is True and seen[1].run_dir is None


def test_serve_refuses_a_server_that_runs_already(capsys):
    assert "runs already" in bad(capsys, "serve", "run.yaml", "--set", "server.url=http://127.0.0.1:1")


def test_serve_with_a_taken_port_ends_with_1(capsys):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        err = bad(capsys, "serve", "run.yaml", "--run-dir", "s", "--set", f"server.port={port}", code=1)
    assert str(port) in err
    assert not Path("s/owner.json").exists()


# -- doctor


def table(out: str) -> dict[str, str]:
    """Check -> its line."""
    found = (re.match(r"(?:ok|warn|fail) +(.+?) {2,}", line) for line in out.splitlines())
    return {match.group(1): match.string for match in found if match}


def test_doctor_finds_nothing_wrong_with_a_good_config(capsys):
    code, out, _ = run(capsys, "doctor", "run.yaml")
    assert code == 0, out
    lines = table(out)
    for check in ("config", "training", "data.train", "rewards.0 called once", "tokenizer", "chat template", "disk"):
        assert lines[check].startswith("ok"), out


@pytest.mark.parametrize(
    ("reward", "part"),
    [
        ("one_for_all", "1 rewards for 3 completions"),
        ("words", "'good', which is no number"),
        ("nan", "returned nan"),
        ("raises", "the judge is away"),
        ("unpicklable", "top level of a module"),
    ],
)
def test_doctor_names_a_reward_that_breaks_its_contract(capsys, reward, part):
    code, out, _ = run(capsys, "doctor", "run.yaml", "--set", f"rewards=['my_rewards:{reward}']")
    assert code == 2
    line = table(out)["rewards.0 called once"]
    assert line.startswith("fail") and part in line


def test_doctor_makes_every_check_although_one_fails(capsys):
    Path("rows.jsonl").write_text(json.dumps({"prompt": "text"}) + "\n")
    code, out, _ = run(
        capsys, "doctor", "run.yaml", "--set", "rewards=['my_rewards:goood']", "--set", "model.path=./nowhere"
    )
    lines = table(out)
    assert code == 2
    for check in ("data.train", "rewards.0 import", "model.path"):
        assert lines[check].startswith("fail")
    assert lines["disk"].startswith("ok")
    assert "4 failed" in out  # the held-out rows are the same file


def test_doctor_sees_prompts_that_do_not_fit(capsys):
    code, out, _ = run(capsys, "doctor", "run.yaml", "--set", "server.max_model_len=20")
    assert code == 2 and "server.max_model_len 20" in table(out)["length"]


def test_doctor_asks_the_trackers_and_the_server(capsys, monkeypatch):
    port = free_port()
    monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{port}/api")
    monkeypatch.setattr("asyncgrpo_core.launch.doctor.SERVER_WAIT_S", 0.5)
    code, out, _ = run(
        capsys,
        "doctor",
        "run.yaml",
        "--set",
        f"tracking.uri=http://127.0.0.1:{port}",
        "--set",
        f"server.url=http://127.0.0.1:{port}",
    )
    lines = table(out)
    assert code == 2
    for check in ("MLflow", "Prefect", "server settings"):
        assert lines[check].startswith("fail") and str(port) in lines[check]


def test_doctor_sees_a_taken_port(capsys):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, out, _ = run(capsys, "doctor", "run.yaml", "--set", f"server.port={port}")
    assert code == 2 and str(port) in table(out)["server.port"]
