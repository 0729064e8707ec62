"""Several trainer processes as the launcher starts them: devices, torchrun, logs, and whose error is told (F005)."""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from typing import Any

import pytest

from asyncgrpo_core.errors import AsyncGRPOError, ConfigError, RankLostError, ServerError
from asyncgrpo_core.launch import placement
from asyncgrpo_core.launch.failure import clear_error, read_error, write_error
from asyncgrpo_core.launch.loading import parse_config
from asyncgrpo_core.launch.placement import Placement, num_ranks, place, rank_of_this_process, trainer_threads
from asyncgrpo_core.launch.run_folder import make_run_dir, write_json
from asyncgrpo_core.launch.trainer_main import main
from asyncgrpo_core.launch.trainer_process import trainer_command, trainer_environment


def config(*overrides: str):
    data: dict[str, Any] = {"model": {"path": "some/model"}, "data": {"train": "a:b"}, "rewards": ["a:b"]}
    return parse_config(data, list(overrides), source="x")


@pytest.mark.parametrize(
    ("gpus", "overrides", "wanted"),
    [
        ([0, 1, 2, 3], ["resources.trainer_devices=[0,1]"], Placement("cuda", (0, 1), (2, 3), "nccl", 2)),
        ([0, 1, 2, 3], ["resources.trainer_ranks=3"], Placement("cuda", (0, 1, 2), (3,), "nccl", 3)),
        ([0, 1], ["resources.trainer_ranks=2"], Placement("cuda", (0, 1), (0,), "ipc", 2)),
        ([], ["resources.trainer_ranks=2"], Placement("cpu", (), (), "shm", 2)),
        ([0, 1], [], Placement("cuda", (0,), (1,), "nccl", 1)),
    ],
)
def test_a_trainer_process_for_every_device(monkeypatch, gpus, overrides, wanted):
    monkeypatch.setattr(placement, "visible_gpus", lambda: gpus)
    assert place(config(*overrides)) == wanted


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (
            ["resources.trainer_devices=[0,1]", "resources.trainer_ranks=3"],
            "trainer_ranks = 3, and there are 2 devices",
        ),
        (["resources.trainer_ranks=9"], "trainer_ranks = 9, and there are 4 devices"),
        (["resources.trainer_devices=[1,1]"], "names a device twice"),
        (["resources.trainer_devices=[0,1]", "resources.server_devices=[1]"], "first device, 0, .* is on [1]"),
    ],
)
def test_ranks_that_do_not_fit_the_devices_are_refused(monkeypatch, overrides, part):
    monkeypatch.setattr(placement, "visible_gpus", lambda: [0, 1, 2, 3])
    with pytest.raises(ConfigError) as caught:
        place(config(*overrides))
    assert all(piece in str(caught.value) for piece in part.split(" .* "))


