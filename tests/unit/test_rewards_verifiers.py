"""Checks in killable processes: deadlines, deaths, lifetime. F153."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncgrpo_core import rewards
from asyncgrpo_core.errors import ConfigError
from asyncgrpo_core.rewards import math_check, verifiers
from asyncgrpo_core.rewards.accuracy import _same_number

TOWER = r"\boxed{9^{9^{9^9}}}"  # sympy computes it in one C call that does not come back
DEADLINE_S = 2.0
JOBS = """
import os, signal, threading, time
FOLDER = {folder!r}
def load(): pass
def echo(request, stage):
    print("a library prints")
    return request
def fails(request, stage):
    stage("begun")
    raise RecursionError("too deep")
def waits(request, stage):
    stage("begun")
    open(os.path.join(FOLDER, str(os.getpid())), "w").close()
    time.sleep(600)
def deaf(request, stage):
    signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGTERM, signal.SIGINT}})
    waits(request, stage)
def dies(request, stage):
    os.kill(os.getpid(), signal.SIGKILL)
def limits(request, stage):
    import resource
    return [os.environ["CUDA_VISIBLE_DEVICES"], resource.getrlimit(resource.RLIMIT_AS)[0]]
def fills_memory(request, stage):
    return len(bytearray(1 << 40))
"""


def said(*texts: str) -> list:
    return [[{"role": "assistant", "content": text}] for text in texts]


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module `jobs_of_test` that new verifiers can import; what was running is ended before and after."""
    (tmp_path / "jobs_of_test.py").write_text(JOBS.format(folder=str(tmp_path)))
    monkeypatch.syspath_prepend(str(tmp_path))
    verifiers.close_verifiers()
    yield tmp_path
    verifiers.close_verifiers()


def run(name: str, *requests, timeout_s: float = DEADLINE_S) -> list[verifiers.Outcome]:
    return verifiers.run_checks(f"jobs_of_test:{name}", requests, timeout_s)


