"""The owner's side of a guard: start it, watch the child through it, stop it."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

import asyncgrpo_core
from asyncgrpo_core.errors import AsyncGRPOError
from asyncgrpo_core.guard import process_table as table
from asyncgrpo_core.guard.process_table import GUARD_MARK, RUN_MARK
from asyncgrpo_core.guard.records import read_record, record_path

_START_DEADLINE_S = 60.0  # the guard is a bare interpreter; a loaded machine may still take seconds
_AFTER_GRACE_S = 25.0  # what a guard needs at most between the end of the grace and its own end
_POLL_S = 0.02


class GuardedProcess:
    """A running child and the guard above it. Made by `start_guarded`; one thread at a time may use it.

    Attributes:
        pid: the child's process id.
        name: its name in log files and in RUN/guards.
        log_path: where its output goes.
    """

    def __init__(
        self,
        guard: subprocess.Popen[bytes],
        status_fd: int,
        *,
        name: str,
        guard_id: str,
        run_dir: Path,
        log_path: Path,
        grace_s: float,
    ):
        self.name = name
        self.log_path = log_path
        self.pid = 0
        self._guard = guard
        self._guard_id = guard_id
        self._run_dir = run_dir
        self._guard_process = table.identify(guard.pid)
        self._status_fd = status_fd
        self._grace_s = grace_s
        self._buffer = b""
        self._error: str | None = None
        self._exit_code: int | None = None
        self._swept = False

    @property
    def guard_pid(self) -> int:
        """Process id of the guard itself."""
        return self._guard.pid

    def poll(self) -> int | None:
        """The child's exit code (negative: killed by that signal), None while it runs.

        The child's own children may still be ending; `stop()` and `wait()` return when they are gone.
        A killed guard counts as a killed child (-9): the child died with it and what it left is swept here.
        """
        self._read_status()
        if self._exit_code is None and self._guard.poll() is not None:
            self._read_status()  # what it said just before it ended
            if self._exit_code is None:
                self._sweep_after_guard()
                self._exit_code = -9
        return self._exit_code

    def wait(self, timeout_s: float) -> int | None:
        """Wait until the child and everything below it has ended; its exit code, or None after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while self.poll() is None or self._guard.poll() is None:
            if time.monotonic() > deadline:
                return None
            time.sleep(_POLL_S)
        return self._exit_code

    def stop(self, grace_s: float | None = None) -> int:
        """End the child (TERM, `grace_s`, then KILL of all descendants) and wait for it. Idempotent.

        Returns:
            The child's exit code (negative: killed by that signal).
        """
        grace_s = self._grace_s if grace_s is None else grace_s
        if self.poll() is None:
            self._send_stop(grace_s)
        if self.wait(grace_s + _AFTER_GRACE_S) is None or not self._ended_clean():
            self._guard.kill()
            self._guard.wait(timeout=10)
            self._sweep_after_guard()
            if self._exit_code is None:
                self._exit_code = -9
        self._close()
        assert self._exit_code is not None
        return self._exit_code

    def log_tail(self, n_lines: int = 20) -> list[str]:
        """The last lines of the child's log, without line ends; empty when there is no log."""
        return log_tail(self.log_path, n_lines)

    def _ended_clean(self) -> bool:
        return self._guard.poll() == 0 or self._swept

    def _send_stop(self, grace_s: float) -> None:
        assert self._guard.stdin is not None
        try:
            self._guard.stdin.write(f"stop {grace_s}\n".encode())
            self._guard.stdin.flush()
        except BrokenPipeError:
            # The guard has just ended; `wait` finds out how.
            return

    def _read_status(self) -> None:
        if self._status_fd < 0:
            return
        while True:
            try:
                data = os.read(self._status_fd, 4096)
            except BlockingIOError:
                break
            if not data:
                break
            self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            message = json.loads(line)
            self.pid = message.get("started", self.pid)
            self._error = message.get("error", self._error)
            self._exit_code = message.get("exited", self._exit_code)

    def _sweep_after_guard(self) -> None:
        """The guard was killed: find what the child left by our mark, by the guard's last list, and below those."""
        if self._swept:
            return
        self._swept = True
        record = read_record(record_path(self._run_dir, self.name))
        known = record.descendants if record is not None and record.guard_id == self._guard_id else []
        left = table.kill_leftovers(self._guard_id, known)
        if left:
            raise AsyncGRPOError(
                f"Processes {[p.pid for p in left]} of {self.name!r} could not be killed after their guard died.",
                "Look at them with ps and end them by hand.",
            )
        if record is not None:
            record.remove()

    def _close(self) -> None:
        if self._guard.stdin is not None and not self._guard.stdin.closed:
            try:
                self._guard.stdin.close()
            except BrokenPipeError:  # an unsent stop command of a guard that ended first
                self._guard.stdin = None
        if self._status_fd >= 0:
            os.close(self._status_fd)
            self._status_fd = -1


