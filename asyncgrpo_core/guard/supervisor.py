"""The inside of a guard process: start one child, watch the owner and the child, leave nothing behind.

Protocol. Standard input: one JSON line with the instructions, then optionally `stop SECONDS`; end of file means the
owner is gone. Status pipe, one JSON line each: {"started": pid} or {"error": text}, then {"exited": code}.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any

from asyncgrpo_core.guard import process_table as table
from asyncgrpo_core.guard.process_table import ProcessId
from asyncgrpo_core.guard.records import GuardRecord

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_WATCH_EVERY_S = 0.25  # how often the parent pid is compared; pipe and child events wake the loop at once
_RECORD_EVERY_S = 2.0  # how often the list of descendants is written down
_TERM_WAIT_S = 2.0  # what descendants get between TERM and KILL, unless the grace is shorter
_KILL_WAIT_S = 15.0
_HOOK_DEADLINE_S = 20.0
_DEFAULT_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


class Supervisor:
    """One child and all its descendants, from start to nothing left."""

    def __init__(self, spec: dict[str, Any], status_fd: int) -> None:
        self._spec = spec
        self._status_fd = status_fd
        self._grace_s = float(spec["grace_s"])
        self._owner_died = False
        self._exit_code: int | None = None
        self._child_pid = 0
        guard = table.identify(os.getpid())
        assert guard is not None
        self._record = GuardRecord(
            name=spec["name"],
            guard_id=spec["guard_id"],
            run_dir=spec["run_dir"],
            boot_id=table.boot_id(),
            grace_s=self._grace_s,
            log=spec["log"],
            owner=ProcessId(*spec["owner"]),
            guard=guard,
        )
        self._wakeup, write_end = os.pipe()
        os.set_blocking(self._wakeup, False)
        os.set_blocking(write_end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler must exist for the wake-up pipe to be written
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)

    def run(self) -> int:
        """Everything, in order; returns the guard's own exit status."""
        self._write_record()
        try:
            child = self._spawn(self._spec["argv"])
        except OSError as error:
            self._tell(error=f"{error.strerror or error}: {error.filename or self._spec['argv'][0]}")
            self._record.remove()
            return 1
        self._child_pid = child.pid
        self._record.child = table.identify(child.pid)
        self._record.state = "running"
        self._write_record()
        self._tell(started=child.pid)
        self._watch()
        self._record.state = "stopping"
        self._write_record()
        left = self._end_everything()
        if os.getppid() != self._record.owner.pid:  # it may have died while we were ending things on its request
            self._owner_died = True
        if self._owner_died and self._spec["on_owner_death"]:
            left += self._run_hook(self._spec["on_owner_death"])
        if left:
            self._say(f"these processes could not be killed: {left}")
            return 1
        self._record.remove()
        return 0

    def _spawn(self, argv: list[str]) -> subprocess.Popen[bytes]:
        """Start a process that dies when this thread dies, with default signals and a session of its own."""
        guard_pid = os.getpid()

        def in_child() -> None:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            for number in _DEFAULT_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            if os.getppid() != guard_pid:  # the guard died before the line above took effect
                os._exit(1)

        return subprocess.Popen(
            argv,
            env=self._spec["env"],
            cwd=self._spec["cwd"],
            stdin=subprocess.DEVNULL,
            stdout=sys.stdout.fileno(),
            stderr=sys.stderr.fileno(),
            start_new_session=True,
            preexec_fn=in_child,
        )

    def _watch(self) -> None:
        """Return when the owner asked to stop, the owner is gone, or the child has ended."""
        owner_pid = self._record.owner.pid
        next_record = 0.0
        pending = b""
        while True:
            ready, _, _ = select.select([0, self._wakeup], [], [], _WATCH_EVERY_S)
            self._reap()
            if 0 in ready:
                data = os.read(0, 4096)
                if not data:
                    self._owner_died = True
                    return
                pending += data
                if b"\n" in pending:
                    self._grace_s = float(pending.split()[1])
                    return
            if os.getppid() != owner_pid:
                self._owner_died = True
                return
            if self._exit_code is not None:
                return
            if time.monotonic() >= next_record:
                next_record = time.monotonic() + _RECORD_EVERY_S
                self._record_descendants()

    def _record_descendants(self) -> None:
        found = table.descendants(os.getpid())
        if found != self._record.descendants:
            self._record.descendants = found
            self._write_record()

    def _reap(self) -> None:
        """Collect every ended process: the child, and orphans that this subreaper inherited."""
        try:
            while os.read(self._wakeup, 512):
                pass
        except BlockingIOError:
            pass
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._child_pid:
                self._exit_code = os.waitstatus_to_exitcode(status)
                self._tell(exited=self._exit_code)

    def _end_everything(self) -> list[ProcessId]:
        """TERM to the child and its grace; then TERM, a moment, and KILL to all that is left."""
        child = self._record.child
        if self._exit_code is None and child is not None:
            table.send_signal(child, signal.SIGTERM)
            self._wait_until(lambda: self._exit_code is not None, self._grace_s)
        for process in table.descendants(os.getpid()):
            table.send_signal(process, signal.SIGTERM)
        self._wait_until(lambda: not table.descendants(os.getpid()), min(_TERM_WAIT_S, self._grace_s))
        deadline = time.monotonic() + _KILL_WAIT_S
        # New processes can appear while we kill (a fork in flight), hence a loop over fresh lists.
        while (left := table.descendants(os.getpid())) and time.monotonic() < deadline:
            for process in left:
                table.send_signal(process, signal.SIGKILL)
            self._wait_until(lambda: not table.descendants(os.getpid()), 0.2)
        self._reap()
        return left

    def _run_hook(self, argv: list[str]) -> list[ProcessId]:
        """Run the owner's last will; whatever it leaves or overruns is killed."""
        try:
            hook = self._spawn(argv)
        except OSError as error:
            self._say(f"the command for the owner's death could not start: {error}")
            return []
        named = table.identify(hook.pid)
        if named is not None:
            self._wait_until(lambda: not table.is_running(named), _HOOK_DEADLINE_S)
        left = table.kill_all(table.descendants(os.getpid()))
        self._reap()
        return left

    def _wait_until(self, condition, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        self._reap()
        while not condition() and (rest := deadline - time.monotonic()) > 0:
            select.select([self._wakeup], [], [], min(0.05, rest))
            self._reap()

    def _tell(self, **message: Any) -> None:
        try:
            os.write(self._status_fd, (json.dumps(message) + "\n").encode())
        except BrokenPipeError:  # the owner is gone; the watch loop acts on that
            self._owner_died = True

    def _write_record(self) -> None:
        try:
            self._record.write()
        except OSError as error:  # a deleted or full run folder must not cost the child its guard
            self._say(f"could not write {self._record.path}: {error}")

    def _say(self, text: str) -> None:
        print(f"[guard {self._record.name}] {text}", file=sys.stderr, flush=True)


def main(status_fd: int) -> int:
    """Read the instructions, become a session leader's subreaper, supervise until nothing is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    os.set_inheritable(status_fd, False)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    line = b""
    while not line.endswith(b"\n"):
        # One byte at a time: what follows the line (a stop command) must stay in the pipe.
        byte = os.read(0, 1)
        if not byte:  # the owner died before it said what to run
            return 1
        line += byte
    return Supervisor(json.loads(line), status_fd).run()
