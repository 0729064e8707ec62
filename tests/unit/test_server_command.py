"""The server's argument list and environment (F095: dev mode and --weight-transfer-config expose the sync routes)."""

from __future__ import annotations

import importlib
import json
import sys

import pytest
from pydantic import ValidationError

from asyncgrpo_core.errors import ConfigError
from asyncgrpo_core.server.capabilities import WORKER_EXTENSION
from asyncgrpo_core.server.command import ServerNeeds, api_server_count, server_command
from asyncgrpo_core.server.settings import ServerConfig


def needs(**changes) -> ServerNeeds:
    values = {
        "model_path": "/models/policy",
        "served_model_name": "policy",
        "dtype": "float32",
        "max_model_len": 512,
        "num_sampler_logprobs": 8,
        "max_concurrent_rollouts": 512,
        "device": "cpu",
        "backend": "shm",
        "cpu_count": 2,
        "port": 4321,
        "seed": 7,
        **changes,
    }
    return ServerNeeds(**values)


def flag(argv: list[str], name: str) -> str:
    assert argv.count(name) == 1, f"{name} in {argv}"
    return argv[argv.index(name) + 1]


def test_cpu_command_snapshot():
    """F095, F096, F105: the whole command of a CPU server, as it was seen to start and serve."""
    command = server_command(ServerConfig(), needs())
    assert command.argv == [
        *[sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", "/models/policy"],
        *["--host", "127.0.0.1", "--port", "4321", "--served-model-name", "policy", "--load-format", "dummy"],
        *["--dtype", "float32", "--seed", "7", "--max-model-len", "512"],
        *["--logprobs-mode", "processed_logprobs", "--max-logprobs", "20"],
        *["--weight-transfer-config", '{"backend": "shm"}', "--generation-config", "vllm"],
        *["--disable-uvicorn-access-log", "--enable-scale-out"],
        *["--worker-extension-cls", "asyncgrpo_core.sync.worker_extension.WeightFingerprints"],
        *["--enforce-eager", "--max-num-seqs", "64", "--max-num-batched-tokens", "32768"],
    ]
    assert command.env == {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60",
        "PYTHONUNBUFFERED": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    assert command.base_url == "http://127.0.0.1:4321"


def test_cuda_command_snapshot():
    """F095: the reference's own flags on a GPU host, plus the token route."""
    config = ServerConfig(gpu_memory_utilization=0.6, python="/gpu/bin/python", load_format="auto")
    changes = {"device": "cuda", "backend": "nccl", "cpu_count": 64, "dtype": "bfloat16", "max_model_len": None}
    command = server_command(config, needs(**changes))
    assert command.argv == [
        *["/gpu/bin/python", "-m", "vllm.entrypoints.cli.main", "serve", "/models/policy", "--api-server-count", "8"],
        *["--host", "127.0.0.1", "--port", "4321", "--served-model-name", "policy", "--load-format", "auto"],
        *["--dtype", "bfloat16", "--seed", "7", "--logprobs-mode", "processed_logprobs", "--max-logprobs", "20"],
        *["--weight-transfer-config", '{"backend": "nccl"}', "--generation-config", "vllm"],
        *["--disable-uvicorn-access-log", "--enable-scale-out"],
        *["--worker-extension-cls", "asyncgrpo_core.sync.worker_extension.WeightFingerprints"],
        *["--gpu-memory-utilization", "0.6"],
    ]
    assert command.env == {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60",
        "PYTHONUNBUFFERED": "1",
    }


@pytest.mark.parametrize("own", [["--worker-extension-cls", "mine.Worker"], ["--worker-extension-cls=mine.Worker"]])
def test_a_worker_extension_of_the_users_is_left_alone(own):
    argv = server_command(ServerConfig(extra_args=own), needs()).argv
    assert [argument for argument in argv if "extension" in argument] == own[:1] and argv[-len(own) :] == own


def test_the_worker_extension_is_the_class_that_sync_has():
    module, _, name = WORKER_EXTENSION.rpartition(".")
    assert callable(getattr(importlib.import_module(module), name).weight_fingerprints)


@pytest.mark.parametrize(
    ("device", "cpus", "count"),
    [
        *[("cuda", 1, 1), ("cuda", 2, 1), ("cuda", 4, 2), ("cuda", 15, 7), ("cuda", 16, 8), ("cuda", 128, 8)],
        *[("cpu", 2, 1), ("cpu", 64, 1)],
    ],
)
def test_api_server_count_rule(device, cpus, count):
    """F097."""
    assert api_server_count(ServerConfig(), needs(device=device, cpu_count=cpus)) == count


def test_api_server_count_given_needs_the_serve_entry():
    argv = server_command(ServerConfig(api_server_count=3), needs()).argv
    assert flag(argv, "--api-server-count") == "3"
    assert argv[2] == "vllm.entrypoints.cli.main"


@pytest.mark.parametrize(
    ("seqs", "length", "given", "batch", "chunking_off"),
    [
        (64, 512, None, 32768, False),  # every sequence at full length fits
        (64, 1024, None, 65536, False),
        (64, 4096, None, 16384, True),  # it would be too large a batch: whole prefills only
        (8, 32768, None, 32768, True),  # room for one whole sequence at least
        (64, 512, 1024, 1024, True),
        (2, 512, 1024, 1024, False),
    ],
)
def test_a_cpu_server_never_splits_a_prefill(seqs, length, given, batch, chunking_off):
    config = ServerConfig(max_num_seqs=seqs, max_num_batched_tokens=given)
    argv = server_command(config, needs(max_model_len=length)).argv
    assert flag(argv, "--max-num-batched-tokens") == str(batch)
    assert ("--no-enable-chunked-prefill" in argv) is chunking_off
    assert chunking_off or batch >= seqs * length
    assert batch >= length


def test_a_cpu_server_of_unknown_length_has_chunking_off():
    assert "--no-enable-chunked-prefill" in server_command(ServerConfig(), needs(max_model_len=None)).argv


def test_too_small_a_batch_is_refused():
    with pytest.raises(ConfigError, match=r"server\.max_num_batched_tokens is 256.*at least 512"):
        server_command(ServerConfig(max_num_batched_tokens=256), needs())


def test_log_probabilities_grow_with_the_need():
    assert flag(server_command(ServerConfig(), needs(num_sampler_logprobs=50)).argv, "--max-logprobs") == "50"
    assert flag(server_command(ServerConfig(max_logprobs=64), needs()).argv, "--max-logprobs") == "64"


def test_settings_win_over_needs():
    config = ServerConfig(dtype="bfloat16", max_model_len=128, enforce_eager=False, omp_threads=3, kv_cache_gib=2)
    command = server_command(config, needs(cpu_count=64))
    assert flag(command.argv, "--dtype") == "bfloat16"
    assert flag(command.argv, "--max-model-len") == "128"
    assert "--enforce-eager" not in command.argv
    assert (command.env["OMP_NUM_THREADS"], command.env["VLLM_CPU_KVCACHE_SPACE"]) == ("3", "2")


def test_threads_are_a_quarter_of_the_cores():
    got = [server_command(ServerConfig(), needs(cpu_count=n)).env["OMP_NUM_THREADS"] for n in (1, 2, 7, 8, 64)]
    assert got == ["1", "1", "1", "2", "16"]


def test_few_rollouts_need_few_sequences():
    assert flag(server_command(ServerConfig(), needs(max_concurrent_rollouts=8)).argv, "--max-num-seqs") == "8"


def test_lora_flags_serve_every_version_that_may_be_in_use():
    config = ServerConfig(enable_lora=True)
    command = server_command(config, needs(max_lora_rank=9, max_staleness=4))
    assert flag(command.argv, "--max-lora-rank") == "16"
    assert flag(command.argv, "--max-loras") == "6"
    assert command.env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    with pytest.raises(ConfigError, match="no adapter"):
        server_command(config, needs())
    with pytest.raises(ConfigError, match="1024"):
        server_command(config, needs(max_lora_rank=1024))


def test_the_backend_decides_its_flag_and_environment():
    command = server_command(ServerConfig(), needs(device="cuda", backend="ipc"))
    assert json.loads(flag(command.argv, "--weight-transfer-config")) == {"backend": "ipc"}
    assert command.env["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "1"


def test_f135_restricted_sampling_sets_both_flags_and_the_runner():
    """F136: and the runner that can do it is chosen, whatever this vLLM would choose."""
    command = server_command(ServerConfig(), needs(device="cuda", return_sampling_mask=True))
    assert {"--return-sampling-mask", "--enable-scale-out"} <= set(command.argv)
    assert command.env["VLLM_USE_V2_MODEL_RUNNER"] == "1"


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        ({}, {"device": "cuda"}),  # nothing is restricted: the flag would refuse the requests
        ({}, {"return_sampling_mask": True}),  # a CPU server cannot
        ({"token_route": False}, {"device": "cuda", "return_sampling_mask": True}),  # only that route returns them
    ],
)
def test_f135_no_sampling_mask_where_it_cannot_be_had_or_is_not_wanted(config, changes):
    command = server_command(ServerConfig(**config), needs(**changes))
    assert "--return-sampling-mask" not in command.argv and "VLLM_USE_V2_MODEL_RUNNER" not in command.env


def test_extra_arguments_come_last_and_environment_wins():
    config = ServerConfig(extra_args=["--quantization", "fp8"], env={"OMP_NUM_THREADS": "5"}, token_route=False)
    command = server_command(config, needs())
    assert command.argv[-2:] == ["--quantization", "fp8"]
    assert command.env["OMP_NUM_THREADS"] == "5"
    assert "--enable-scale-out" not in command.argv


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"extra_args": ["--port", "1"]}, r"--port.*server\.port"),
        ({"extra_args": ["--logprobs-mode=raw_logprobs"]}, "--logprobs-mode.*processed_logprobs"),
        ({"url": "localhost:8000"}, "http://"),
        ({"url": "http://h:1", "port": 2}, "remove one of the two"),
        ({"prot": 1}, "prot"),
        ({"port": 70000}, "65535"),
    ],
)
def test_contradictions_are_refused(values, words):
    with pytest.raises(ValidationError, match=words):
        ServerConfig(**values)


def test_a_url_loses_its_last_slash():
    assert ServerConfig(url="http://h:1/").url == "http://h:1"