def test_a_pathological_answer_gets_zero_and_the_others_their_reward(caplog) -> None:
    """One sympy call that never returns: 0.0 after its own deadline, seven right rewards, a warning and a count."""
    late = rewards.verifier_counts().get("late", 0)
    texts = [rf"\boxed{{{n}/2}}" for n in range(1, 8)]
    with caplog.at_level(logging.WARNING):
        got = rewards.accuracy_reward(said(*texts[:3], TOWER, *texts[3:]), [r"\frac{3}{2}"] * 8, timeout_s=DEADLINE_S)
    assert got == [0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert rewards.verifier_counts()["late"] == late + 1
    assert any("9^{9^{9^9}}" in r.getMessage() and "more than 2 s" in r.getMessage() for r in caplog.records)
    assert rewards.accuracy_reward(said(*texts[2:4]), [r"\frac{3}{2}"] * 2) == [1.0, 0.0]  # by the successor


def test_a_solution_that_is_not_parsed_in_time_scores_nothing(caplog) -> None:
    """No reward can be right then: None, and the log names the solution. Depth makes the LaTeX parser explode."""
    deep = "$" + "(" * 300 + "1" + ")" * 300 + "$"
    with caplog.at_level(logging.WARNING):
        assert rewards.accuracy_reward(said(r"\boxed{2}"), [deep], timeout_s=0.5) == [None]
    assert "the solution '$((((" in caplog.text and "itself cannot be parsed (it took more than 0.5 s)" in caplog.text


def test_the_solution_is_parsed_before_the_answer(monkeypatch) -> None:
    """What tells the two cases apart: the stage is reported between the two."""
    seen: list = []
    assert math_check.check([r"\boxed{4}", "4"], lambda stage: seen.append((stage, "4"))) == 1.0

    def stuck(solution: str) -> tuple:
        raise ZeroDivisionError

    monkeypatch.setattr(math_check, "_gold", stuck)
    with pytest.raises(ZeroDivisionError):
        math_check.check([r"\boxed{4}", "4"], seen.append)
    assert seen == [("answer", "4")]


def test_the_deadline_of_the_module_setting_counts_when_none_is_given(jobs, monkeypatch) -> None:
    monkeypatch.setattr(rewards.verifier_settings, "timeout_s", 0.3)
    (outcome,) = verifiers.run_checks("jobs_of_test:waits", [None])
    assert (outcome.status, outcome.why) == ("late", "it took more than 0.3 s")
    with pytest.raises(ConfigError, match="deadline of a check is 0"):
        verifiers.run_checks("jobs_of_test:echo", [None], 0)


def test_outcomes(jobs: Path) -> None:
    big = "x" * 300_000  # more than a pipe holds, each way
    assert [o.value for o in run("echo", {"a": [1, None]}, big, "ü\n")] == [{"a": [1, None]}, big, "ü\n"]
    (error,) = run("fails", 1)
    assert (error.status, error.why, error.stage) == ("error", "RecursionError: too deep", "begun")
    (dead,) = run("dies", 1)
    assert (dead.status, dead.why) == ("died", "its process ended with code -9")
    assert run("echo", 2)[0].value == 2
    (late,) = run("deaf", 1)
    assert (late.status, late.stage) == ("late", "begun")
    (pid,) = (int(path.name) for path in jobs.iterdir() if path.name.isdigit())
    assert not psutil.pid_exists(pid)


def test_a_verifier_sees_no_gpu_and_cannot_take_all_memory(jobs: Path) -> None:
    devices, memory = run("limits", None)[0].value
    assert devices == "" and 0 < memory <= 8 << 30
    assert "MemoryError" in run("fills_memory", None)[0].why


def test_what_cannot_be_loaded_is_an_error_for_the_user(jobs: Path) -> None:
    (jobs / "jobs_of_test.py").write_text("def load():\n    import not_installed_anywhere\n")
    with pytest.raises(ConfigError, match="not_installed_anywhere"):
        run("echo", 1)


def test_a_successor_that_cannot_start_is_the_next_checks_error(jobs: Path, monkeypatch) -> None:
    """The thread that replaces a dead verifier lives on, or the check after it would wait for ever."""
    monkeypatch.setattr(rewards.verifier_settings, "processes", 1)
    assert run("echo", 1)[0].value == 1
    (jobs / "jobs_of_test.py").write_text("def load():\n    import not_installed_anywhere\n")
    assert run("dies", 1)[0].status == "died"
    for _ in range(2):
        with pytest.raises(ConfigError, match="not_installed_anywhere"):
            run("echo", 1)


def test_many_threads_share_a_few_processes(jobs: Path, monkeypatch) -> None:
    monkeypatch.setattr(rewards.verifier_settings, "processes", 2)
    started, got = rewards.verifier_counts().get("started", 0), {}

    def one(k: int) -> None:
        got[k] = [o.value for o in run("echo", *(100 * k + i for i in range(20)), timeout_s=60)]

    threads = [threading.Thread(target=one, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert got == {k: [100 * k + i for i in range(20)] for k in range(8)}
    assert rewards.verifier_counts()["started"] - started == 2


OWNER = """
import sys, threading, time
sys.path.insert(0, {folder!r})
from asyncgrpo_core.rewards import verifiers
verifiers.verifier_settings.processes = 2
verifiers.run_checks("jobs_of_test:echo", [1, 2], 60)
if {busy}:
    threading.Thread(target=verifiers.run_checks, args=("jobs_of_test:deaf", [1], 3.0), daemon=True).start()
    import os
    while not any(name.isdigit() for name in os.listdir({folder!r})):
        time.sleep(0.01)
print(*verifiers._get_pool().pids(), flush=True)
if {wait}:
    time.sleep(600)
"""


def owner(folder: Path, *, busy: bool, wait: bool) -> subprocess.Popen:
    code = textwrap.dedent(OWNER.format(folder=str(folder), busy=busy, wait=wait))
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def gone(pids: list[int], within_s: float) -> bool:
    # an orphan that has ended may stay a zombie where nobody adopts it
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if all(not psutil.pid_exists(p) or psutil.Process(p).status() == psutil.STATUS_ZOMBIE for p in pids):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("busy", [False, True])
def test_no_verifier_outlives_a_killed_owner(jobs: Path, busy: bool) -> None:
    """Idle ones end with their stdin; one that is stuck, by its kernel timer."""
    process = owner(jobs, busy=busy, wait=True)
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert pids and all(psutil.pid_exists(pid) for pid in pids)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(10)
    assert gone(pids, 30)


@pytest.mark.parametrize("busy", [False, True])
def test_verifiers_end_with_the_interpreter(jobs: Path, busy: bool) -> None:
    process = owner(jobs, busy=busy, wait=False)
    pids = [int(pid) for pid in process.communicate(timeout=60)[0].split()]
    assert process.returncode == 0 and pids and gone(pids, 10)


def test_a_forked_child_uses_no_pipe_of_its_parent(jobs: Path) -> None:
    assert run("echo", 1)[0].value == 1
    before = verifiers._get_pool().pids()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, b"none" if verifiers._pool is None else b"pool")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 10) == b"none"
    assert run("echo", 2)[0].value == 2 and verifiers._get_pool().pids() == before


NUMBER = st.one_of(
    st.integers(-(10**15) + 1, 10**15 - 1).map(str),
    st.decimals(-10_000, 10_000, places=3).map(lambda d: f"{d:f}"),
    st.tuples(st.integers(1, 999_999_999), st.integers(1, 999_999_999)).map(lambda t: rf"\frac{{{t[0]}}}{{{t[1]}}}"),
    st.tuples(st.integers(1, 99), st.integers(1, 99)).map(lambda t: rf"-\frac{{{t[0]}}}{{{t[1]}}}"),
)
AROUND = st.sampled_from(
    [
        r"\boxed{%s}",
        r"$\boxed{ %s }$",
        r"$7$, so \[x = \boxed{%s}.\]",
        r"-\boxed{%s}^2",
        "no box: %s",
        r"\boxed{%s}\%%",
        r"\boxed{%s} or \boxed{3}",
        r"\fbox{%s}",
        r"\boxed{x=%s}",
        r"The final answer is $3$. \boxed{%s} cm",
    ]
)


@settings(max_examples=150, deadline=None)
@given(NUMBER, AROUND)
def test_the_shortcut_without_a_process_agrees_with_math_verify(number: str, around: str) -> None:
    text = around % number
    if _same_number(text, number):
        assert math_check.check([text, number], lambda stage: None) == 1.0


def test_the_shortcut_is_taken_for_plain_numbers_alone(monkeypatch) -> None:
    monkeypatch.setattr("asyncgrpo_core.rewards.accuracy.run_checks", None)  # a call would fail
    same = [(r"so \boxed{12}", "12"), (r"\boxed{ -0.5}", " -0.5"), (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}")]
    assert rewards.accuracy_reward(said(*(t for t, _ in same)), [s for _, s in same]) == [1.0] * 3
    other = [(r"\boxed{012}", "012"), (r"\boxed{x}", "x"), (r"\boxed{1}\boxed{1}", "1"), (r"\boxed{13}", "12")]
    assert not any(_same_number(*pair) for pair in other)
