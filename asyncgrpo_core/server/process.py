"""Start a vLLM server under a guard, wait until it answers, say what went wrong when it does not."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from asyncgrpo_core.errors import AsyncGRPOError, ServerError
from asyncgrpo_core.guard import GuardedProcess, start_guarded
from asyncgrpo_core.server.command import ServerCommand
from asyncgrpo_core.server.control import VLLMControl
from asyncgrpo_core.server.log_reading import failure_reason, fix_for, last_message

_POLL_S = 0.25
_PROGRESS_EVERY_S = 2.0


# How long vLLM gets to end by itself when its owner is gone: nothing of a killed run may be left 10 s later.
GRACE_S = 6.0


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


class RunningServer:
    """A started, healthy server. `stop()` ends it with everything it started."""

    def __init__(self, base_url: str, process: GuardedProcess) -> None:
        self.base_url = base_url
        self.process = process

    def stop(self, grace_s: float | None = None) -> int:
        """End the server; its exit code. Idempotent."""
        return self.process.stop(grace_s)


def start_server(
    command: ServerCommand,
    *,
    run_dir: Path,
    name: str = "server-0",
    start_timeout_s: float = 600.0,
    on_progress: Callable[[str], None] | None = None,
) -> RunningServer:
    """Start the server and return when it is healthy. Its log is RUN/logs/<name>.log.

    Args:
        command: from `server_command`.
        run_dir: the run folder.
        name: of the process, its log and its guard.
        start_timeout_s: seconds until it must be healthy.
        on_progress: called every few seconds with a line about how far it is.

    Raises:
        ServerError: the port is taken, the server died while starting (with the line of its log that says why),
            or it was not healthy in time. Nothing is left running.
    """
    _check_port(command)
    log_path = Path(run_dir) / "logs" / f"{name}.log"
    log_starts_at = log_path.stat().st_size if log_path.exists() else 0
    try:
        process = start_guarded(
            command.argv,
            name=name,
            run_dir=run_dir,
            log_path=log_path,
            env={**os.environ, **command.env},
            grace_s=GRACE_S,
        )
    except AsyncGRPOError as error:
        raise ServerError(error.message, error.fix) from error
    try:
        with VLLMControl(command.base_url, timeout_s=10.0) as control:
            _await_healthy(control, process, log_starts_at, start_timeout_s, on_progress)
    except BaseException:
        process.stop(grace_s=2.0)
        raise
    return RunningServer(command.base_url, process)


def _check_port(command: ServerCommand) -> None:
    with socket.socket() as probe:
        # As the server itself will bind: a port in TIME_WAIT is free, a listening one is not.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((command.host, command.port))
        except OSError as error:
            raise ServerError(
                f"Port {command.port} on {command.host} cannot be used for the vLLM server: {error.strerror}.",
                "Choose another server.port, leave it out to take a free one, or set server.url if the server "
                "that listens there is the one to use.",
            ) from error


def _await_healthy(
    control: VLLMControl,
    process: GuardedProcess,
    log_starts_at: int,
    timeout_s: float,
    on_progress: Callable[[str], None] | None,
) -> None:
    start = time.monotonic()
    next_progress = start + _PROGRESS_EVERY_S
    while not control.is_healthy():
        now = time.monotonic()
        if process.poll() is not None:
            raise died_while_starting(process, log_starts_at)
        if now - start > timeout_s:
            tail = "\n".join(f"  {line}" for line in process.log_tail(5))
            raise ServerError(
                f"The vLLM server was not healthy after {timeout_s:.0f} s. "
                f"Its log ({process.log_path}) ends with:\n{tail}\n",
                "Raise server.start_timeout_s if it was still loading.",
            )
        if on_progress is not None and now >= next_progress:
            next_progress = now + _PROGRESS_EVERY_S
            on_progress(f"vLLM server starting, {now - start:.0f} s: {last_message(process.log_tail(30))}")
        time.sleep(_POLL_S)
    if process.poll() is not None:  # something else answers on that port
        raise died_while_starting(process, log_starts_at)


def died_while_starting(process: GuardedProcess, log_starts_at: int) -> ServerError:
    """The error for a server that ended before it was healthy: the reason from its log, not the whole log."""
    code = process.stop()
    with process.log_path.open("rb") as log:
        log.seek(log_starts_at)
        reason = failure_reason(log.read().decode(errors="replace").splitlines())
    how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    fix = fix_for(reason)
    if code == -9 and not fix:
        fix = "A kill that nobody asked for is usually the kernel running out of memory: lower server.kv_cache_gib. "
    return ServerError(
        f"The vLLM server ended while starting ({how}): {reason}", f"{fix}Its log is {process.log_path}."
    )
