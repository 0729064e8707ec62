"""Runs checks of model output in a few processes that can be killed, each check with a deadline.

Why: sympy can take minutes, or all memory, over one expression that a model wrote (`9^{9^{9^9}}`), inside a single C
call that no signal handler, thread or event loop gets past. Only ending the process helps.

Why not a library: the project needs no other use of pebble or loky, both start workers by multiprocessing (which
imports the user's training script again in each), and neither ends a worker that hangs when its owner is killed. A
`subprocess` with one pipe each way is cheap and safe to start from any thread, and its kernel timer (see
verifier_process.py) ends it without an owner.

Measured on two shared cores (1.9 ms of work a check): 470 checks/s in process, all of it under the GIL of the event
loop's process; 500/s by two verifiers, with 0.3 ms of the owner's time each; the first check waits 1.1 s for its
process. Equal numbers need none. A group of eight with the tower above takes timeout_s, 5.05 s; in process it never
ends.

Lifetime: processes start with the first check (`verifier_settings.processes` at most, one thread each), end after
`IDLE_S` without a check, at interpreter exit, and by themselves when the owner dies. They see no GPU.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from asyncgrpo_core.errors import ConfigError, RewardError
from asyncgrpo_core.rewards.verifier_link import Ended, Outcome, Verifier

logger = logging.getLogger(__name__)

IDLE_S = 300.0
_ENV_TIMEOUT, _ENV_PROCESSES = "ASYNCGRPO_VERIFIER_TIMEOUT_S", "ASYNCGRPO_VERIFIER_PROCESSES"


def _default_processes() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(2, min(8, cores // 4))  # two at least, so that one that hangs does not hold up the others


@dataclass
class VerifierSettings:
    """Settings of this process; the environment variables reach the rollout worker too.

    timeout_s: default deadline of one check, in seconds (ASYNCGRPO_VERIFIER_TIMEOUT_S). processes: how many may run
    (ASYNCGRPO_VERIFIER_PROCESSES); read when the first check starts them.
    """

    timeout_s: float = field(default_factory=lambda: float(os.environ.get(_ENV_TIMEOUT, 5.0)))
    processes: int = field(default_factory=lambda: int(os.environ.get(_ENV_PROCESSES, _default_processes())))


verifier_settings = VerifierSettings()
_counts: Counter[str] = Counter()
_counts_lock = threading.Lock()


def _count(what: str) -> None:
    with _counts_lock:
        _counts[what] += 1


def verifier_counts() -> dict[str, int]:
    """Checks of this process by how they ended ("ok", "late", "error", "died") and "started" processes."""
    return dict(_counts)


def run_checks(job: str, requests: Sequence[Any], timeout_s: float | None = None) -> list[Outcome]:
    """Run `pkg.mod:func` on every request, several at once. Blocks; safe from any thread.

    Args:
        job: a function (request, stage) -> JSON value of a module that also has `load()`, which imports what the
            function needs; `stage(name)` reports progress.
        requests: JSON values.
        timeout_s: deadline of each request from its own start; None: `verifier_settings.timeout_s`.

    Raises:
        ConfigError: `load()` could not import something.
        RewardError: no verifier process can be started.
    """
    limit = verifier_settings.timeout_s if timeout_s is None else timeout_s
    if not limit > 0:
        raise ConfigError(f"The deadline of a check is {limit} s.", "Give timeout_s > 0.")
    pool = _get_pool()
    futures = [pool.submit(job, request, limit) for request in requests]
    return [future.result() for future in futures]


@dataclass
class _Task:
    job: str
    request: Any
    timeout_s: float
    future: Future[Outcome]


class _Pool:
    """Threads that each own at most one verifier; started when there is more work than idle threads."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._open = 0  # tasks waiting or running
        self._closed = False
        self._verifiers: dict[int, Verifier] = {}  # by thread

    def submit(self, job: str, request: Any, timeout_s: float) -> Future[Outcome]:
        task = _Task(job, request, timeout_s, Future())
        with self._lock:
            self._open += 1
            grow = self._open > self._threads and self._threads < self._size
            self._threads += grow
        self._tasks.put(task)
        if grow:
            threading.Thread(target=self._work, name="verifier", daemon=True).start()
        return task.future

    def pids(self) -> list[int]:
        return [verifier.pid for verifier in list(self._verifiers.values())]

    def close(self) -> None:
        with self._lock:
            self._closed = True
        for verifier in list(self._verifiers.values()):
            verifier.kill()
        for _ in range(self._threads):
            self._tasks.put(None)

    def _work(self) -> None:
        while True:
            try:
                task = self._tasks.get(timeout=IDLE_S)
            except queue.Empty:
                self._drop()
                continue
            if task is None:
                self._drop()
                return
            again: list[str] = []
            try:
                outcome = self._mine().check(task.job, task.request, task.timeout_s)
            except Ended as ended:
                outcome = ended.args[0]
                again = self._drop()
            except BaseException as error:
                self._drop()
                self._done(lambda task=task, error=error: task.future.set_exception(error))
                continue
            _count(outcome.status)
            self._done(lambda task=task, outcome=outcome: task.future.set_result(outcome))
            self._replace(again)

    def _done(self, settle: Any) -> None:
        with self._lock:
            self._open -= 1
        settle()

    def _mine(self) -> Verifier:
        mine = self._verifiers.get(threading.get_ident())
        if mine is None:
            with self._lock:
                if self._closed:
                    raise RewardError("The verifiers are closed: the interpreter is ending.")
                mine = self._verifiers[threading.get_ident()] = Verifier()
            _count("started")
        return mine

    def _drop(self) -> list[str]:
        """End this thread's verifier; the modules it had loaded."""
        mine = self._verifiers.pop(threading.get_ident(), None)
        if mine is None:
            return []
        mine.close()
        return mine.loaded

    def _replace(self, modules: list[str]) -> None:
        """Start the successor now, not when the next check waits for it."""
        try:
            for module in modules:
                self._mine().load(module)
        except Exception as error:  # whatever it is, this thread must take the next check, which will say so
            self._drop()
            if not self._closed:
                logger.warning("a verifier could not be replaced yet: %s", error)


_pool: _Pool | None = None
_pool_lock = threading.Lock()


def _get_pool() -> _Pool:
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = _Pool(max(1, verifier_settings.processes))
        return _pool


@atexit.register
def close_verifiers() -> None:
    """End the verifiers; the next check starts new ones."""
    global _pool
    with _pool_lock:
        pool, _pool = _pool, None
    if pool is not None:
        pool.close()


def _forget_after_fork() -> None:
    """A forked child must not talk through its parent's pipes, nor wait for a lock that no thread of it holds."""
    global _pool, _pool_lock, _counts_lock
    _pool, _pool_lock, _counts_lock = None, threading.Lock(), threading.Lock()


os.register_at_fork(after_in_child=_forget_after_fork)
