"""The control client against a small HTTP server that records what it is asked."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from asyncgrpo_core.errors import ServerError, ServerRefusedError
from asyncgrpo_core.server.control import VLLMControl
from asyncgrpo_core.server.process import free_port

RECORDED = Path(__file__).parent.parent / "data" / "vllm_0_32"


class FakeVLLM:
    """Answers by (method, route); a value is a body, a (status, body) pair, a list of these in turn, or a function."""

    def __init__(self) -> None:
        self.replies: dict[tuple[str, str], object] = {}
        self.requests: list[tuple[str, str, dict | None]] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(size)) if size else None
                fake.requests.append((self.command, self.path, body))
                reply = fake.replies.get((self.command, self.path.split("?")[0]), (404, {"detail": "Not Found"}))
                if isinstance(reply, list):
                    reply = reply.pop(0)
                if callable(reply):
                    reply = reply(body)
                status, content = reply if isinstance(reply, tuple) else (200, reply)
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                try:
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                except BrokenPipeError:  # a client that gave up, as some tests want
                    return

            do_GET = do_POST = answer

            def log_message(self, *_: object) -> None:
                return

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,))
        self.thread.start()

    def close(self) -> None:
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()


@pytest.fixture
def fake():
    server = FakeVLLM()
    yield server
    server.close()


@pytest.fixture
def control(fake):
    with VLLMControl(fake.url, timeout_s=10.0) as client:
        yield client


# -- bodies


def test_the_calls_of_a_weight_update(fake, control):
    """F095: routes, query and bodies of one sync, in order."""
    for route in ("pause", "init_weight_transfer_engine", "start_weight_update", "update_weights"):
        fake.replies["POST", f"/{route}"] = {"message": "ok"}
    fake.replies["POST", "/finish_weight_update"] = fake.replies["POST", "/resume"] = {"message": "ok"}
    control.pause()
    control.init_weight_transfer({"a": 1})
    control.start_weight_update()
    control.update_weights({"names": ["w"]})
    control.finish_weight_update("7")
    control.resume()
    assert fake.requests == [
        ("POST", "/pause?mode=keep&clear_cache=true", None),
        ("POST", "/init_weight_transfer_engine", {"init_info": {"a": 1}}),
        ("POST", "/start_weight_update", {"is_checkpoint_format": True}),  # vLLM 0.26 answers 400 without a body
        ("POST", "/update_weights", {"update_info": {"names": ["w"]}}),
        ("POST", "/finish_weight_update", {"weight_version": "7"}),
        ("POST", "/resume", None),
    ]


def test_pause_can_keep_the_caches(fake, control):
    fake.replies["POST", "/pause"] = {"status": "paused"}
    control.pause("wait", clear_cache=False)
    assert fake.requests[0][1] == "/pause?mode=wait&clear_cache=false"


def test_a_version_is_optional(fake, control):
    fake.replies["POST", "/finish_weight_update"] = {}
    control.finish_weight_update()
    assert fake.requests[0][2] == {}


def test_an_update_that_was_left_open_is_closed_first(fake, control, caplog):
    left_open = (500, {"error": {"message": "start_weight_update called while a weight update is already active."}})
    fake.replies["POST", "/start_weight_update"] = [left_open, {"message": "ok"}]
    fake.replies["POST", "/finish_weight_update"] = {}
    control.start_weight_update()
    assert [route for _, route, _ in fake.requests] == [
        "/start_weight_update",
        "/finish_weight_update",
        "/start_weight_update",
    ]
    assert "never finished" in caplog.text


def test_an_update_that_cannot_be_finished_is_ended_by_an_empty_one(fake, control):
    left_open = (500, {"error": {"message": "start_weight_update called while a weight update is already active."}})
    fake.replies["POST", "/start_weight_update"] = [left_open, {"message": "ok"}]
    fake.replies["POST", "/finish_weight_update"] = fake.replies["POST", "/update_weights"] = (500, {"error": "no"})
    control.start_weight_update()
    assert [(route, body) for _, route, body in fake.requests[1:3]] == [
        ("/finish_weight_update", {}),
        ("/update_weights", {"update_info": {}}),
    ]


def test_another_failure_to_start_is_not_retried(fake, control):
    fake.replies["POST", "/start_weight_update"] = (500, {"error": "no"})
    with pytest.raises(ServerError, match="no"):
        control.start_weight_update()
    assert len(fake.requests) == 1


def test_small_questions(fake, control):
    fake.replies["GET", "/get_world_size"] = {"world_size": 4}
    fake.replies["GET", "/is_paused"] = {"is_paused": True}
    fake.replies["POST", "/reset_prefix_cache"] = [{"success": False}, b""]  # an older vLLM answers with nothing
    fake.replies["POST", "/weight_checker"] = {"checksums": {"w": "00"}}
    fake.replies["POST", "/collective_rpc"] = [{"results": [None, "x"]}, b""]
    assert (control.world_size(), control.is_paused()) == (4, True)
    assert (control.reset_prefix_cache(True), control.reset_prefix_cache()) == (False, True)
    assert control.weight_checker() == {"checksums": {"w": "00"}}
    assert control.collective_rpc("m", ["1"], {"k": "2"}, 3.0) == [None, "x"]
    assert control.collective_rpc("m") == []
    fake.replies["POST", "/collective_rpc"] = [{"results": [{"a": "1"}, {"b": "2"}]}, {"results": ["no"]}, b""]
    assert control.weight_fingerprints() == {"a": "1", "b": "2"}
    for _ in range(2):
        with pytest.raises(ServerRefusedError, match="gave no digests"):
            control.weight_fingerprints()
    bodies = [body for _, route, body in fake.requests if route == "/collective_rpc"]
    assert bodies[0] == {"method": "m", "args": ["1"], "kwargs": {"k": "2"}, "timeout": 3.0}
    assert fake.requests[2][1] == "/reset_prefix_cache?reset_running_requests=true"


# -- canary


def test_prompt_logprobs_picks_the_prompts_own_tokens(fake, control):
    """vLLM reports the prompt's token and, beside it, the most likely one."""
    row = {"9": {"logprob": -0.1, "rank": 1}, "6": {"logprob": -2.5, "rank": 4}}
    rows = [None, {"5": {"logprob": -1.5, "rank": 2}}, row]
    fake.replies["GET", "/v1/models"] = {"data": [{"id": "policy"}]}
    fake.replies["POST", "/v1/completions"] = {"choices": [{"prompt_logprobs": rows}]}
    assert control.prompt_logprobs([4, 5, 6]) == [-1.5, -2.5]
    assert fake.requests[-1][2] == {
        "model": "policy",
        "prompt": [4, 5, 6],
        "max_tokens": 1,
        "temperature": 1.0,
        "top_k": 1,
        "prompt_logprobs": 0,
    }
    control.prompt_logprobs([4, 5, 6], model="adapter")
    assert fake.requests[-1][2]["model"] == "adapter"


