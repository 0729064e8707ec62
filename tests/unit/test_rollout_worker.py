"""RolloutWorker: the spawned process, from the trainer's side. Each start costs an interpreter start."""

from __future__ import annotations

import functools
import inspect
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from asyncgrpo_core.errors import RewardError, RolloutError
from asyncgrpo_core.rollout.buffer import SampleBuffer
from asyncgrpo_core.rollout.worker import RolloutWorker
from tests.unit import worker_parts
from tests.unit.fakes import EOS_ID, FakeTokenizer, ThreadedFakeVLLM
from tests.unit.rollout_run import ROWS, config_of

STARTED: list[RolloutWorker] = []
START_S = 60.0


@pytest.fixture(autouse=True)
def stop_workers() -> Iterator[None]:
    yield
    while STARTED:
        STARTED.pop().stop(timeout_s=5.0)


@pytest.fixture(scope="module")
def server() -> Iterator[ThreadedFakeVLLM]:
    with ThreadedFakeVLLM() as running:
        yield running


def worker_of(server, folder: Path, reward=worker_parts.index_reward, *, config=None, **more) -> RolloutWorker:
    arguments = {
        "config": config_of(server, **(config or {})),
        "model_name": "policy",
        "dataset": ROWS,
        "reward_funcs": [reward],
        "processing_class": FakeTokenizer(),
        "eos_token_ids": [EOS_ID],
        "buffer": SampleBuffer(folder / "buffer"),
        "initial_allowance": 2000,
        "log_path": folder / "rollout.log",
        **more,
    }
    worker = RolloutWorker(**arguments)
    STARTED.append(worker)
    return worker


