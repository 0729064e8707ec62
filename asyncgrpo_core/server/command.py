"""The argument list and environment of a vLLM server, as a pure function of settings and needs."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

from asyncgrpo_core.errors import ConfigError
from asyncgrpo_core.server.adapters import LINEAR_LAYERS, LORA_RANKS, needed_max_loras, served_rank
from asyncgrpo_core.server.capabilities import WORKER_EXTENSION
from asyncgrpo_core.server.settings import ServerConfig

# Below this, max_num_batched_tokens may simply hold every sequence at full length (see `_cpu_batching`).
_CHEAP_BATCH_TOKENS = 65536
_CPU_MAX_SEQS = 64
_EXTENSION_FLAG = "--worker-extension-cls"  # `extra_args` may name another class


@dataclass(frozen=True, kw_only=True)
class ServerNeeds:
    """What the rest of the config asks of the server.

    Attributes:
        model_path: model folder or hub name.
        served_model_name: the name requests will use.
        dtype: type the trainer computes in, e.g. "float32".
        max_model_len: longest sequence in tokens; None leaves it to the model's own limit.
        num_sampler_logprobs: top log-probabilities per token that requests will ask for.
        max_concurrent_rollouts: most requests in flight.
        device: "cpu" or "cuda".
        backend: weight transfer, "shm", "nccl" or "ipc".
        cpu_count: cores of this host.
        port: TCP port to listen on.
        seed: vLLM's own seed (dummy weights, requests without a seed).
        max_lora_rank: highest adapter rank to serve, with `ServerConfig.enable_lora`.
        lora_modules: names of the layers that the adapter sits on; None: the usual linear ones.
        max_staleness: decides how many adapter versions are kept.
        return_sampling_mask: requests use top-k, top-p or min-p and the candidate sets are wanted. GPU only, and only
            with `ServerConfig.token_route`, whose replies carry them.
    """

    model_path: str
    served_model_name: str
    dtype: str
    max_model_len: int | None
    num_sampler_logprobs: int
    max_concurrent_rollouts: int
    device: str
    backend: str
    cpu_count: int
    port: int
    seed: int = 0
    max_lora_rank: int | None = None
    lora_modules: tuple[str, ...] | None = None
    max_staleness: int = 4
    return_sampling_mask: bool = False


@dataclass(frozen=True)
class ServerCommand:
    """Program, arguments and the environment variables to add to this process's own."""

    argv: list[str]
    env: dict[str, str]
    host: str
    port: int

    @property
    def base_url(self) -> str:
        host = "127.0.0.1" if self.host == "0.0.0.0" else self.host
        return f"http://{host}:{self.port}"


