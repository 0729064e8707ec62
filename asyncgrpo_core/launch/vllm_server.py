"""The vLLM server that a run's config needs: its command, its start beside the trainer, its end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from asyncgrpo_core.errors import ConfigError, ServerError
from asyncgrpo_core.launch.config import RunConfig
from asyncgrpo_core.launch.placement import Placement, cpu_count
from asyncgrpo_core.server.command import ServerCommand, ServerNeeds, server_command
from asyncgrpo_core.server.control import VLLMControl
from asyncgrpo_core.server.process import RunningServer, failure_reason, free_port, start_server
from asyncgrpo_core.server.settings import ServerConfig


def served_model_name(cfg: RunConfig) -> str:
    """The policy's name at the server: the reference uses the model's path."""
    return cfg.model.served_model_name or cfg.model.path


def server_needs(cfg: RunConfig, placement: Placement, port: int) -> ServerNeeds:
    """What the rest of the config asks of the server. `cfg` is resolved."""
    training = cfg.training
    filtered = training.top_k > 0 or training.top_p < 1 or bool(training.min_p)
    return ServerNeeds(
        model_path=cfg.model.path,
        served_model_name=served_model_name(cfg),
        dtype=training.dtype,
        max_model_len=cfg.server.max_model_len,
        num_sampler_logprobs=training.num_sampler_logprobs if training.score_centering else 1,
        max_concurrent_rollouts=training.max_concurrent_rollouts,
        device=placement.device,
        backend=placement.backend,
        cpu_count=cpu_count(),
        port=port,
        seed=training.seed,
        max_lora_rank=cfg.model.lora.r if cfg.model.lora is not None else None,
        lora_modules=_named_modules(cfg),
        max_staleness=training.max_staleness,
        return_sampling_mask=filtered and placement.device == "cuda",
    )


def plan_server(cfg: RunConfig, placement: Placement) -> ServerCommand | None:
    """The command of the server to start; None when `server.url` names one or several that run already.

    Raises:
        ConfigError: needs that no vLLM flag can meet.
    """
    if cfg.server.url is not None:
        return None
    port = cfg.server.port or free_port(cfg.server.host)
    command = server_command(_with_its_weights(cfg.server), server_needs(cfg, placement, port))
    if placement.device == "cuda":
        command.env.setdefault("CUDA_VISIBLE_DEVICES", ",".join(map(str, placement.server)))
    if cfg.model.trust_remote_code or cfg.training.trust_remote_code:
        command.argv.append("--trust-remote-code")
    if cfg.model.revision is not None:
        command.argv.extend(["--revision", cfg.model.revision])
    return command


def _named_modules(cfg: RunConfig) -> tuple[str, ...] | None:
    modules = cfg.model.lora.target_modules if cfg.model.lora is not None else None
    return tuple(modules) if isinstance(modules, list) else None


def _with_its_weights(server: ServerConfig) -> ServerConfig:
    """Where a sync sends only an adapter, the server has to load the base model by itself.

    Raises:
        ConfigError: it is told not to.
    """
    if not server.enable_lora or server.load_format == "auto":
        return server
    if "load_format" in server.model_fields_set:
        raise ConfigError(
            "server.load_format is 'dummy' and server.enable_lora is true: a sync sends only the adapter, so the base "
            "model would keep its random weights.",
            "Remove server.load_format.",
        )
    return server.model_copy(update={"load_format": "auto"})


class ServerSlot:
    """Holds the server of a run, so that it can be ended whatever happened since it was started."""

    def __init__(self, command: ServerCommand | None, url: str | list[str]) -> None:
        self._command = command
        self._running: RunningServer | None = None
        self._urls = [url] if isinstance(url, str) else list(url)
        self.url = ", ".join(self._urls)  # for messages

    @property
    def is_ours(self) -> bool:
        return self._command is not None

    def start(self, run_dir: Path, timeout_s: float, on_progress: Callable[[str], None]) -> None:
        """Start the server, or find the existing ones, and return when every one is healthy.

        `on_progress` is called every few seconds; what it raises ends the start, and the server with it.

        Raises:
            ServerError: it died, the port is taken, or it was not healthy in time.
        """
        if self._command is None:
            for url in self._urls:
                with VLLMControl(url, timeout_s=10.0) as control:
                    control.wait_until_ready(timeout_s, on_progress=on_progress)
            return
        self._running = start_server(self._command, run_dir=run_dir, start_timeout_s=timeout_s, on_progress=on_progress)

    def raise_if_dead(self) -> None:
        """Raise when the server that was started here has ended.

        Raises:
            ServerError: with the lines of its log that say why.
        """
        if self._running is None:
            return
        code = self._running.process.poll()
        if code is None:
            return
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        process = self._running.process
        raise ServerError(
            f"The vLLM server {how} while the run was under way: {failure_reason(process.log_tail(200))}",
            f"Its log is {process.log_path}; continue the run with --resume.",
        )

    def stop(self) -> None:
        """End the server when it was started here. Idempotent."""
        if self._running is not None:
            self._running.stop(grace_s=10.0)
