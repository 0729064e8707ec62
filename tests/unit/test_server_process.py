"""Starting a server: ready, port taken, dying while starting, never ready. (A small HTTP program plays vLLM.)"""

from __future__ import annotations

import signal
import socket
import sys
import time

import pytest

from asyncgrpo_core.errors import ServerError
from asyncgrpo_core.guard import process_table as table
from asyncgrpo_core.server.command import ServerCommand
from asyncgrpo_core.server.process import free_port, start_server

PROGRAM = """
import http.server, os, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if os.path.exists(sys.argv[2]) else 503)
        self.end_headers()
    def log_message(self, *_):
        return
print("(APIServer pid=1) INFO 11-30 04:05:06 [model.py:1] Loading weights", flush=True)
{extra}
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def command(folder, extra: str = "", *, ready: bool = True, port: int | None = None) -> ServerCommand:
    port = port or free_port()
    if ready:
        (folder / "ready").touch()
    argv = [sys.executable, "-c", PROGRAM.format(extra=extra), str(port), str(folder / "ready")]
    return ServerCommand(argv, {"GREETING": "hello"}, "127.0.0.1", port)


def nothing_left(run_dir) -> bool:
    return not table.marked(table.RUN_MARK, str(run_dir.resolve())) and not list((run_dir / "guards").glob("*"))


def test_a_healthy_server_runs_until_it_is_stopped(tmp_path):
    server = start_server(command(tmp_path, "print(os.environ['GREETING'], flush=True)"), run_dir=tmp_path)
    assert server.process.poll() is None
    assert (tmp_path / "logs" / "server-0.log").read_text().splitlines()[1] == "hello"
    assert server.stop() == -signal.SIGTERM
    assert server.stop() == -signal.SIGTERM
    assert nothing_left(tmp_path)


def test_a_taken_port_is_refused_before_anything_starts(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ServerError, match=rf"Port {port} on 127\.0\.0\.1 .*server\.port.*server\.url"):
            start_server(command(tmp_path, port=port), run_dir=tmp_path)
    assert not (tmp_path / "logs").exists()


def test_a_server_that_dies_gives_its_reason_and_leaves_nothing(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "server-0.log").write_text("ValueError: of an earlier attempt, not to be shown\n")
    with pytest.raises(ServerError) as error:
        start_server(command(tmp_path, "raise OSError('Repo id must be in the form')"), run_dir=tmp_path)
    text = str(error.value)
    assert "exit code 1" in text and "OSError: Repo id must be in the form. Correct model.path" in text
    assert "server-0.log" in text
    assert "Traceback" not in text and "earlier attempt" not in text
    assert nothing_left(tmp_path)


def test_a_killed_server_is_told_apart(tmp_path):
    with pytest.raises(ServerError, match=r"killed by signal 9.*Loading weights.*out of memory"):
        start_server(command(tmp_path, "os.kill(os.getpid(), 9)"), run_dir=tmp_path)
    assert nothing_left(tmp_path)


def test_a_server_that_is_never_ready_is_ended(tmp_path):
    start = time.monotonic()
    with pytest.raises(ServerError, match=r"not healthy after 1 s(?s:.*)Loading weights(?s:.*)start_timeout_s"):
        start_server(command(tmp_path, ready=False), run_dir=tmp_path, start_timeout_s=1.0)
    assert time.monotonic() - start < 30
    assert nothing_left(tmp_path)


def test_progress_is_told_and_what_it_raises_ends_the_start(tmp_path):
    told = []

    def progress(line: str) -> None:
        told.append(line)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start_server(command(tmp_path, ready=False), run_dir=tmp_path, on_progress=progress)
    assert told[0].startswith("vLLM server starting, ") and told[0].endswith("Loading weights")
    assert nothing_left(tmp_path)


def test_a_program_that_is_not_there_is_a_server_error(tmp_path):
    nothing = ServerCommand(["/no/such/python"], {}, "127.0.0.1", free_port())
    with pytest.raises(ServerError, match="/no/such/python"):
        start_server(nothing, run_dir=tmp_path)
