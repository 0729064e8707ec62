"""Adapters at a server: flags, checks, names, and the control client's calls (texts are vLLM 0.32's own)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from asyncgrpo_core.errors import ConfigError, ServerError, ServerMismatchError
from asyncgrpo_core.server.adapters import (
    LORA_RANKS,
    AdapterWants,
    adapter_sync_obstacle,
    check_adapter_flags,
    served_rank,
)
from asyncgrpo_core.server.capabilities import ServerCapabilities
from asyncgrpo_core.server.command import server_command
from asyncgrpo_core.server.control import VLLMControl
from asyncgrpo_core.server.settings import ServerConfig
from tests.unit.test_server_checks import capabilities, recorded
from tests.unit.test_server_command import flag, needs
from tests.unit.test_server_control import FakeVLLM

URL = "http://s:8000"


def cap_of(**changes) -> ServerCapabilities:
    values = {
        "version": "0.32.0",
        "routes": frozenset({"/v1/load_lora_adapter"}),
        "served_models": ["policy"],
        "enable_lora": True,
        "max_lora_rank": 32,
        "max_loras": 6,
        "api_servers": 1,
        "device_type": "cuda",
        **changes,
    }
    return ServerCapabilities(**values)


def wants(rank: int = 32, max_staleness: int = 4, **changes) -> AdapterWants:
    return AdapterWants(rank=rank, max_staleness=max_staleness, **changes)


# -- flags


@pytest.mark.parametrize(("rank", "served"), [(1, 1), (2, 8), (4, 8), (32, 32), (40, 64), (257, 320), (512, 512)])
def test_f141_the_rank_is_rounded_up_to_one_that_vllm_takes(rank, served):
    assert served_rank(rank) == served
    assert served in LORA_RANKS


def test_f141_no_rank_above_512():
    assert served_rank(513) is None
    assert "513 is more than vLLM serves" in adapter_sync_obstacle(wants(rank=513), [cap_of()], [URL])


def test_f141_f142_values_to_restart_with():
    check_adapter_flags(wants(), cap_of())
    check_adapter_flags(wants(rank=4), cap_of(max_loras=9))  # larger ones are as good
    with pytest.raises(ServerMismatchError, match="--max-loras is 5") as caught:
        check_adapter_flags(wants(max_staleness=4), cap_of(max_loras=5))
    assert caught.value.fix == "Restart it with --max-loras 6."
    with pytest.raises(ServerMismatchError, match="rank 40") as caught:
        check_adapter_flags(wants(rank=40), cap_of())
    assert caught.value.fix == "Restart it with --max-lora-rank 64."
    with pytest.raises(ServerMismatchError) as caught:
        check_adapter_flags(wants(rank=100, max_staleness=9), cap_of())
    assert caught.value.fix == "Restart it with --max-lora-rank 128 --max-loras 11."


def test_what_a_server_does_not_report_is_not_refused():
    check_adapter_flags(wants(), cap_of(max_lora_rank=None, max_loras=None))


# -- which mode


def test_f140_what_stands_in_the_way_of_adapter_sync():
    assert adapter_sync_obstacle(wants(), [cap_of(), cap_of(enable_lora=None)], [URL, "http://t:1"]) == ""
    told = {
        "without --enable-lora": cap_of(enable_lora=False),
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1": cap_of(routes=frozenset()),
        "--api-server-count 1": cap_of(api_servers=8),
        "--lora-target-modules q_proj": cap_of(device_type="cpu", adapts_lm_head=True),
    }
    for words, cap in told.items():
        obstacle = adapter_sync_obstacle(wants(), [cap_of(), cap], [URL, "http://t:1"])
        assert words in obstacle and obstacle.startswith("http://t:1")
    assert adapter_sync_obstacle(wants(obstacle="it uses DoRA"), [cap_of()], [URL]) == "it uses DoRA"
    assert adapter_sync_obstacle(wants(), [cap_of(device_type="cpu", adapts_lm_head=False)], [URL]) == ""


def replies_with(**sections) -> ServerCapabilities:
    replies = recorded("own_command")
    config = replies["/server_info"]["vllm_config"]
    for name, values in sections.items():
        config[name] = {**(config.get(name) or {}), **values}
    return capabilities(replies)


@pytest.mark.parametrize(
    ("parallel", "engines"),
    [
        ({"data_parallel_size": 1}, 1),
        ({"data_parallel_size": 4, "data_parallel_size_local": 4}, 4),
        ({"data_parallel_size": 8, "data_parallel_size_local": 2, "data_parallel_hybrid_lb": True}, 2),
        ({"data_parallel_size": 8, "data_parallel_size_local": 1, "data_parallel_external_lb": True}, 1),
    ],
)
def test_engines_that_requests_can_be_sent_to(parallel, engines):
    assert replies_with(parallel_config=parallel).data_parallel_size == engines


def test_settings_of_adapters_are_read():
    cap = replies_with(
        lora_config={"max_lora_rank": 8, "max_loras": 3, "target_modules": ["q_proj"]},
        parallel_config={"_api_process_count": 8},
    )
    assert (cap.enable_lora, cap.max_lora_rank, cap.max_loras, cap.adapts_lm_head) == (True, 8, 3, False)
    assert cap.api_servers == 8
    assert replies_with(lora_config={"max_loras": 3, "target_modules": None}).adapts_lm_head is True
    assert capabilities(recorded("own_command")).adapts_lm_head is None


# -- the command


def test_f140_f141_f142_the_flags_of_a_server_of_adapters():
    """Merged sync stays possible: --weight-transfer-config is kept."""
    command = server_command(ServerConfig(enable_lora=True), needs(max_lora_rank=40, max_staleness=4))
    assert flag(command.argv, "--max-lora-rank") == "64"
    assert flag(command.argv, "--max-loras") == "6"
    assert "--enable-lora" in command.argv and "--weight-transfer-config" in command.argv
    assert command.env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


def test_a_cpu_server_leaves_lm_head_alone():
    """There a canary beside other requests would end the engine."""
    config = ServerConfig(enable_lora=True)
    argv = server_command(config, needs(max_lora_rank=8)).argv
    assert flag(argv, "--lora-target-modules") == "q_proj" and "lm_head" not in argv
    argv = server_command(config, needs(max_lora_rank=8, lora_modules=("v_proj",))).argv
    assert flag(argv, "--lora-target-modules") == "v_proj" and "q_proj" not in argv
    assert "--lora-target-modules" not in server_command(config, needs(max_lora_rank=8, device="cuda")).argv


def test_one_http_process_knows_an_adapter_so_there_is_one():
    argv = server_command(ServerConfig(enable_lora=True), needs(max_lora_rank=8, device="cuda", cpu_count=64)).argv
    assert flag(argv, "--api-server-count") == "1"
    with pytest.raises(ConfigError, match="api_server_count is 4"):
        server_command(ServerConfig(enable_lora=True, api_server_count=4), needs(max_lora_rank=8, device="cuda"))


# -- the control client


@pytest.fixture
def fake() -> Iterator[FakeVLLM]:
    server = FakeVLLM()
    yield server
    server.close()


@pytest.fixture
def control(fake: FakeVLLM) -> Iterator[VLLMControl]:
    with VLLMControl(fake.url, timeout_s=5.0) as client:
        yield client


def error(status: int, message: str) -> tuple[int, dict]:
    return status, {"error": {"message": message, "type": "NotFoundError", "param": None, "code": status}}


def test_f139_calls_that_load_and_unload(fake, control):
    fake.replies = {
        ("POST", "/v1/load_lora_adapter"): b"Success: LoRA adapter 'a-v1' added successfully.",
        ("POST", "/v1/unload_lora_adapter"): [
            b"Success: LoRA adapter 'a-v1' removed successfully.",
            error(404, "The lora adapter 'a-v1' cannot be found."),
        ],
        ("GET", "/v1/models"): {
            "data": [
                {"id": "policy", "root": "/models/policy", "parent": None},
                {"id": "a-v1", "root": "/cache/1", "parent": "policy"},
            ]
        },
    }
    control.load_adapter("a-v1", "/cache/1")
    assert control.adapters() == {"a-v1": "/cache/1"}
    assert control.unload_adapter("a-v1") is True
    assert control.unload_adapter("a-v1") is False
    assert fake.requests[0] == ("POST", "/v1/load_lora_adapter", {"lora_name": "a-v1", "lora_path": "/cache/1"})
    assert fake.requests[2] == ("POST", "/v1/unload_lora_adapter", {"lora_name": "a-v1"})


def test_f140_a_missing_route_is_explained(fake, control):
    with pytest.raises(ServerError) as caught:
        control.load_adapter("a-v1", "/cache/1")
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in caught.value.fix and "--enable-lora" in caught.value.fix


def test_a_folder_that_the_server_does_not_see(fake, control):
    """F144: the cache has to lie on a filesystem that both sides see."""
    message = "Loading lora a-v1 failed: No adapter found for <path>"
    fake.replies[("POST", "/v1/load_lora_adapter")] = error(404, message)
    with pytest.raises(ServerError, match="The folder is /cache/1") as caught:
        control.load_adapter("a-v1", "/cache/1")
    assert "filesystem that both see" in caught.value.fix


def test_a_refused_adapter_says_why(fake, control):
    fake.replies[("POST", "/v1/load_lora_adapter")] = error(500, "LoRA rank 40 is greater than max_lora_rank 8.")
    with pytest.raises(ServerError, match=r"rank 40 is greater"):
        control.load_adapter("a-v1", "/cache/1")
    fake.replies[("POST", "/v1/unload_lora_adapter")] = error(500, "boom")
    with pytest.raises(ServerError, match="boom"):
        control.unload_adapter("a-v1")


def test_a_canary_can_name_its_engine(fake, control):
    reply = {"choices": [{"prompt_logprobs": [None, {"6": {"logprob": -1.5}}]}]}
    fake.replies[("POST", "/v1/completions")] = reply
    seen: list[str | None] = []
    request = control._http.request

    def spy(*args, headers=None, **kwargs):
        seen.append((headers or {}).get("X-data-parallel-rank"))
        return request(*args, headers=headers, **kwargs)

    control._http.request = spy
    assert control.prompt_logprobs([5, 6], model="a-v1", engine=2) == [-1.5]
    assert control.prompt_logprobs([5, 6], model="a-v1") == [-1.5]
    assert seen == ["2", None]
    assert fake.requests[-1][2]["model"] == "a-v1"
