"""What a vLLM server says about itself, from 0.26 to 0.33, in one shape."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

TOKEN_ROUTE = "/inference/v1/generate"
# Lets the workers of a server digest their weights where they lie.
WORKER_EXTENSION = "asyncgrpo_core.sync.worker_extension.WeightFingerprints"


@dataclass(frozen=True, kw_only=True)
class ServerCapabilities:
    """A server's version, routes and settings. None where the server does not say (older vLLM, no dev mode).

    Attributes:
        version: as reported, e.g. "0.32.0+cpu".
        routes: paths of its OpenAPI description.
        served_models: names requests may use, the base model first, adapters after it.
        max_model_len: longest sequence in tokens.
        dtype: "float32", "bfloat16", "float16".
        logprobs_mode: "processed_logprobs" is what training needs.
        max_logprobs: most log-probabilities per token; -1 means no bound.
        dev_mode: the routes that pause, resume and take weights are there.
        weight_transfer_backend: "nccl", "ipc", "shm", ...; None also when none was configured.
        token_in_token_out: POST /inference/v1/generate is there.
        weight_versions: finishing an update takes a policy version, and responses report it per token.
        device_type: "cpu" or "cuda".
        chunked_prefill_possible: a prefill may be split over engine steps; deadly for seeded requests on a CPU.
        return_sampling_mask: candidate sets of top-k / top-p are reported.
        enable_lora, max_lora_rank, max_loras: adapter serving.
        adapts_lm_head: lm_head may carry an adapter too (no --lora-target-modules that leaves it out).
        model_path: folder or hub name the server loaded.
        world_size: processes that hold weights (of one data-parallel replica).
        data_parallel_size: engines behind the HTTP front, which a request can be sent to by number.
        api_servers: HTTP processes that share the port.
        worker_extension: dotted name of the class that its workers were given (`--worker-extension-cls`), "" for none.
        says_settings: it reported its configuration, so a setting that is None is one that it does not have.
        raw: the replies themselves by route; of /server_info only the configuration, not the host's environment.
    """

    version: str
    routes: frozenset[str]
    served_models: list[str]
    max_model_len: int | None = None
    dtype: str | None = None
    logprobs_mode: str | None = None
    max_logprobs: int | None = None
    dev_mode: bool = False
    weight_transfer_backend: str | None = None
    token_in_token_out: bool = False
    weight_versions: bool = False
    device_type: str | None = None
    chunked_prefill_possible: bool | None = None
    return_sampling_mask: bool | None = None
    enable_lora: bool | None = None
    max_lora_rank: int | None = None
    max_loras: int | None = None
    adapts_lm_head: bool | None = None
    model_path: str | None = None
    world_size: int | None = None
    data_parallel_size: int | None = None
    api_servers: int | None = None
    worker_extension: str | None = None
    says_settings: bool = False
    raw: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def version_number(self) -> tuple[int, int]:
        """(0, 32) for "0.32.0+cpu"; (0, 0) for a version that is not a number."""
        return version_number(self.version)


def version_number(version: str) -> tuple[int, int]:
    match = re.match(r"v?(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def parse_capabilities(
    version: dict[str, Any],
    openapi: dict[str, Any],
    models: dict[str, Any],
    server_info: dict[str, Any] | None,
) -> ServerCapabilities:
    """Make one description of the replies of /version, /openapi.json, /v1/models and /server_info (if any).

    Every field of `vllm_config` is read with a fallback of None: its layout is vLLM's own and moves.
    """
    routes = frozenset(openapi.get("paths", {}))
    cards = models.get("data", [])
    config = (server_info or {}).get("vllm_config")
    config = config if isinstance(config, dict) else {}
    env = (server_info or {}).get("vllm_env") or {}
    model, scheduler, lora = (_section(config, f"{part}_config") for part in ("model", "scheduler", "lora"))
    parallel = _section(config, "parallel_config")
    max_model_len = model.get("max_model_len") or next(
        (c["max_model_len"] for c in cards if c.get("max_model_len")), None
    )
    return ServerCapabilities(
        version=str(version.get("version", "")),
        routes=routes,
        served_models=[card["id"] for card in cards],
        max_model_len=max_model_len,
        dtype=_plain_dtype(model.get("dtype")),
        logprobs_mode=model.get("logprobs_mode"),
        max_logprobs=model.get("max_logprobs"),
        dev_mode="/pause" in routes or env.get("VLLM_SERVER_DEV_MODE") is True,
        weight_transfer_backend=_section(config, "weight_transfer_config").get("backend"),
        token_in_token_out=TOKEN_ROUTE in routes,
        weight_versions=_has_body(openapi, "/finish_weight_update"),
        device_type=_device_type(config, version),
        chunked_prefill_possible=_chunked_prefill(scheduler, max_model_len),
        return_sampling_mask=_sampling_mask(config, model),
        enable_lora=bool(lora) if config else None,
        max_lora_rank=lora.get("max_lora_rank"),
        max_loras=lora.get("max_loras"),
        adapts_lm_head="lm_head" in (lora.get("target_modules") or ["lm_head"]) if lora else None,
        model_path=model.get("model") or next((c["root"] for c in cards if c.get("root")), None),
        world_size=parallel.get("world_size"),
        data_parallel_size=_engines(parallel),
        api_servers=parallel.get("_api_process_count"),
        worker_extension=parallel.get("worker_extension_cls"),
        says_settings=bool(config),
        raw={"/version": version, "/v1/models": models, "/server_info": {"vllm_config": config} if config else None},
    )


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    section = config.get(name)
    return section if isinstance(section, dict) else {}


def _plain_dtype(value: Any) -> str | None:
    return str(value).removeprefix("torch.") if value is not None else None


def _has_body(openapi: dict[str, Any], route: str) -> bool:
    return "requestBody" in openapi.get("paths", {}).get(route, {}).get("post", {})


def _device_type(config: dict[str, Any], version: dict[str, Any]) -> str | None:
    device = _section(config, "device_config")
    for value in (device.get("device_type"), device.get("device")):
        if value:
            return str(value).split(":")[0]
    return "cpu" if "cpu" in str(version.get("version", "")) else None


def _chunked_prefill(scheduler: dict[str, Any], max_model_len: int | None) -> bool | None:
    enabled, batch, seqs = (
        scheduler.get(k) for k in ("enable_chunked_prefill", "max_num_batched_tokens", "max_num_seqs")
    )
    if enabled is None or batch is None or seqs is None or max_model_len is None:
        return None
    return bool(enabled) and batch < seqs * max_model_len


def _engines(parallel: dict[str, Any]) -> int | None:
    """Data-parallel engines that this HTTP front sends requests to: with an outside balancer, those of its host."""
    local = parallel.get("data_parallel_external_lb") or parallel.get("data_parallel_hybrid_lb")
    return parallel.get("data_parallel_size_local" if local else "data_parallel_size")


def _sampling_mask(config: dict[str, Any], model: dict[str, Any]) -> bool | None:
    for section in (model, config):
        if "return_sampling_mask" in section:
            return bool(section["return_sampling_mask"])
    return None
