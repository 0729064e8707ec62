"""The owner's end of one verifier process (verifier_process.py): start it, ask it with a deadline, end it."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any, Literal

from asyncgrpo_core.errors import ConfigError, RewardError
from asyncgrpo_core.rewards.verifier_process import LOAD_S


@dataclass(frozen=True)
class Outcome:
    """How one check ended. `value` is set for "ok", `why` otherwise; `stage` is the last stage the job had reported."""

    status: Literal["ok", "late", "error", "died"]
    value: Any = None
    why: str = ""
    stage: str | None = None


class Ended(Exception):
    """The verifier is of no further use: past its deadline, or dead. Arguments: the outcome."""


class Verifier:
    """One process. Used by one thread at a time."""

    def __init__(self) -> None:
        # -P and an explicit path: the child finds what we find, and nothing by the folder it happens to start in
        paths = [path for path in sys.path if path]
        env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-P", "-c", "from asyncgrpo_core.rewards.verifier_process import main; main()"]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, bufsize=0)
        except OSError as error:
            raise RewardError(
                f"No verifier process can be started: {error}.", "Look at the limits on processes and memory."
            ) from error
        self.loaded: list[str] = []
        self._unread = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self, job: str, request: Any, timeout_s: float) -> Outcome:
        self.load(job.partition(":")[0])
        return self._ask({"job": job, "request": request, "timeout_s": timeout_s}, timeout_s)

    def load(self, module: str) -> None:
        """Import a job's module, which takes seconds and is not the check's time."""
        if module in self.loaded:
            return
        try:
            outcome = self._ask({"load": module}, LOAD_S)
        except Ended as ended:
            raise RewardError(f"A verifier process could not load {module}: {ended.args[0].why}.") from None
        if outcome.status != "ok":
            raise ConfigError(f"{module} cannot be used: {outcome.why}.", "Install what it needs.")
        self.loaded.append(module)

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _ask(self, message: dict[str, Any], timeout_s: float) -> Outcome:
        assert self._process.stdin is not None
        deadline = time.monotonic() + timeout_s
        stage = None
        try:
            _write_all(self._process.stdin.fileno(), json.dumps(message).encode() + b"\n", deadline)
            while True:
                reply = json.loads(self._line(deadline))
                if "stage" not in reply:
                    break
                stage = reply["stage"]
        except TimeoutError:
            raise Ended(Outcome("late", None, f"it took more than {timeout_s:g} s", stage)) from None
        except (EOFError, OSError):
            code = self._process.wait()
            raise Ended(Outcome("died", None, f"its process ended with code {code}", stage)) from None
        if "ok" in reply:
            return Outcome("ok", reply["ok"], "", stage)
        return Outcome("error", None, reply.get("error") or reply["missing"], stage)

    def _line(self, deadline: float) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            _wait(descriptor, select.POLLIN, deadline)
            part = os.read(descriptor, 1 << 16)
            if not part:
                raise EOFError
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        return line


def _wait(descriptor: int, event: int, deadline: float) -> None:
    poll = select.poll()  # not select(): descriptors beyond 1023 are usual in a rollout worker
    poll.register(descriptor, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError


def _write_all(descriptor: int, data: bytes, deadline: float) -> None:
    view = memoryview(data)
    while view:
        _wait(descriptor, select.POLLOUT, deadline)
        view = view[os.write(descriptor, view[: select.PIPE_BUF]) :]
