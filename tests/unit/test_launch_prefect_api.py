"""Which Prefect API a run talks to, and an embedded server that does not come up."""

from __future__ import annotations

import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from asyncgrpo_core.errors import ConfigError, ServerError, TrackerError
from asyncgrpo_core.guard import start_guarded
from asyncgrpo_core.launch.embedded import (
    EmbeddedPrefect,
    check_prefect_reachable,
    client_environment,
    configured_api_url,
    server_environment,
    wait_until_healthy,
)
from asyncgrpo_core.server.process import free_port


@pytest.fixture(autouse=True)
def no_settings(tmp_path, monkeypatch):
    for name in ("PREFECT_API_URL", "PREFECT_PROFILE", "PREFECT_PROFILES_PATH", "PREFECT_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path)


def write_profile(text: str) -> None:
    Path("home/profiles.toml").write_text(text)


PROFILES = (
    'active = "a"\n[profiles.a]\nPREFECT_API_URL = "http://a/api"\n[profiles.b]\nPREFECT_API_URL = "http://b/api"\n'
)


def test_without_settings_there_is_none():
    assert configured_api_url() is None
    write_profile('active = "ephemeral"\n[profiles.ephemeral]\nPREFECT_SERVER_ALLOW_EPHEMERAL_MODE = "true"\n')
    assert configured_api_url() is None


def test_the_order_of_precedence_is_prefect_s(monkeypatch):
    write_profile(PROFILES)
    assert configured_api_url() == "http://a/api"
    monkeypatch.setenv("PREFECT_PROFILE", "b")
    assert configured_api_url() == "http://b/api"
    Path("pyproject.toml").write_text('[tool.prefect.api]\nurl = "http://pyproject/api"\n')
    assert configured_api_url() == "http://pyproject/api"
    Path("prefect.toml").write_text('[api]\nurl = "http://toml/api"\n')
    assert configured_api_url() == "http://toml/api"
    Path(".env").write_text("# mine\nOTHER=1\nexport PREFECT_API_URL='http://dotenv/api'\n")
    assert configured_api_url() == "http://dotenv/api"
    monkeypatch.setenv("PREFECT_API_URL", "http://env/api")
    assert configured_api_url() == "http://env/api"


def test_our_reading_agrees_with_prefect_s():
    """The independent oracle: what Prefect itself resolves from the same files."""
    import subprocess

    write_profile(PROFILES)
    code = "from prefect.settings import get_current_settings as s; print(s().api.url)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert out.stdout.strip() == configured_api_url() == "http://a/api", out.stderr


def test_a_broken_settings_file_is_named():
    write_profile("active = ")
    with pytest.raises(ConfigError, match=r"profiles\.toml"):
        configured_api_url()


class Api(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self):
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, *args):
        """Quiet."""


@pytest.fixture
def api():
    server = HTTPServer(("127.0.0.1", 0), type("Api", (Api,), {}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(5)


def test_a_reachable_api_passes_and_one_that_answers_errors_does_not(api):
    url = f"http://127.0.0.1:{api.server_port}/api"
    check_prefect_reachable(url)
    api.RequestHandlerClass.status = 401
    with pytest.raises(TrackerError, match="answers 401"):
        check_prefect_reachable(url)


def test_an_unreachable_api_is_named_within_seconds():
    url = f"http://127.0.0.1:{free_port()}/api"
    began = time.monotonic()
    with pytest.raises(TrackerError) as caught:
        check_prefect_reachable(url)
    assert time.monotonic() - began < 10
    assert url in str(caught.value) and "PREFECT_API_URL" in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.exit_code == 1


def embedded(tmp_path: Path, code: str, port: int = 1) -> EmbeddedPrefect:
    process = start_guarded(
        [sys.executable, "-c", code], name="prefect", run_dir=tmp_path, log_path=tmp_path / "prefect.log", grace_s=1.0
    )
    return EmbeddedPrefect(f"http://127.0.0.1:{port}/api", tmp_path, process)


def test_an_embedded_server_that_dies_says_why(tmp_path):
    server = embedded(tmp_path, "print('no space left'); raise SystemExit(3)")
    try:
        with pytest.raises(ServerError) as caught:
            wait_until_healthy(server, lambda text: None, timeout_s=30)
    finally:
        server.stop()
    assert "exit code 3" in str(caught.value) and "no space left" in str(caught.value)


def test_an_embedded_server_that_stays_silent_is_given_up(tmp_path):
    server = embedded(tmp_path, "import time; time.sleep(60)", free_port())
    said: list[str] = []
    try:
        with pytest.raises(ServerError, match="within 1 s"):
            wait_until_healthy(server, said.append, timeout_s=1)
    finally:
        server.stop()
    assert said


def test_a_healthy_embedded_server_ends_the_wait(tmp_path, api):
    server = embedded(tmp_path, "import time; time.sleep(60)", api.server_port)
    try:
        wait_until_healthy(server, lambda text: None, timeout_s=30)
        assert server.process.poll() is None, "a healthy server is left running"
    finally:
        server.stop()


def test_nothing_is_sent_to_the_internet_and_the_pages_know_their_api(tmp_path):
    env = server_environment(tmp_path, 4321)
    assert env["PREFECT_SERVER_API_PORT"] == "4321"
    assert env["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false" and env["DO_NOT_TRACK"] == "1"
    assert client_environment(tmp_path, "http://x/api")["PREFECT_API_URL"] == "http://x/api"


def test_prefect_knows_every_setting_that_is_passed(tmp_path):
    """A misspelt PREFECT_ variable is ignored without a word: ask Prefect's own list of settings."""
    from prefect.settings.legacy import _get_settings_fields
    from prefect.settings.models.root import Settings

    known = set(_get_settings_fields(Settings))
    passed = {*server_environment(tmp_path, 1), *client_environment(tmp_path, "x")} - {"DO_NOT_TRACK"}
    aliases = {"PREFECT_SERVER_ALLOW_EPHEMERAL_MODE"}  # an alias of PREFECT_SERVER_EPHEMERAL_ENABLED
    assert passed - known - aliases == set()