def wait_for(condition, timeout_s: float = START_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "no such state in time"
        time.sleep(0.02)


def error_of(worker: RolloutWorker) -> BaseException:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            worker.check()
        except BaseException as error:
            return error
        time.sleep(0.02)
    raise AssertionError("the worker did not fail in time")


def test_groups_version_counters_and_stop(server, tmp_path) -> None:
    worker = worker_of(server, tmp_path, initial_version=4)
    worker.start()
    worker.wait_ready(START_S)
    buffer, records = worker._buffer, []
    wait_for(lambda: records.extend(buffer.take()) or sum(bool(r.samples) for r in records) >= 3)
    assert {r.model_version for r in records if r.samples} == {4}
    assert worker.generated_tokens() >= sum(s.sequence.num_trained for r in records for s in r.samples) > 0
    worker.set_version(5)
    worker.set_allowance(10**6)
    wait_for(lambda: records.extend(buffer.take()) or any(r.model_version == 5 and r.samples for r in records))
    pid = worker.pid
    worker.stop()
    assert not psutil.pid_exists(pid) and worker.in_flight() == 0
    worker.stop()  # again is fine


def test_the_worker_is_another_process_and_sees_no_gpu(server, tmp_path, monkeypatch) -> None:
    """F150."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("TEST_TRAINER_PID", str(os.getpid()))
    worker = worker_of(server, tmp_path, worker_parts.device_reward)
    worker.start()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
    records: list = []
    wait_for(lambda: records.extend(worker._buffer.take()) or worker.check() or any(r.samples for r in records))
    assert max(s.reward for r in records for s in r.samples) == 1.0


def test_reward_that_breaks_its_contract_reaches_the_trainer_as_it_is(server, tmp_path) -> None:
    """F149."""
    worker = worker_of(server, tmp_path, worker_parts.short_reward)
    worker.start()
    error = error_of(worker)
    assert isinstance(error, RewardError) and "'short_reward' returned 1 rewards for 4 completions" in str(error)
    with pytest.raises(RewardError):
        worker.check()  # for ever


def test_exception_of_a_reward_reaches_the_trainer_with_its_traceback(server, tmp_path) -> None:
    worker = worker_of(server, tmp_path, worker_parts.raising_reward)
    worker.start()
    text = str(error_of(worker))
    assert "division by zero in the reward" in text and "worker_parts.py" in text and "raising_reward" in text


def test_worker_that_dies_is_reported_with_its_exit_code(server, tmp_path) -> None:
    worker = worker_of(server, tmp_path, worker_parts.exiting_reward)
    worker.start()
    error = error_of(worker)
    assert isinstance(error, RolloutError) and "dead (exit code 7)" in str(error) and "rollout.log" in str(error)


def test_killed_worker_is_reported(server, tmp_path) -> None:
    worker = worker_of(server, tmp_path)
    worker.start()
    worker.wait_ready(START_S)
    os.kill(worker.pid, signal.SIGKILL)
    assert "exit code -9" in str(error_of(worker))


def test_no_heartbeat_means_hung(server, tmp_path) -> None:
    """F213: a hook that blocks the event loop, and a stopped process."""
    blocked = worker_of(
        server, tmp_path / "a", loop_cls=worker_parts.BlockingLoop, config={"rollout_worker_timeout": 1.0}
    )
    stopped = worker_of(server, tmp_path / "b", config={"rollout_worker_timeout": 1.0})
    for worker in (blocked, stopped):
        worker._config.rollout_worker_timeout = START_S  # while it starts
        worker.start()
        worker.wait_ready(START_S)
        worker._config.rollout_worker_timeout = 1.0
    os.kill(stopped.pid, signal.SIGSTOP)
    for worker in (blocked, stopped):
        assert "hangs: its last heartbeat" in str(error_of(worker))
        pid = worker.pid
        worker.stop(timeout_s=0.2)
        assert not psutil.pid_exists(pid)


def test_what_cannot_be_pickled_is_named(server, tmp_path) -> None:
    """F150: TypeError at the start, before any process exists."""
    threshold = 3

    def closure(completions, **_):
        return [threshold] * len(completions)

    for reward, name in ((lambda completions, **_: [0.0], "lambda"), (closure, "closure")):
        worker = worker_of(server, tmp_path, reward)
        with pytest.raises(TypeError, match=f"reward function '{name}'.*module-level"):
            worker.start()
        assert worker.pid is None
    for more, name in (
        ({"tools": [lambda x: x]}, "tool '<lambda>'"),
        ({"environment_factory": lambda: None}, "environment_factory"),
        ({"environment_factory": {"count": lambda: None}}, r"environment_factory\['count'\]"),
    ):
        with pytest.raises(TypeError, match=f"{name}.*module-level"):
            worker_of(server, tmp_path, **more).start()
    worker = worker_of(server, tmp_path, processing_class=threading.Lock())
    with pytest.raises(TypeError, match="processing_class"):
        worker.start()


def test_what_can_be_pickled(server, tmp_path) -> None:
    """F150: a partial and a callable object."""
    rewards = [functools.partial(worker_parts.scaled, scale=2.0), worker_parts.Judge()]
    worker = worker_of(server, tmp_path, reward_funcs=rewards)
    worker.start()
    records: list = []
    wait_for(lambda: records.extend(worker._buffer.take()) or worker.check() or any(r.samples for r in records))
    assert sorted(s.reward for s in next(r for r in records if r.samples).samples) == [0.0, 3.0, 6.0, 9.0]


def test_unreachable_server_is_an_error_with_its_url(tmp_path, monkeypatch) -> None:
    """F001."""
    from asyncgrpo_core.server.generation import GenerationClient

    parameter = inspect.signature(GenerationClient).parameters["max_retries"].default
    assert parameter <= 8  # a wrong URL is told within a minute or two, not after vllm_server_timeout
    worker = worker_of(None, tmp_path, loop_cls=worker_parts.ImpatientLoop)
    worker.start()
    assert "http://127.0.0.1:1/openapi.json" in str(error_of(worker))


def test_check_before_start_says_so(server, tmp_path) -> None:
    with pytest.raises(RolloutError, match="not started"):
        worker_of(server, tmp_path).check()


SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.unit.test_rollout_worker import worker_of, error_of, ROWS
from tests.unit.fakes import ThreadedFakeVLLM

{guard}
    with ThreadedFakeVLLM() as server:
        worker = worker_of(server, Path({folder!r}))
        worker.start()
        {then}
"""


def run_script(folder: Path, *, guard: str, then: str, **popen) -> subprocess.Popen:
    root = str(Path(__file__).parents[2])
    path = folder / "script.py"
    path.write_text(textwrap.dedent(SCRIPT).format(root=root, folder=str(folder), guard=guard, then=then))
    return subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, text=True, **popen)


def test_script_without_a_main_guard_gets_a_named_error_and_no_process_storm(tmp_path) -> None:
    """F014."""
    process = run_script(tmp_path, guard="if True:", then="print('ERROR', error_of(worker)); worker.stop()")
    out, _ = process.communicate(timeout=120)
    assert "ERROR" in out and '__name__ == "__main__"' in out


def test_worker_and_its_children_end_when_the_trainer_is_killed(tmp_path) -> None:
    process = run_script(
        tmp_path,
        guard='if __name__ == "__main__":',
        then="worker.wait_ready(60); print(worker.pid, flush=True); import time; time.sleep(300)",
    )
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert psutil.pid_exists(pid)
    process.kill()
    process.wait()
    wait_for(lambda: not psutil.pid_exists(pid), 10.0)


def test_spawn_is_used_whatever_the_platforms_default(server, tmp_path) -> None:
    worker = worker_of(server, tmp_path)
    assert worker._context.get_start_method() == "spawn"
    assert multiprocessing.get_start_method(allow_none=True) in (None, "fork", "spawn", "forkserver")