def log_tail(path: Path, n_lines: int) -> list[str]:
    """The last `n_lines` lines of a text file (only its last 256 KiB are read); empty when it does not exist."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 256 * 1024))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return text.splitlines()[-n_lines:]


def start_guarded(
    argv: list[str],
    *,
    name: str,
    run_dir: Path,
    log_path: Path,
    env: dict[str, str] | None = None,
    cwd: str | Path | None = None,
    grace_s: float = 10.0,
    on_owner_death: list[str] | None = None,
) -> GuardedProcess:
    """Start `argv` under a guard and return when it has been started.

    Args:
        argv: program and arguments; no shell.
        name: what it is called, unique in the run folder while it runs, e.g. "server-0".
        run_dir: the run folder; the guard keeps RUN/guards/<name>.json there.
        log_path: file that receives the child's standard output and error, appended.
        env: the child's whole environment; None = this process's. Our marks are added.
        cwd: the child's working directory; None = this process's.
        grace_s: seconds between TERM and KILL for the child, when stopped and when the owner dies.
        on_owner_death: a command run after everything has been ended, only when this process died; it has 20 s.

    Raises:
        AsyncGRPOError: the program cannot be started, or `name` already runs in this run folder.
    """
    run_dir = Path(run_dir).resolve()
    log_path = Path(log_path).resolve()
    log_path.parent.mkdir(parents=True, exist_ok=True)
    _refuse_second(run_dir, name)
    guard_id = secrets.token_hex(16)
    marks = {RUN_MARK: str(run_dir), GUARD_MARK: guard_id}
    owner = table.identify(os.getpid())
    assert owner is not None
    spec = {
        "name": name,
        "guard_id": guard_id,
        "run_dir": str(run_dir),
        "argv": [str(a) for a in argv],
        "env": {**(os.environ if env is None else env), **marks},
        "cwd": str(cwd) if cwd is not None else os.getcwd(),
        "grace_s": grace_s,
        "log": str(log_path),
        "owner": owner,
        "on_owner_death": on_owner_death,
    }
    process = _launch(spec)
    _await_started(process, argv)
    return process


def _refuse_second(run_dir: Path, name: str) -> None:
    """Two guards of one name would share a record: wait for an ending one, refuse beside a running one."""
    deadline = time.monotonic() + _AFTER_GRACE_S
    while True:
        record = read_record(record_path(run_dir, name))
        if record is None or record.boot_id != table.boot_id() or not table.is_running(record.guard):
            return
        if record.state != "stopping" or time.monotonic() > deadline:
            raise AsyncGRPOError(
                f"{name!r} already runs in {run_dir} (guard process {record.guard.pid}, "
                f"started by process {record.owner.pid}).",
                "Stop that run first, or use another run folder.",
            )
        time.sleep(_POLL_S)


def _launch(spec: dict) -> GuardedProcess:
    log_path = Path(spec["log"])
    # The guard must find this package even when it is importable here only through sys.path.
    package_root = str(Path(asyncgrpo_core.__file__).resolve().parent.parent)
    path = [p for p in (os.environ.get("PYTHONPATH"), package_root) if p]
    read_end, write_end = os.pipe()
    with log_path.open("ab") as log:
        guard = subprocess.Popen(
            [sys.executable, "-P", "-m", "asyncgrpo_core.guard", str(write_end)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=(write_end,),
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        )
    os.close(write_end)
    os.set_blocking(read_end, False)
    process = GuardedProcess(
        guard,
        read_end,
        name=spec["name"],
        guard_id=spec["guard_id"],
        run_dir=Path(spec["run_dir"]),
        log_path=log_path,
        grace_s=spec["grace_s"],
    )
    assert guard.stdin is not None
    try:
        guard.stdin.write((json.dumps(spec) + "\n").encode())
        guard.stdin.flush()
    except BrokenPipeError as error:
        process._close()
        raise AsyncGRPOError(
            f"The guard process of {process.name!r} ended at once (exit code {guard.wait(timeout=10)}).",
            f"Its output is in {log_path}.",
        ) from error
    return process


def _await_started(process: GuardedProcess, argv: list[str]) -> None:
    deadline = time.monotonic() + _START_DEADLINE_S
    while True:
        process._read_status()
        if process._error is not None:
            process._guard.wait(timeout=10)
            process._close()
            raise AsyncGRPOError(
                f"{process.name!r} could not be started: {process._error}.",
                f"The command was: {' '.join(map(str, argv))[:500]}",
            )
        if process.pid:
            return
        if process._guard.poll() is not None or time.monotonic() > deadline:
            process._guard.kill()
            process._close()
            raise AsyncGRPOError(
                f"The guard process of {process.name!r} did not start the program (exit code {process._guard.poll()}).",
                f"Its output is in {process.log_path}.",
            )
        time.sleep(_POLL_S)