def test_torchrun_is_used_for_several_ranks_only(tmp_path):
    one = trainer_command(tmp_path, Placement("cpu", (), (), "shm"))
    assert one == [sys.executable, "-m", "asyncgrpo_core.launch.trainer_main", str(tmp_path / "config.resolved.json")]
    two = trainer_command(tmp_path, Placement("cuda", (0, 1), (2,), "nccl", 2))
    assert two[:4] == [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    assert two[two.index("--nproc-per-node") + 1] == "2" and two[-3:] == one[-3:]


def test_ranks_share_the_cores_and_get_the_grace_to_save(monkeypatch):
    monkeypatch.setattr(placement, "cpu_count", lambda: 16)
    assert trainer_threads(config().resources) == 8 and trainer_threads(config().resources, 4) == 2
    env = trainer_environment(config("resources.stop_grace_s=90.5"), Placement("cuda", (0, 3), (1,), "nccl", 2))
    assert env["OMP_NUM_THREADS"] == "4" and env["CUDA_VISIBLE_DEVICES"] == "0,3"
    assert env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "91"


def test_what_torchrun_says_about_this_process(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert (rank_of_this_process(), num_ranks()) == (0, 1)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert (rank_of_this_process(), num_ranks()) == (3, 4)


@pytest.mark.parametrize(
    ("overrides", "ranks", "wanted"),
    [
        ([], "2", True),
        ([], "1", None),
        (["resources.sharding=ddp"], "2", None),
        (["training.fsdp=full_shard"], "2", "full_shard"),
    ],
)
def test_fsdp_is_the_default_of_several_ranks(monkeypatch, tmp_path, overrides, ranks, wanted):
    from asyncgrpo_core.launch import build
    from asyncgrpo_core.launch.run_folder import Attempt

    seen = {}
    monkeypatch.setenv("WORLD_SIZE", ranks)
    monkeypatch.setattr(build, "training_args", lambda section, **more: seen.update(section.explicit() | more))
    monkeypatch.setattr("asyncgrpo_core.training.trainer.AsyncGRPOTrainer", lambda **_kwargs: None)
    attempt = Attempt.__new__(Attempt)
    for name, value in {"server_url": "http://x", "served_model_name": None, "attempt": 1}.items():
        object.__setattr__(attempt, name, value)
    build.build_trainer(config(*overrides), tmp_path, attempt, build.Inputs(None, [], []), [])
    assert seen.get("fsdp") == wanted


def test_the_first_error_of_the_ranks_is_told(tmp_path):
    """Rank 1 fails; rank 0 then finds its collective broken."""
    write_error(tmp_path, ZeroDivisionError("bug of rank 1"), rank=1)
    time.sleep(0.01)
    write_error(tmp_path, RuntimeError("connection closed by peer"))
    error = read_error(tmp_path, 1, [])
    assert "failed on rank 1 with ZeroDivisionError: bug of rank 1" in str(error) and "trainer-1.log" in str(error)
    clear_error(tmp_path)
    assert not list(tmp_path.glob("error*"))
    write_error(tmp_path, ServerError("away", "start it"))
    time.sleep(0.01)
    write_error(tmp_path, RuntimeError("connection closed by peer"), rank=1)
    assert str(read_error(tmp_path, 1, [])) == "away start it"


def test_a_lost_connection_is_told_only_when_nothing_else_is_known(tmp_path):
    write_error(tmp_path, RankLostError("rank 1 is lost"))
    assert isinstance(read_error(tmp_path, 1, []), RankLostError)
    time.sleep(0.01)
    write_error(tmp_path, MemoryError("no memory"), rank=1)
    assert "MemoryError" in str(read_error(tmp_path, 1, []))
    assert str(pickle.loads(pickle.dumps(RankLostError("a", "b")))) == "a b"


class UserError(AsyncGRPOError):
    def __init__(self, left: int, right: int, where: str) -> None:
        super().__init__(f"{left} is not {right} in {where}.")


def test_an_error_that_does_not_survive_the_way_is_told_in_words(tmp_path, monkeypatch):
    class Local(ServerError):
        pass

    write_error(tmp_path, Local("cannot be pickled"))
    assert "failed with Local: cannot be pickled" in str(read_error(tmp_path, 1, []))
    write_error(tmp_path, UserError(1, 2, "row 3"))  # is made of other arguments than pickle gives it
    assert "failed with UserError: 1 is not 2 in row 3." in str(read_error(tmp_path, 1, []))
    write_error(tmp_path, ServerErrorOfAModule("away"))
    monkeypatch.delattr(sys.modules[__name__], "ServerErrorOfAModule")  # as in a process without that module
    assert "failed with ServerErrorOfAModule: away" in str(read_error(tmp_path, 1, []))


class ServerErrorOfAModule(ServerError):
    pass


def test_the_error_is_written_before_the_tracker_is_closed(tmp_path, monkeypatch):
    """torchrun kills rank 0 a while after another rank has ended, and the last uploads may take longer."""
    from asyncgrpo_core.launch import build, trainer_main, trainer_tracking

    seen = []

    class Tracking:
        callback = None

        def __init__(self, *_args):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_exc):
            seen.append(str(read_error(tmp_path, 1, [])))

    def broken(*_args):
        raise ServerError("away", "start it")

    monkeypatch.setattr(trainer_tracking, "Tracking", Tracking)
    monkeypatch.setattr(build, "build_trainer", broken)
    inputs = build.Inputs(None, [], [])
    with pytest.raises(ServerError):
        trainer_main._train_and_tell(config(), tmp_path, None, inputs, None)
    assert seen == ["away start it"]


def test_another_rank_has_its_own_log_and_leaves_rank_zeros_error_alone(monkeypatch, tmp_path):
    make_run_dir(tmp_path)
    write_json(tmp_path / "config.resolved.json", {"name": "t"})  # no model: refused
    write_error(tmp_path, ServerError("of rank 0"))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    pid = os.fork()  # its standard output is taken over for good
    if pid == 0:
        os._exit(main([str(tmp_path / "config.resolved.json")]))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2
    assert "ConfigError" in (tmp_path / "logs" / "trainer-1.log").read_text()
    assert json.loads((tmp_path / "error-1.json").read_text())["rank"] == 1
    assert json.loads((tmp_path / "error.json").read_text())["message"] == "of rank 0"
    assert not (tmp_path / "progress.json").exists()
