"""One command in a process group of its own, with bounded output, gone when its caller is done with it."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass

_DRAIN_S = 2.0
_STDOUT, _STDERR = 1, 2


@dataclass(frozen=True)
class CommandOutput:
    """How a command ended: exit status (negative: the signal) and the ends of what it wrote."""

    status: int
    stdout: str
    stderr: str


async def run_command(
    command: list[str], *, env: dict[str, str], stdin: bytes, cwd: str | None = None, keep_bytes: int = 1 << 16
) -> CommandOutput:
    """Run a command to its end and kill what it leaves behind; when cancelled, kill it with its whole group.

    Args:
        command: program and arguments; no shell.
        env: its whole environment.
        stdin: what it may read; then its input ends.
        cwd: its working directory.
        keep_bytes: of each output, how much is kept from the end.

    Raises:
        OSError: it could not be started.
    """
    loop = asyncio.get_running_loop()
    # not asyncio.create_subprocess_exec: its wait() goes on while any grandchild holds the output open
    transport, protocol = await loop.subprocess_exec(
        lambda: _Tails(loop, keep_bytes), *command, env=env, cwd=cwd, start_new_session=True
    )
    pid = transport.get_pid()
    try:
        pipe = transport.get_pipe_transport(0)
        if pipe is not None:
            pipe.write(stdin)  # type: ignore[attr-defined]
            pipe.write_eof()  # type: ignore[attr-defined]
        await protocol.exited
        _kill_group(pid)
        await asyncio.wait([protocol.drained], timeout=_DRAIN_S)
        return CommandOutput(transport.get_returncode() or 0, protocol.text(_STDOUT), protocol.text(_STDERR))
    finally:
        _kill_group(pid)
        transport.close()


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # nothing of it is left (or, on some systems, only zombies)


class _Tails(asyncio.SubprocessProtocol):
    """Keeps the ends of both outputs; `exited` is set at the exit, `drained` when both outputs have ended."""

    def __init__(self, loop: asyncio.AbstractEventLoop, keep_bytes: int) -> None:
        self.exited: asyncio.Future[None] = loop.create_future()
        self.drained: asyncio.Future[None] = loop.create_future()
        self._keep = keep_bytes
        self._kept = {_STDOUT: bytearray(), _STDERR: bytearray()}
        self._open = {_STDOUT, _STDERR}

    def text(self, fd: int) -> str:
        return bytes(self._kept[fd][-self._keep :]).decode("utf-8", "replace")

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        kept = self._kept[fd]
        kept += data
        if len(kept) > 2 * self._keep:
            del kept[: -self._keep]

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._open.discard(fd)
        if not self._open and not self.drained.done():
            self.drained.set_result(None)

    def process_exited(self) -> None:
        if not self.exited.done():
            self.exited.set_result(None)
