"""What a server says about itself, and what is refused (recorded replies of vLLM 0.32 on a CPU)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from asyncgrpo_core.errors import ServerMismatchError
from asyncgrpo_core.server.capabilities import ServerCapabilities, parse_capabilities, version_number
from asyncgrpo_core.server.checks import ServerWants, check_server, returns_candidate_sets

RECORDED = Path(__file__).parent.parent / "data" / "vllm_0_32"


def recorded(name: str) -> dict:
    return json.loads((RECORDED / f"{name}.json").read_text())


def capabilities(replies: dict) -> ServerCapabilities:
    return parse_capabilities(*(replies.get(r) for r in ("/version", "/openapi.json", "/v1/models", "/server_info")))


@pytest.fixture
def own() -> ServerCapabilities:
    """A server started by our own command."""
    return capabilities(recorded("own_command"))


def wants(**changes) -> ServerWants:
    values = {
        "served_model_name": "policy",
        "num_sampler_logprobs": 8,
        "dtype": "float32",
        "needed_len": 512,
        "weight_transfer_backend": "shm",
        **changes,
    }
    return ServerWants(**values)


# -- reading


def test_recorded_replies_of_our_own_command(own):
    """F102: max_model_len is what the server reports."""
    assert (own.version, own.version_number) == ("0.32.0", (0, 32))
    assert own.served_models == ["policy"]
    assert (own.max_model_len, own.dtype, own.device_type) == (512, "float32", "cpu")
    assert (own.logprobs_mode, own.max_logprobs) == ("processed_logprobs", 20)
    assert (own.dev_mode, own.weight_transfer_backend, own.world_size) == (True, "shm", 1)
    assert (own.token_in_token_out, own.weight_versions) == (True, True)
    assert own.chunked_prefill_possible is False
    assert (own.return_sampling_mask, own.enable_lora) == (False, False)
    assert own.model_path == "/models/policy"
    assert (own.worker_extension, own.data_parallel_size) == ("", 1)  # recorded before our command named one
    assert {"/pause", "/update_weights", "/v1/completions"} <= own.routes


def test_recorded_replies_of_the_references_command():
    """Without --enable-scale-out there is no token route; the rest is there."""
    cap = capabilities(recorded("reference_command"))
    assert cap.token_in_token_out is False
    assert cap.weight_transfer_backend == "nccl"
    assert cap.dev_mode is True


def test_a_server_without_dev_mode_says_less_but_its_length():
    """F102: /v1/models reports max_model_len even without dev mode."""
    replies = recorded("own_command")
    del replies["/server_info"]
    paths = replies["/openapi.json"]["paths"]
    replies["/openapi.json"]["paths"] = {p: v for p, v in paths.items() if p.startswith(("/v1", "/version"))}
    cap = capabilities(replies)
    assert cap.max_model_len == 512 and cap.model_path == "/models/policy"
    assert (cap.dev_mode, cap.says_settings) == (False, False)
    unsaid = (cap.dtype, cap.logprobs_mode, cap.max_logprobs, cap.weight_transfer_backend, cap.device_type)
    assert unsaid == (None,) * 5
    assert (cap.chunked_prefill_possible, cap.enable_lora, cap.return_sampling_mask) == (None,) * 3


def test_an_older_server_takes_no_weight_version():
    replies = recorded("own_command")
    del replies["/openapi.json"]["paths"]["/finish_weight_update"]["post"]["requestBody"]
    assert capabilities(replies).weight_versions is False


@pytest.mark.parametrize(
    ("batch", "seqs", "enabled", "possible"),
    [(32768, 64, True, False), (32767, 64, True, True), (512, 64, False, False), (2048, 64, True, True)],
)
def test_chunked_prefill_is_possible_when_a_full_batch_does_not_fit(batch, seqs, enabled, possible):
    replies = recorded("own_command")
    scheduler = replies["/server_info"]["vllm_config"]["scheduler_config"]
    scheduler |= {"max_num_batched_tokens": batch, "max_num_seqs": seqs, "enable_chunked_prefill": enabled}
    assert capabilities(replies).chunked_prefill_possible is possible


def test_a_configuration_that_came_as_text_is_not_read():
    replies = recorded("own_command")
    replies["/server_info"]["vllm_config"] = "model='x', dtype=torch.float32"
    assert capabilities(replies).dtype is None


@pytest.mark.parametrize(
    ("text", "number"), [("0.32.0", (0, 32)), ("v0.33.1rc1+cpu", (0, 33)), ("1.0", (1, 0)), ("dev", (0, 0))]
)
def test_version_number(text, number):
    assert version_number(text) == number


# -- accepting


def test_our_own_server_is_accepted_without_a_word(own):
    assert check_server(own, wants()) == []
    assert check_server(own, wants(longest_len=own.max_model_len)) == []


def test_the_references_own_command_line_is_accepted():
    """No --enable-scale-out, nccl, several API servers; on the GPU it is made for."""
    cap = capabilities(recorded("reference_command"))
    on_gpu = replace(cap, device_type="cuda", chunked_prefill_possible=True)
    name = on_gpu.served_models[0]
    for backend in ("nccl", None):
        assert check_server(on_gpu, wants(served_model_name=name, weight_transfer_backend=backend)) == []


def test_a_server_that_says_nothing_is_accepted_with_a_warning(own):
    silent = replace(
        own,
        **dict.fromkeys(["dtype", "logprobs_mode", "max_logprobs", "weight_transfer_backend", "device_type"]),
        chunked_prefill_possible=None,
        says_settings=False,
    )
    (warning,) = check_server(silent, wants())
    assert "--logprobs-mode" in warning


def test_dtype_mismatch_is_one_warning(own):
    """F104: a bf16 server beside a float32 trainer runs, with one warning."""
    (warning,) = check_server(replace(own, dtype="bfloat16"), wants())
    assert "bfloat16" in warning and "--dtype float32" in warning
    assert check_server(replace(own, dtype="bfloat16"), wants(dtype="auto")) == []


def test_versions_outside_the_range_are_a_warning(own):
    for version in ("0.25.1", "0.34.0"):
        (warning,) = check_server(replace(own, version=version), wants())
        assert version in warning and "0.26 to 0.33" in warning


# -- refusing


@pytest.mark.parametrize(
    ("found", "wanted", "words"),
    [
        ({"logprobs_mode": "raw_logprobs"}, {}, ["--logprobs-mode", "'raw_logprobs'", "processed_logprobs"]),  # F096
        ({"max_logprobs": 5}, {}, ["num_sampler_logprobs is 8", "--max-logprobs is 5", "--max-logprobs 8"]),  # F105
        ({"max_model_len": 256}, {}, ["--max-model-len is 256", "--max-model-len 512"]),
        ({}, {"needed_len": 300, "longest_len": 500}, ["--max-model-len is 512", "rotary", "--max-model-len 500"]),
        ({"served_models": ["other"]}, {}, ["'other'", "'policy'", "--served-model-name policy"]),
        ({"dev_mode": False}, {}, ["VLLM_SERVER_DEV_MODE=1"]),  # F095
        ({"weight_transfer_backend": None}, {}, ["--weight-transfer-config is not set", '"shm"']),  # F095
        ({"weight_transfer_backend": "nccl"}, {}, ["'nccl'", "'shm'", "weight_sync_backend"]),
        ({"chunked_prefill_possible": True}, {}, ["--max-num-batched-tokens", "--no-enable-chunked-prefill"]),
        ({"return_sampling_mask": True}, {}, ["--return-sampling-mask", "top_k"]),
        (  # F135, F136
            {"device_type": "cuda"},
            {"restricted_sampling": True},
            ["without --return-sampling-mask:", "VLLM_USE_V2_MODEL_RUNNER=1"],
        ),
        (  # F135
            {"device_type": "cuda", "return_sampling_mask": True, "token_in_token_out": False},
            {"restricted_sampling": True},
            ["without --enable-scale-out:"],
        ),
        (  # F135: the oldest version that can
            {"device_type": "cuda", "version": "0.28.0", "token_in_token_out": False},
            {"restricted_sampling": True},
            ["without --return-sampling-mask and --enable-scale-out:"],
        ),
    ],
)
def test_a_mismatch_names_flag_value_found_and_value_wanted(own, found, wanted, words):
    with pytest.raises(ServerMismatchError) as error:
        check_server(replace(own, **found), wants(**wanted))
    for word in words:
        assert word in str(error.value)
    assert error.value.exit_code == 2


@pytest.mark.parametrize("max_logprobs", [8, 20, -1])
def test_enough_log_probabilities(own, max_logprobs):
    """F105: -1 is vLLM's word for no bound."""
    assert check_server(replace(own, max_logprobs=max_logprobs), wants()) == []


