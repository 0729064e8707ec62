"""Is the tracker there? Answered in seconds and without importing mlflow (which takes two of them).

mlflow's own client would try for minutes before it gives up, and would make an empty store where a path is mistyped.
"""

from __future__ import annotations

import base64
import importlib.metadata
import importlib.util
import json
import os
import socket
import sqlite3
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from asyncgrpo_core.errors import TrackerError

_DEFAULT_PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}
_API = "/api/2.0/mlflow/"


def check_reachable(uri: str, timeout_s: float = 5.0) -> None:
    """Make sure that the tracking store at `uri` answers.

    Args:
        uri: a tracking URI: http(s)://, sqlite:///, postgresql://, mysql://, mssql://.
        timeout_s: deadline in seconds.

    Raises:
        TrackerError: it does not, or `uri` is none; names the URI and what to change.
    """
    scheme = urlsplit(uri).scheme.lower()
    database, _, driver = scheme.partition("+")
    if scheme in ("http", "https"):
        rest_call(uri, "experiments/search", {"max_results": 1}, timeout_s)
    elif database == "sqlite":
        _check_sqlite(uri, sqlite_path(uri), timeout_s)
    elif database in _DEFAULT_PORTS:
        _check_driver(uri, database, driver)
        _check_port(uri, _DEFAULT_PORTS[database], timeout_s)
    elif scheme in ("", "file"):
        raise TrackerError(
            f"tracking.uri {uri!r} is a folder; MLflow no longer keeps runs in folders.",
            "Use sqlite:///path/to/mlflow.db, or the http:// address of an MLflow server.",
        )
    else:
        raise TrackerError(
            f"tracking.uri {uri!r} has the unknown scheme {scheme!r}.",
            "Use sqlite:///path/to/mlflow.db, postgresql+psycopg2://..., or the http:// address of an MLflow server.",
        )


def sqlite_path(uri: str) -> Path:
    """The file of a sqlite URI: `sqlite:///relative.db` or `sqlite:////absolute.db`."""
    path = urlsplit(uri).path
    return Path(unquote(path[1:] if path.startswith("/") else path)).absolute()


def rest_call(uri: str, route: str, body: dict[str, Any], timeout_s: float, *, method: str = "POST") -> dict[str, Any]:
    """One call of MLflow's REST API, without its client. Credentials as MLflow takes them from the environment.

    Raises:
        TrackerError: no answer in `timeout_s`, or an answer that is not 200.
    """
    url = uri.rstrip("/") + _API + route
    request = urllib.request.Request(url, method=method, headers=_headers())
    if method != "GET":
        request.data = json.dumps(body).encode()
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            content = json.load(answer)
    except urllib.error.HTTPError as error:
        text = error.read(300).decode(errors="replace").strip()
        raise TrackerError(
            f"The MLflow server at {uri} answered {error.code} to {route}: {text or error.reason}.",
            "Check tracking.uri, and MLFLOW_TRACKING_TOKEN or MLFLOW_TRACKING_USERNAME / _PASSWORD."
            if error.code in (401, 403)
            else "Check that tracking.uri is the address of an MLflow server.",
        ) from error
    except (OSError, ValueError) as error:  # URLError and timeouts are OSErrors; ValueError: an answer that is no JSON
        reason = getattr(error, "reason", error)
        raise TrackerError(
            f"The MLflow server at {uri} cannot be reached ({reason}).",
            "Start it, correct tracking.uri, or set tracking.required=false to train without a tracker.",
        ) from error
    return content if isinstance(content, dict) else {}


def _headers() -> dict[str, str]:
    headers = {"Content-Type": "application/json"}
    token = os.environ.get("MLFLOW_TRACKING_TOKEN")
    user, password = os.environ.get("MLFLOW_TRACKING_USERNAME"), os.environ.get("MLFLOW_TRACKING_PASSWORD")
    if token:
        headers["Authorization"] = f"Bearer {token}"
    elif user:
        headers["Authorization"] = "Basic " + base64.b64encode(f"{user}:{password or ''}".encode()).decode()
    return headers


def _check_sqlite(uri: str, path: Path, timeout_s: float) -> None:
    folder = path.parent
    if not folder.is_dir():
        raise TrackerError(
            f"The folder of tracking.uri {uri} does not exist: {folder}.", "Make it, or correct tracking.uri."
        )
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise TrackerError(f"tracking.uri {uri} cannot be written: {path}.", "Change its permissions or tracking.uri.")
    if not path.exists():
        return
    try:
        with closing(sqlite3.connect(path, timeout=timeout_s)) as connection:
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.Error as error:
        raise TrackerError(
            f"tracking.uri {uri} is not a usable sqlite file: {error}.", "Give the path of another file."
        ) from error


def _check_driver(uri: str, database: str, driver: str) -> None:
    # SQLAlchemy 2.1 takes psycopg (3) for a bare postgresql://, earlier ones psycopg2.
    release = tuple(int(part) for part in importlib.metadata.version("sqlalchemy").split(".")[:2])
    postgres = "psycopg" if release >= (2, 1) else "psycopg2"
    wanted = driver or {"postgresql": postgres, "mysql": "MySQLdb", "mssql": "pyodbc"}[database]
    if importlib.util.find_spec(wanted) is None:
        raise TrackerError(
            f"tracking.uri {_without_password(uri)} needs the Python module {wanted!r}, which is not installed.",
            f"Install it, or name an installed driver, e.g. {database}+psycopg2://..."
            if database == "postgresql"
            else "Install it, or name an installed driver in the URI.",
        )


def _check_port(uri: str, default_port: int, timeout_s: float) -> None:
    parts = urlsplit(uri)
    host, port = parts.hostname or "localhost", parts.port or default_port
    try:
        with closing(socket.create_connection((host, port), timeout=timeout_s)):
            return
    except OSError as error:
        raise TrackerError(
            f"The database of tracking.uri {_without_password(uri)} cannot be reached: {host}:{port} ({error}).",
            "Start it, correct tracking.uri, or set tracking.required=false to train without a tracker.",
        ) from error


def _without_password(uri: str) -> str:
    password = urlsplit(uri).password
    return uri.replace(f":{password}@", ":***@") if password else uri