def test_prompt_logprobs_of_one_token_is_a_mistake(control):
    with pytest.raises(ValueError, match="at least two"):
        control.prompt_logprobs([4])


# -- capabilities


def test_capabilities_asks_for_what_the_server_has(fake, control):
    replies = json.loads((RECORDED / "own_command.json").read_text())
    fake.replies |= {("GET", route): reply for route, reply in replies.items()}
    assert control.capabilities().weight_transfer_backend == "shm"
    assert ("GET", "/server_info?config_format=json", None) in fake.requests
    del replies["/openapi.json"]["paths"]["/server_info"]
    fake.requests.clear()
    assert control.capabilities().weight_transfer_backend is None
    assert not any("/server_info" in route for _, route, _ in fake.requests)


# -- errors


def test_an_absent_route_names_the_switch(fake, control):
    """F095: absent route gives a hint."""
    with pytest.raises(ServerError) as error:
        control.pause()
    assert f"{fake.url} answered 404 to POST /pause: Not Found." in str(error.value)
    assert "VLLM_SERVER_DEV_MODE=1" in str(error.value)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"error": {"message": "The model `x` does not exist.", "code": 404}}, "The model `x` does not exist."),
        ({"detail": "Not Found"}, "Not Found."),
        ({"detail": [{"loc": ["body"], "msg": "Field required"}]}, "Field required"),
        ({"error": "Failed to pause generation: busy"}, "Failed to pause generation: busy."),
        (b"<html>bad gateway</html>", "<html>bad gateway</html>"),
        (b"", "(empty reply)"),
        (
            {
                "error": {
                    "message": "Call to collective_rpc method failed: Worker failed with error 'shape 'a' is wrong', "
                    "please check the stack trace above for the root cause"
                }
            },
            "/update_weights: shape 'a' is wrong. The reason",
        ),
    ],
)
def test_the_servers_own_words(fake, control, body, text):
    fake.replies["POST", "/update_weights"] = (500, body)
    with pytest.raises(ServerError) as error:
        control.update_weights({})
    assert text in str(error.value) and "answered 500 to POST /update_weights" in str(error.value)
    assert "stack trace above" not in str(error.value)


