"""The Prefect API of a run: the configured one, or an embedded `prefect server` that lives as long as the command.

Prefect is not imported here (the core never does): its settings are read from the same places, in its own order of
precedence: environment, `.env`, `prefect.toml`, `pyproject.toml`, active profile.
"""

from __future__ import annotations

import os
import sys
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from asyncgrpo_core.errors import ConfigError, ServerError, TrackerError
from asyncgrpo_core.guard import GuardedProcess, start_guarded
from asyncgrpo_core.server.process import free_port

START_TIMEOUT_S = 180.0  # a first start creates the database: 10 s idle, 30 s on two busy cores
REACH_TIMEOUT_S = 5.0


@dataclass
class EmbeddedPrefect:
    """A running embedded server.

    Attributes:
        api_url: what PREFECT_API_URL is set to.
        home: its PREFECT_HOME, which keeps the database of this run's Prefect pages.
    """

    api_url: str
    home: Path
    process: GuardedProcess

    def stop(self) -> None:
        self.process.stop(grace_s=5.0)


def configured_api_url(cwd: Path | None = None) -> str | None:
    """The Prefect API URL that the user has configured, None when there is none.

    Raises:
        ConfigError: a settings file that Prefect would read is no valid TOML.
    """
    cwd = cwd or Path.cwd()
    url = os.environ.get("PREFECT_API_URL") or _from_dotenv(cwd / ".env")
    if not url:
        url = _dig(_toml(cwd / "prefect.toml"), "api", "url")
    if not url:
        url = _dig(_toml(cwd / "pyproject.toml"), "tool", "prefect", "api", "url")
    if not url:
        url = _from_profile()
    return str(url) if url else None


def _from_dotenv(path: Path) -> str | None:
    if not path.is_file():
        return None
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        key, sign, value = line.strip().removeprefix("export ").partition("=")
        if sign and key.strip().upper() == "PREFECT_API_URL":
            return value.strip().strip("'\"")
    return None


def _from_profile() -> str | None:
    home = Path(os.environ.get("PREFECT_HOME") or "~/.prefect").expanduser()
    data = _toml(Path(os.environ.get("PREFECT_PROFILES_PATH") or home / "profiles.toml").expanduser())
    active = os.environ.get("PREFECT_PROFILE") or data.get("active")
    return _dig(data, "profiles", str(active), "PREFECT_API_URL")


def _toml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path}, which Prefect reads, is no valid TOML: {exc}.", "Correct or remove it.") from None


def _dig(data: Any, *keys: str) -> str | None:
    for key in keys:
        data = data.get(key) if isinstance(data, dict) else None
    return data


def check_prefect_reachable(api_url: str) -> None:
    """Ask the configured API for its health, for a few seconds.

    Raises:
        TrackerError: it does not answer, or answers something else.
    """
    url = f"{api_url.rstrip('/')}/health"
    headers = {}
    if key := os.environ.get("PREFECT_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    problem = ""
    try:
        reply = httpx.get(url, timeout=REACH_TIMEOUT_S, headers=headers)
        if reply.status_code == 200:
            return
        problem = f"it answers {reply.status_code}"
    except (httpx.HTTPError, httpx.InvalidURL) as exc:
        problem = str(exc) or type(exc).__name__
    raise TrackerError(
        f"The Prefect API at {api_url} cannot be reached ({problem}).",
        "Start that server, correct PREFECT_API_URL (environment or active profile), or unset it: without one, "
        "a server is started for the run and stopped at its end.",
    )


def start_embedded(run_dir: Path) -> EmbeddedPrefect:
    """Start `prefect server` under a guard, with its database in RUN/prefect; it is not awaited.

    The environment of this process is pointed at it, so that Prefect, imported later, talks to it.
    """
    home = run_dir / "prefect"
    home.mkdir(parents=True, exist_ok=True)
    port = free_port()
    api_url = f"http://127.0.0.1:{port}/api"
    env = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
    env.update(server_environment(home, port))
    process = start_guarded(
        [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)],
        name="prefect",
        run_dir=run_dir,
        log_path=run_dir / "logs" / "prefect.log",
        env=env,
        grace_s=3.0,
    )
    os.environ.update(client_environment(home, api_url))
    return EmbeddedPrefect(api_url, home, process)


def server_environment(home: Path, port: int) -> dict[str, str]:
    """What the embedded server runs with: its own home and port, and nothing sent to the internet."""
    return {
        "PREFECT_HOME": str(home),
        "PREFECT_SERVER_API_HOST": "127.0.0.1",
        "PREFECT_SERVER_API_PORT": str(port),  # also tells the pages where the API is
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "PREFECT_SERVER_SERVICES_SCHEDULER_ENABLED": "false",  # one run, no schedules
        "PREFECT_CLI_PROMPT": "false",
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
        "DO_NOT_TRACK": "1",
    }


def client_environment(home: Path, api_url: str) -> dict[str, str]:
    return {
        "PREFECT_HOME": str(home),
        "PREFECT_API_URL": api_url,
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
        "DO_NOT_TRACK": "1",
    }


def wait_until_healthy(
    server: EmbeddedPrefect, on_progress: Callable[[str], None], timeout_s: float = START_TIMEOUT_S
) -> None:
    """Wait until the embedded server answers.

    Raises:
        ServerError: it died or took too long; holds the last lines of its log.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        code = server.process.poll()
        if code is not None:
            tail = " | ".join(line.strip() for line in server.process.log_tail(5) if line.strip())
            raise ServerError(
                f"The embedded Prefect server ended with exit code {code} while it was starting: {tail}.",
                f"Its log is {server.process.log_path}; or set PREFECT_API_URL to a server of your own.",
            )
        try:
            if httpx.get(f"{server.api_url}/health", timeout=2.0).status_code == 200:
                return
        except httpx.HTTPError:
            pass  # not up yet: the deadline below decides
        if time.monotonic() > deadline:
            raise ServerError(
                f"The embedded Prefect server did not answer within {timeout_s:.0f} s.",
                f"Its log is {server.process.log_path}; or set PREFECT_API_URL to a server of your own.",
            )
        on_progress("starting the Prefect server")
        time.sleep(0.2)
