"""Devices, threads and the server's command, decided without torch."""

from __future__ import annotations

import os
import socket
import sys
import time
from typing import Any

import pytest

from asyncgrpo_core.errors import ConfigError, DataError, ServerError
from asyncgrpo_core.launch import placement
from asyncgrpo_core.launch.loading import parse_config
from asyncgrpo_core.launch.placement import Placement, place, trainer_threads
from asyncgrpo_core.launch.trainer_process import trainer_environment
from asyncgrpo_core.launch.vllm_server import ServerSlot, plan_server, served_model_name, server_needs

CPU = Placement("cpu", (), (), "shm")


def config(overrides: list[str] | None = None):
    data: dict[str, Any] = {"model": {"path": "some/model"}, "data": {"train": "a:b"}, "rewards": ["a:b"]}
    return parse_config(data, overrides, source="x")


@pytest.mark.parametrize(
    ("gpus", "overrides", "wanted"),
    [
        ([], [], CPU),
        ([0], [], Placement("cuda", (0,), (0,), "ipc")),
        ([0, 1, 2], [], Placement("cuda", (0,), (1, 2), "nccl")),
        ([0, 1, 2], ["resources.server_devices=[0]"], Placement("cuda", (0,), (0,), "ipc")),
        ([0, 1], ["resources.trainer_devices=[1]"], Placement("cuda", (1,), (0,), "nccl")),
        ([0, 1], ["training.use_cpu=true"], CPU),
    ],
)
def test_where_trainer_and_server_compute(monkeypatch, gpus, overrides, wanted):
    monkeypatch.setattr(placement, "visible_gpus", lambda: gpus)
    assert place(config(overrides)) == wanted


@pytest.mark.parametrize(
    ("gpus", "override", "part"),
    [
        ([], "resources.trainer_devices=[0]", "there is none here"),
        ([], "training.weight_sync_backend=nccl", "needs GPUs"),
        ([0], "training.weight_sync_backend=nccl", "different GPUs"),
        ([0, 1], "resources.server_devices=[5]", "[5]"),
    ],
)
def test_devices_that_do_not_fit_are_refused(monkeypatch, gpus, override, part):
    monkeypatch.setattr(placement, "visible_gpus", lambda: gpus)
    with pytest.raises(ConfigError) as caught:
        place(config([override]))
    assert part in str(caught.value)


def test_cuda_visible_devices_limits_what_is_seen(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert placement.visible_gpus() == [2, 3]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert placement.visible_gpus() == []


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (4, 2), (16, 8)])
def test_threads_of_the_trainer(monkeypatch, cores, threads):
    monkeypatch.setattr(placement, "cpu_count", lambda: cores)
    assert trainer_threads(config().resources) == threads
    assert trainer_threads(config(["resources.omp_threads=3"]).resources) == 3


def test_the_trainer_sees_its_devices_and_the_working_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    env = trainer_environment(config(["resources.omp_threads=3"]), Placement("cuda", (1,), (0,), "nccl"))
    assert env["CUDA_VISIBLE_DEVICES"] == "1" and env["OMP_NUM_THREADS"] == "3"
    assert env["PYTHONPATH"].split(os.pathsep) == [str(tmp_path), "/somewhere"]


def test_the_server_gets_what_the_rest_of_the_config_needs():
    overrides = ["training.num_sampler_logprobs=30", "training.max_staleness=2", "server.max_model_len=64"]
    overrides += ["training.max_completion_length=32"]
    cfg = config([*overrides, "training.seed=9", "training.max_concurrent_rollouts=17"])
    needs = server_needs(cfg, CPU, 5555)
    assert (needs.model_path, needs.served_model_name) == ("some/model", "some/model")
    assert (needs.num_sampler_logprobs, needs.max_model_len, needs.seed, needs.port) == (30, 64, 9, 5555)
    assert (needs.max_concurrent_rollouts, needs.max_staleness, needs.backend) == (17, 2, "shm")
    assert served_model_name(config(["model.served_model_name=policy"])) == "policy"


def test_the_server_s_command_follows_the_model():
    command = plan_server(config(["server.port=5555", "model.revision=abc", "training.trust_remote_code=true"]), CPU)
    assert command is not None and command.base_url == "http://127.0.0.1:5555"
    assert "--trust-remote-code" in command.argv
    assert command.argv[command.argv.index("--revision") + 1] == "abc"
    cuda = plan_server(config(), Placement("cuda", (0,), (1, 2), "nccl"))
    assert cuda is not None and cuda.env["CUDA_VISIBLE_DEVICES"] == "1,2"


def test_an_existing_server_is_not_started():
    assert plan_server(config(["server.url=http://a:1"]), CPU) is None


def test_a_taken_port_is_a_server_error(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = plan_server(config([f"server.port={port}"]), CPU)
        assert command is not None
        slot = ServerSlot(command, command.base_url)
        with pytest.raises(ServerError) as caught:
            slot.start(tmp_path, 30.0, lambda line: None)
    assert str(port) in str(caught.value) and "server.port" in str(caught.value) and caught.value.exit_code == 1
    slot.stop()


def fake_python(tmp_path, body: str) -> str:
    """An interpreter that ignores vLLM's arguments and does something else."""
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\nimport sys, time\n{body}\n")
    script.chmod(0o755)
    return str(script)


def test_a_server_that_dies_while_starting_says_why(tmp_path):
    python = fake_python(tmp_path, "print('ValueError: unsupported architecture'); sys.exit(7)")
    command = plan_server(config([f"server.python={python}"]), CPU)
    assert command is not None
    slot = ServerSlot(command, command.base_url)
    with pytest.raises(ServerError) as caught:
        slot.start(tmp_path, 30.0, lambda line: None)
    assert "exit code 7" in str(caught.value) and "unsupported architecture" in str(caught.value)
    assert "\n" not in str(caught.value)
    slot.stop()


def test_a_trainer_that_fails_meanwhile_ends_the_server_s_start(tmp_path):
    """`on_progress` raises the trainer's error; the server that was starting is gone by then."""
    python = fake_python(tmp_path, "time.sleep(60)")
    command = plan_server(config([f"server.python={python}"]), CPU)
    assert command is not None
    slot = ServerSlot(command, command.base_url)

    def on_progress(line: str) -> None:
        raise DataError("no rows.")

    began = time.monotonic()
    with pytest.raises(DataError):
        slot.start(tmp_path, 50.0, on_progress)
    assert time.monotonic() - began < 30
    assert not list((tmp_path / "guards").glob("*.json"))
