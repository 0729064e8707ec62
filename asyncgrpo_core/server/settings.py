"""The `server` section of a run's config: an existing vLLM server, or how to start one."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

# Flags that this project sets itself: giving them as extra arguments would contradict the setting of that name.
_OWN_FLAGS = {
    "--model": "model.path",
    "--served-model-name": "model.path",
    "--host": "server.host",
    "--port": "server.port",
    "--dtype": "server.dtype",
    "--load-format": "server.load_format",
    "--max-model-len": "server.max_model_len",
    "--max-logprobs": "server.max_logprobs",
    "--max-num-seqs": "server.max_num_seqs",
    "--max-num-batched-tokens": "server.max_num_batched_tokens",
    "--api-server-count": "server.api_server_count",
    "--gpu-memory-utilization": "server.gpu_memory_utilization",
    "--enforce-eager": "server.enforce_eager",
    "--enable-scale-out": "server.token_route",
    "--enable-lora": "server.enable_lora",
    "--weight-transfer-config": "training.weight_sync_backend",
    "--generation-config": "no setting: requests say everything themselves",
    "--logprobs-mode": "no setting: it has to be processed_logprobs",
}


class ServerConfig(BaseModel):
    """Where rollouts are generated. With `url` the other fields are not used: that server has its own flags."""

    model_config = ConfigDict(extra="forbid")

    url: str | list[str] | None = Field(
        None,
        description="Base URL of a server that already runs, e.g. http://host:8000, or a list of several that serve "
        "the same policy. None starts one.",
    )
    python: str | None = Field(
        None,
        description="Interpreter of another environment that holds vLLM; this package must be importable there "
        "(its plugin registers the weight transfer). None: the interpreter that runs this.",
    )
    host: str = Field("127.0.0.1", description="Address the started server listens on.")
    port: int | None = Field(None, ge=1, le=65535, description="Its port. None takes a free one.")
    max_model_len: int | None = Field(
        None, ge=2, description="Most tokens in a sequence, prompt and completion. None: what the config needs."
    )
    max_logprobs: int | None = Field(
        None, ge=1, description="Most log-probabilities per token. None: num_sampler_logprobs, at least 20."
    )
    dtype: Literal["float32", "bfloat16", "float16", "auto"] | None = Field(
        None, description="Type of the serving copy. None: the trainer's."
    )
    load_format: Literal["dummy", "auto"] = Field(
        "dummy",
        description="'dummy' starts with random weights: the first sync is proved to replace them, and a sync that "
        "does nothing cannot hide. 'auto' loads the model folder.",
    )
    gpu_memory_utilization: float | None = Field(
        None, gt=0, le=1, description="Share of GPU memory for vLLM; None: vLLM's own. Not used on a CPU."
    )
    kv_cache_gib: int = Field(1, ge=1, description="Memory for keys and values on a CPU server, GiB.")
    omp_threads: int | None = Field(
        None, ge=1, description="OpenMP threads of a CPU server. None: a quarter of the cores, at least one."
    )
    max_num_seqs: int | None = Field(
        None, ge=1, description="Most sequences decoded together. None: vLLM's own on a GPU, at most 64 on a CPU."
    )
    max_num_batched_tokens: int | None = Field(
        None, ge=1, description="Most tokens in one engine step. None: vLLM's own on a GPU; see command.py for a CPU."
    )
    api_server_count: int | None = Field(
        None, ge=1, description="HTTP front processes. None: half the cores, at most 8, on a GPU host; 1 on a CPU."
    )
    enforce_eager: bool | None = Field(
        None, description="No compilation and no CUDA graphs. None: True on a CPU, False on a GPU."
    )
    token_route: bool = Field(
        True, description="Pass --enable-scale-out (token-in-token-out, versions per token). False for vLLM < 0.28."
    )
    enable_lora: bool = Field(
        False,
        description="Serve LoRA adapters, so that a sync sends only the adapter of model.lora (generation is slower).",
    )
    extra_args: list[str] = Field(default_factory=list, description="More arguments for vLLM, passed as they are.")
    env: dict[str, str] = Field(default_factory=dict, description="More environment variables for the server.")
    start_timeout_s: float = Field(600.0, gt=0, description="Seconds from start to healthy before giving up.")

    @field_validator("url")
    @classmethod
    def _check_url(cls, value: str | list[str] | None) -> str | list[str] | None:
        if value is None:
            return None
        urls = [_checked_url(url) for url in ([value] if isinstance(value, str) else value)]
        if not urls or len(set(urls)) != len(urls):
            raise ValueError(f"server.url is {value!r}; a list has to name at least one server, and none twice")
        return urls[0] if len(urls) == 1 else urls

    @property
    def urls(self) -> list[str]:
        """`url` as a list; empty when the server is started here."""
        return [] if self.url is None else [self.url] if isinstance(self.url, str) else self.url

    @field_validator("extra_args")
    @classmethod
    def _check_extra_args(cls, value: list[str]) -> list[str]:
        for argument in value:
            flag = argument.split("=", 1)[0]
            if flag in _OWN_FLAGS:
                raise ValueError(
                    f"server.extra_args holds {flag}, which this project sets itself; use {_OWN_FLAGS[flag]}"
                )
        return value

    @model_validator(mode="after")
    def _check_url_alone(self) -> ServerConfig:
        if self.url is not None and self.port is not None:
            raise ValueError(
                f"server.url is {self.url!r} and server.port is {self.port}; a port belongs to a server that is "
                "started here: remove one of the two"
            )
        return self


def _checked_url(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"server.url is {url!r}; it has to start with http:// or https://, e.g. http://localhost:8000")
    return url.rstrip("/")