def test_split_prefills_matter_only_to_seeded_requests_on_a_cpu(own):
    split = replace(own, chunked_prefill_possible=True)
    assert check_server(split, wants(seeded_requests=False)) == []
    assert check_server(replace(split, device_type="cuda"), wants()) == []


def test_f137_restricted_sampling_where_no_candidate_sets_can_be_had_is_one_warning(own):
    old = replace(own, device_type="cuda", version="0.27.0", token_in_token_out=False, return_sampling_mask=None)
    for cap, word in ((own, "on a CPU"), (old, "0.27.0, before 0.28")):
        (warning,) = check_server(cap, wants(restricted_sampling=True))
        assert "biases the importance ratio" in warning and word in warning
        assert not returns_candidate_sets(cap)


def test_a_server_that_does_not_say_whether_it_returns_candidate_sets_is_one_warning(own):
    silent = replace(own, device_type=None, return_sampling_mask=None)
    (warning,) = check_server(silent, wants(restricted_sampling=True))
    assert "does not say" in warning and "--return-sampling-mask" in warning


def test_f135_restricted_sampling_with_candidate_sets_is_accepted(own):
    full = replace(own, device_type="cuda", return_sampling_mask=True)
    assert check_server(full, wants(restricted_sampling=True)) == []
    assert returns_candidate_sets(full)


def test_no_backend_wanted_needs_no_dev_mode(own):
    assert check_server(replace(own, dev_mode=False), wants(weight_transfer_backend=None)) == []
