"""The servers of a run: wait for them, check that each fits the config and that they fit each other."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from asyncgrpo_core.errors import AsyncGRPOError, ConfigError, ServerMismatchError
from asyncgrpo_core.server.checks import ServerWants, check_server, returns_candidate_sets
from asyncgrpo_core.server.control import ServerCapabilities, VLLMControl
from asyncgrpo_core.server.generation import smallest_max_logprobs
from asyncgrpo_core.sync.fleet import SyncServer
from asyncgrpo_core.sync.lora import AdapterVersions
from asyncgrpo_core.sync.publisher import Publisher, make_publisher
from asyncgrpo_core.training.adapter_sync import adapter_versions, check_met_again
from asyncgrpo_core.training.config import AsyncGRPOConfig
from asyncgrpo_core.training.run_context import PolicyLink

logger = logging.getLogger(__name__)


@dataclass
class Servers:
    """The servers of a run, as they were when training started; lists are in the order of `server_urls`."""

    args: AsyncGRPOConfig
    model_name: str
    policy: PolicyLink
    controls: list[VLLMControl]
    capabilities: list[ServerCapabilities]
    adapters: AdapterVersions | None = None  # where a sync sends only the adapter

    def max_model_len(self) -> int | None:
        """The shortest --max-model-len; None when none of them says."""
        lengths = [cap.max_model_len for cap in self.capabilities if cap.max_model_len is not None]
        return min(lengths) if lengths else None

    def token_budget(self) -> int:
        """The default token_budget. Raises AsyncGRPOError when no server says its max_model_len."""
        length = self.max_model_len()
        if not length:
            raise AsyncGRPOError(
                f"The server at {', '.join(self.args.server_urls)} does not report max_model_len.", "Set token_budget."
            )
        return length

    def worker_settings(self) -> dict[str, Any]:
        """What the worker need not ask the servers again: what holds for all of them."""
        caps = self.capabilities
        return {
            "use_token_route": all(cap.token_in_token_out for cap in caps),
            "max_model_len": self.max_model_len(),
            "max_logprobs": smallest_max_logprobs([c.max_logprobs for c in caps if c.max_logprobs is not None]),
            "candidate_sets": _restricted(self.args) and all(returns_candidate_sets(cap) for cap in caps),
            # A CPU engine dies of a seeded request as soon as a prefill is split over two engine steps.
            "send_seed": not any(cap.device_type == "cpu" and cap.chunked_prefill_possible for cap in caps),
        }

    def sync_servers(self) -> list[SyncServer]:
        """One publisher for each server; a server that is met again later is asked and checked again.

        Raises:
            ConfigError: several servers by `ipc`.
        """
        if self.args.weight_sync_backend == "ipc" and len(self.controls) > 1:
            raise ConfigError(
                "weight_sync_backend='ipc' shares one GPU with one server, but vllm_server_base_url names "
                f"{len(self.controls)}.",
                "Use 'nccl' (servers on other GPUs), or one server.",
            )
        if self.adapters is not None:
            self.adapters.start(self.controls)
        return [
            SyncServer(url, control, self._maker(control, capabilities))
            for url, control, capabilities in zip(self.args.server_urls, self.controls, self.capabilities, strict=True)
        ]

    def _maker(self, control: VLLMControl, met: ServerCapabilities) -> Callable[[Callable[[], None]], Publisher]:
        args, policy = self.args, self.policy
        at_start: list[ServerCapabilities] = [met]

        def make(on_failed: Callable[[], None]) -> Publisher:
            if at_start:
                capabilities = at_start.pop()
            else:  # it may be another process by now, with other flags
                capabilities = control.capabilities()
                only_adapter = self.adapters is not None
                check_server(capabilities, wants_of(args, self.model_name, policy, capabilities, only_adapter))
                if only_adapter:
                    check_met_again(args, policy, capabilities)
            return make_publisher(
                control=control,
                capabilities=capabilities,
                backend=args.weight_sync_backend,
                parameters=policy.parameters,
                score=policy.score,
                canary_ids=policy.canary_ids,
                verify_sync_every=args.verify_sync_every,
                kv_after_sync=args.kv_after_sync,
                timeout_s=args.vllm_server_timeout,
                trainer_dtype=policy.dtype,
                trainer_device=policy.device,
                # Nobody can ask the server which GPU it is on; who set it up for ipc says so, and vLLM compares the
                # GPUs' serial numbers at every transfer.
                same_gpu="ipc" in (args.weight_sync_backend, capabilities.weight_transfer_backend),
                on_failed=on_failed,
                adapters=(self.adapters, policy.adapter) if self.adapters and policy.adapter else None,
            )

        return make


def meet_servers(args: AsyncGRPOConfig, model_name: str, policy: PolicyLink) -> Servers:
    """Wait until every server is healthy, and check it; warnings go to the log.

    Raises:
        ServerError: one of them is away.
        ServerMismatchError: one of them contradicts the config.
    """
    controls = [VLLMControl(url, timeout_s=args.vllm_server_timeout) for url in args.server_urls]
    for control in controls:
        control.wait_until_ready(args.vllm_server_timeout)
    capabilities = [control.capabilities() for control in controls]
    adapters = adapter_versions(args, policy, capabilities)
    for control, found in zip(controls, capabilities, strict=True):
        try:
            warnings = check_server(found, wants_of(args, model_name, policy, found, adapters is not None))
        except ServerMismatchError as error:
            if len(controls) == 1:
                raise
            raise ServerMismatchError(f"{control.base_url}: {error.message}", error.fix) from error
        for warning in warnings:
            logger.warning("%s%s", f"{control.base_url}: " if len(controls) > 1 else "", warning)
    for warning in differences(args.server_urls, capabilities):
        logger.warning("%s", warning)
    return Servers(args, model_name, policy, controls, capabilities, adapters)


def wants_of(
    args: AsyncGRPOConfig,
    model_name: str,
    policy: PolicyLink,
    capabilities: ServerCapabilities,
    only_adapter: bool = False,
) -> ServerWants:
    """What a run needs of a server, whose devices decide the backend where the config does not."""
    backend = args.weight_sync_backend or capabilities.weight_transfer_backend
    return ServerWants(
        served_model_name=model_name,
        num_sampler_logprobs=args.num_sampler_logprobs if args.score_centering else 1,
        needed_len=args.max_completion_length + 1,
        longest_len=policy.longest_sample,
        dtype=policy.dtype,
        restricted_sampling=_restricted(args),
        weight_transfer_backend=None
        if only_adapter
        else backend or ("shm" if capabilities.device_type == "cpu" else "nccl"),
    )


def _restricted(args: AsyncGRPOConfig) -> bool:
    return args.top_k > 0 or args.top_p < 1 or bool(args.min_p)


def differences(urls: list[str], capabilities: list[ServerCapabilities]) -> list[str]:
    """What servers of one run should have in common and do not, and what is used instead.

    Raises:
        ServerMismatchError: they say that they loaded different models.
    """
    first, warnings = capabilities[0], []
    for url, other in zip(urls[1:], capabilities[1:], strict=True):
        if None not in (first.model_path, other.model_path) and first.model_path != other.model_path:
            raise ServerMismatchError(
                f"The servers of a run must serve one policy, but {urls[0]} loaded {first.model_path!r} and "
                f"{url} {other.model_path!r}.",
                "Start both with the same --model.",
            )
        for name, flag in (("max_model_len", "--max-model-len"), ("max_logprobs", "--max-logprobs")):
            mine, theirs = getattr(first, name), getattr(other, name)
            if mine != theirs:
                warnings.append(
                    f"{flag} is {mine} at {urls[0]} and {theirs} at {url}; the smaller bound holds for all requests."
                )
        if first.token_in_token_out != other.token_in_token_out:
            warnings.append(
                f"Only one of {urls[0]} and {url} has /inference/v1/generate (--enable-scale-out); "
                "/v1/completions is used at all."
            )
    return warnings