def test_a_server_without_weight_transfer_names_the_flag(fake, control):
    """F095: --weight-transfer-config."""
    fake.replies["POST", "/init_weight_transfer_engine"] = (500, {"error": "Weight transfer not configured. Please"})
    with pytest.raises(ServerError, match="--weight-transfer-config"):
        control.init_weight_transfer({})


@pytest.mark.parametrize("call", ["pause", "resume", "start_weight_update", "world_size", "capabilities"])
def test_a_hanging_server_raises_at_the_deadline(fake, call):
    """F094: sync calls of a hanging server end with an error that names the call and the setting."""
    release = threading.Event()

    def hang(_body):
        release.wait(30)
        return {}

    for method, route in (
        ("POST", "/pause"),
        ("POST", "/resume"),
        ("POST", "/start_weight_update"),
        ("GET", "/get_world_size"),
        ("GET", "/openapi.json"),
    ):
        fake.replies[method, route] = hang
    with VLLMControl(fake.url, timeout_s=0.2, info_timeout_s=0.2) as control:
        start = time.monotonic()
        try:
            with pytest.raises(ServerError, match=r"did not answer .* within 0\.2 s.*vllm_server_timeout"):
                getattr(control, call)()
            assert time.monotonic() - start < 10
        finally:
            release.set()


def test_an_unreachable_server_is_named():
    """F001: there is no colocate mode; an unreachable URL raises naming the URL."""
    url = f"http://127.0.0.1:{free_port()}"
    with VLLMControl(url, timeout_s=5.0) as control:
        assert control.is_healthy() is False
        with pytest.raises(ServerError) as error:
            control.capabilities()
        assert url in str(error.value) and "vllm_server_base_url" in str(error.value)
        with pytest.raises(ServerError) as error:
            control.wait_until_ready(0.3)
        assert url in str(error.value) and "server.url" in str(error.value)


def test_something_else_that_answers_is_no_vllm_server(fake, control):
    fake.replies["GET", "/openapi.json"] = b"<html>hello</html>"
    with pytest.raises(ServerError, match="not JSON"):
        control.capabilities()


def test_health(fake, control):
    fake.replies["GET", "/health"] = [(503, b""), b"", b""]
    assert control.is_healthy() is False
    assert control.is_healthy() is True
    control.wait_until_ready(5.0)


def test_a_proxy_variable_is_not_obeyed(fake, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")
    fake.replies["GET", "/health"] = b""
    with VLLMControl(fake.url) as control:
        assert control.is_healthy()
