"""check_reachable: seconds, no mlflow import, an error that names the URI and the fix."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from asyncgrpo_core.errors import TrackerError
from asyncgrpo_core.tracking.reach import check_reachable, sqlite_path
from asyncgrpo_core.tracking.settings import TrackingConfig


@contextmanager
def answering(status: int, body: bytes):
    """An HTTP server that gives one answer to everything; yields its URL and the requests it saw."""
    seen: list[tuple[str, dict]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            seen.append((self.path, dict(self.headers)))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """Silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def unused_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_answering_server_is_reachable_with_credentials(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret")
    with answering(200, json.dumps({"experiments": []}).encode()) as (url, seen):
        check_reachable(url, 5)
    assert seen[0][0] == "/api/2.0/mlflow/experiments/search"
    assert seen[0][1]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [(401, b"who are you", "401.*MLFLOW_TRACKING_TOKEN"), (404, b"<html>", "404"), (200, b"<html>", "cannot be")],
)
def test_wrong_answers_are_errors_that_name_the_uri(status, body, said):
    with answering(status, body) as (url, _), pytest.raises(TrackerError, match=said) as caught:
        check_reachable(url, 5)
    assert url in str(caught.value)


def test_closed_port_is_an_error_that_names_the_uri_and_the_fix():
    url = f"http://127.0.0.1:{unused_port()}"
    with pytest.raises(TrackerError, match=r"tracking\.required=false") as caught:
        check_reachable(url, 5)
    assert url in str(caught.value)


def test_server_that_never_answers_is_given_up_after_the_deadline():
    with closing(socket.socket()) as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        started = time.monotonic()
        with pytest.raises(TrackerError, match="cannot be reached"):
            check_reachable(f"http://127.0.0.1:{silent.getsockname()[1]}", 0.3)
        assert time.monotonic() - started < 10


def test_sqlite_new_existing_damaged_and_misplaced(tmp_path):
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    check_reachable(uri)
    assert not (tmp_path / "mlflow.db").exists(), "the check makes no store"
    (tmp_path / "mlflow.db").write_bytes(b"no database" * 200)
    with pytest.raises(TrackerError, match="not a usable sqlite file"):
        check_reachable(uri)
    with pytest.raises(TrackerError, match=r"does not exist.*nowhere"):
        check_reachable(f"sqlite:///{tmp_path}/nowhere/mlflow.db")


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("./mlruns", "is a folder"),
        ("file:///tmp/mlruns", "is a folder"),
        ("gopher://host", "unknown scheme 'gopher'"),
        ("postgresql+nosuchdriver://u:pw@h/db", "module 'nosuchdriver'"),
    ],
)
def test_uris_that_cannot_work(uri, said):
    with pytest.raises(TrackerError, match=said) as caught:
        check_reachable(uri)
    assert "pw" not in str(caught.value)


def test_database_port_that_is_closed():
    with pytest.raises(TrackerError, match="cannot be reached: 127.0.0.1") as caught:
        check_reachable(f"mssql+sqlite3://u:pw@127.0.0.1:{unused_port()}/db", 2)  # any importable module as driver
    assert "pw" not in str(caught.value)


def test_check_does_not_import_mlflow():
    program = (
        "import sys; from asyncgrpo_core.tracking.reach import check_reachable; "
        "from asyncgrpo_core.tracking import settings, sink, summary, checkpoints, close_run; "
        "check_reachable('sqlite:///x.db'); sys.exit('mlflow' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_sqlite_path_relative_and_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert sqlite_path("sqlite:///mlflow.db") == tmp_path / "mlflow.db"
    assert sqlite_path("sqlite:////data/a%20b.db").as_posix() == "/data/a b.db"


def test_default_uri(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    assert TrackingConfig().resolved_uri() == f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracker:5000")
    assert TrackingConfig().resolved_uri() == "http://tracker:5000"
    assert TrackingConfig(uri="sqlite:////x.db").resolved_uri() == "sqlite:////x.db"


def test_unknown_keys_are_refused():
    with pytest.raises(ValueError, match="experimnt"):
        TrackingConfig(experimnt="x")  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="log"):
        TrackingConfig(checkpoints={"log": "some"})  # type: ignore[arg-type]