def api_server_count(server: ServerConfig, needs: ServerNeeds) -> int:
    """HTTP front processes: serialising top log-probabilities is their work (reference: 8 keep it under 3 %).

    On a GPU host one per two cores, at least 1 and at most the reference's 8. On a CPU host 1: the engine computes
    on the same cores, and the module entry point, which works in every CPU build, has no other number. With adapters
    1 too: only the process that loaded an adapter knows it (vLLM refuses to start with more).

    Raises:
        ConfigError: several, and adapters.
    """
    if server.enable_lora:
        if (server.api_server_count or 1) > 1:
            raise ConfigError(
                f"server.api_server_count is {server.api_server_count} and server.enable_lora is true: an adapter is "
                "known only to the HTTP process that loaded it.",
                "Remove server.api_server_count, or set server.enable_lora to false (merged weights are sent then).",
            )
        return 1
    if server.api_server_count is not None:
        return server.api_server_count
    if needs.device == "cpu":
        return 1
    return max(1, min(8, needs.cpu_count // 2))


def server_command(server: ServerConfig, needs: ServerNeeds) -> ServerCommand:
    """Arguments and environment of the server that `needs` asks for.

    Raises:
        ConfigError: needs that no vLLM flag can meet.
    """
    count = api_server_count(server, needs)
    argv = [*_entry_point(server, needs, count), "--host", server.host, "--port", str(needs.port)]
    argv += ["--served-model-name", needs.served_model_name, "--load-format", server.load_format]
    argv += ["--dtype", server.dtype or needs.dtype, "--seed", str(needs.seed)]
    max_model_len = server.max_model_len or needs.max_model_len
    if max_model_len is not None:
        argv += ["--max-model-len", str(max_model_len)]
    argv += ["--logprobs-mode", "processed_logprobs"]
    argv += ["--max-logprobs", str(server.max_logprobs or max(20, needs.num_sampler_logprobs))]
    argv += ["--weight-transfer-config", json.dumps({"backend": needs.backend})]
    # Without this the model folder's generation_config.json would restrict requests that leave a field out.
    argv += ["--generation-config", "vllm"]
    argv += ["--disable-uvicorn-access-log"]  # one line per rollout request would drown the log
    if server.token_route:
        argv += ["--enable-scale-out"]
    if not any(argument.partition("=")[0] == _EXTENSION_FLAG for argument in server.extra_args):
        argv += [_EXTENSION_FLAG, WORKER_EXTENSION]
    argv += _lora_flags(server, needs)
    env = _common_env(server, needs)
    if needs.device == "cpu":
        argv += _cpu_flags(server, needs, max_model_len)
        env |= _cpu_env(server, needs)
    else:
        argv += _cuda_flags(server, needs)
    return ServerCommand([*argv, *server.extra_args], {**env, **server.env}, server.host, needs.port)


def _entry_point(server: ServerConfig, needs: ServerNeeds, count: int) -> list[str]:
    """`vllm serve` where several API servers are wanted, else the module that every build can run.

    The console command asks for the metadata of a distribution called `vllm`, which the CPU build does not have.
    """
    python = server.python or sys.executable
    if needs.device == "cpu" and count == 1:
        return [python, "-m", "vllm.entrypoints.openai.api_server", "--model", needs.model_path]
    serve = [python, "-m", "vllm.entrypoints.cli.main", "serve", needs.model_path]
    return [*serve, "--api-server-count", str(count)]


def _common_env(server: ServerConfig, needs: ServerNeeds) -> dict[str, str]:
    env = {
        "VLLM_SERVER_DEV_MODE": "1",  # the routes that pause, resume and take weights
        "VLLM_NO_USAGE_STATS": "1",
        # vLLM's own 5 s end just when a busy rollout worker sends its next request on the connection
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60",
        "PYTHONUNBUFFERED": "1",
    }
    if server.enable_lora:
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if _returns_sampling_mask(server, needs):
        env["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the only runner that can, whatever this vLLM chooses by itself
    if needs.backend == "ipc":
        env["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # device handles travel pickled
    return env


def _returns_sampling_mask(server: ServerConfig, needs: ServerNeeds) -> bool:
    return needs.return_sampling_mask and needs.device != "cpu" and server.token_route


def _lora_flags(server: ServerConfig, needs: ServerNeeds) -> list[str]:
    if not server.enable_lora:
        return []
    if needs.max_lora_rank is None:
        raise ConfigError(
            "server.enable_lora is true, but the run trains no adapter.", "Set it to false, or configure peft."
        )
    rank = served_rank(needs.max_lora_rank)
    if rank is None:
        raise ConfigError(
            f"The adapter's rank {needs.max_lora_rank} is more than vLLM serves ({LORA_RANKS[-1]}).",
            "Lower the rank, or set server.enable_lora to false (merged weights are sent then).",
        )
    flags = ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", str(needed_max_loras(needs.max_staleness))]
    if needs.device == "cpu":
        # Without it vLLM prepares lm_head for adapters too, and there a request for prompt log-probabilities (our
        # canary) that is computed together with others ends the CPU engine.
        flags += ["--lora-target-modules", *(needs.lora_modules or LINEAR_LAYERS)]
    return flags


def _cuda_flags(server: ServerConfig, needs: ServerNeeds) -> list[str]:
    flags: list[str] = []
    if server.gpu_memory_utilization is not None:
        flags += ["--gpu-memory-utilization", str(server.gpu_memory_utilization)]
    if server.max_num_seqs is not None:
        flags += ["--max-num-seqs", str(server.max_num_seqs)]
    if server.max_num_batched_tokens is not None:
        flags += ["--max-num-batched-tokens", str(server.max_num_batched_tokens)]
    if server.enforce_eager:
        flags += ["--enforce-eager"]
    if _returns_sampling_mask(server, needs):
        flags += ["--return-sampling-mask"]
    return flags


def _cpu_flags(server: ServerConfig, needs: ServerNeeds, max_model_len: int | None) -> list[str]:
    flags = [] if server.enforce_eager is False else ["--enforce-eager"]
    max_num_seqs = server.max_num_seqs or min(needs.max_concurrent_rollouts, _CPU_MAX_SEQS)
    flags += ["--max-num-seqs", str(max_num_seqs)]
    return flags + _cpu_batching(server, max_num_seqs, max_model_len)


def _cpu_batching(server: ServerConfig, max_num_seqs: int, max_model_len: int | None) -> list[str]:
    """Make it impossible that a prefill is split into chunks.

    A request with a seed kills the CPU engine ('CPU Generator does not use offset') as soon as its prefill is
    split. A batch that holds every sequence at full length never splits one; where that is too large a batch,
    chunking is switched off, which only needs room for one sequence.
    """
    if max_model_len is None:
        return ["--no-enable-chunked-prefill"]
    full = max_num_seqs * max_model_len
    batch = server.max_num_batched_tokens or (full if full <= _CHEAP_BATCH_TOKENS else max(max_model_len, 16384))
    if batch < max_model_len:
        raise ConfigError(
            f"server.max_num_batched_tokens is {batch}, less than one sequence of {max_model_len} tokens; on a CPU "
            "server prefills must not be split (a seeded request would end the engine).",
            f"Set it to at least {max_model_len}, or leave it out.",
        )
    flags = ["--max-num-batched-tokens", str(batch)]
    return flags if batch >= full else [*flags, "--no-enable-chunked-prefill"]


def _cpu_env(server: ServerConfig, needs: ServerNeeds) -> dict[str, str]:
    threads = server.omp_threads or max(1, needs.cpu_count // 4)
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(server.kv_cache_gib),
        # Without a binding of its own vLLM obeys OMP_NUM_THREADS; more spinning threads than cores starve each other.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
    }
