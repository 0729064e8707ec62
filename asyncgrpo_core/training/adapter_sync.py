"""Whether a run sends its adapter alone or merged weights: decided once, when the servers are met, and logged."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from asyncgrpo_core.errors import ConfigError, ServerMismatchError
from asyncgrpo_core.server.adapters import (
    LORA_BACKEND,
    AdapterWants,
    adapter_sync_obstacle,
    check_adapter_flags,
)
from asyncgrpo_core.server.capabilities import ServerCapabilities
from asyncgrpo_core.sync.lora import AdapterVersions
from asyncgrpo_core.sync.lora_store import AdapterStore
from asyncgrpo_core.training.config import AsyncGRPOConfig
from asyncgrpo_core.training.run_context import AdapterLink, PolicyLink

logger = logging.getLogger(__name__)


def adapter_versions(
    args: AsyncGRPOConfig, policy: PolicyLink, servers: Sequence[ServerCapabilities]
) -> AdapterVersions | None:
    """The versions of a run that sends only its adapter; None where full (merged) weights are sent.

    Raises:
        ConfigError: weight_sync_backend is "lora" and the policy has no adapter.
        ServerMismatchError: it is, and the adapter cannot be served; or a server's --max-lora-rank or --max-loras is
            too small.
    """
    asked = args.weight_sync_backend == LORA_BACKEND
    adapter = policy.adapter
    if adapter is None:
        if asked:
            raise ConfigError(
                "weight_sync_backend='lora' sends an adapter, and the policy has none.",
                "Pass peft_config (model.lora in a run's config), or leave weight_sync_backend out.",
            )
        return None
    warn_of_a_lost_adapter(args)
    wants = adapter_wants(args, adapter)
    obstacle = adapter_sync_obstacle(wants, servers, args.server_urls)
    if not asked and args.weight_sync_backend is not None:
        obstacle = f"weight_sync_backend is {args.weight_sync_backend!r}"
    if obstacle:
        if asked:
            raise ServerMismatchError(
                f"weight_sync_backend='lora' sends only the adapter, but {obstacle}.",
                "Change that, or leave weight_sync_backend out: merged weights are sent then.",
            )
        meant = any(cap.enable_lora for cap in servers) and args.weight_sync_backend is None
        logger.log(
            logging.WARNING if meant else logging.INFO,
            "Every weight sync sends the full weights with the adapter merged into them, not the adapter alone: %s.",
            obstacle,
        )
        return None
    for cap in servers:
        check_adapter_flags(wants, cap)
    logger.info(
        "Every weight sync sends only the adapter (rank %d); the servers keep %d versions of it.",
        wants.rank,
        args.max_staleness + 1,
    )
    store = AdapterStore(args.output_dir or "trainer_output", adapter.save)
    places = [cap.max_loras for cap in servers if cap.max_loras is not None]
    return AdapterVersions(store, max_staleness=args.max_staleness, max_loras=min(places) if places else None)


def check_met_again(args: AsyncGRPOConfig, policy: PolicyLink, cap: ServerCapabilities) -> None:
    """A server that comes back may be another process, with other flags.

    Raises:
        ServerMismatchError: it cannot take the adapter.
    """
    assert policy.adapter is not None
    wants = adapter_wants(args, policy.adapter)
    obstacle = adapter_sync_obstacle(wants, [cap], ["it"])
    if obstacle:
        raise ServerMismatchError(f"This run sends only its adapter, but {obstacle}.", "Restart it with the old flags.")
    check_adapter_flags(wants, cap)


def adapter_wants(args: AsyncGRPOConfig, adapter: AdapterLink) -> AdapterWants:
    return AdapterWants(rank=adapter.rank, max_staleness=args.max_staleness, obstacle=adapter.obstacle)


def warn_of_a_lost_adapter(args: AsyncGRPOConfig) -> None:
    if str(getattr(args.save_strategy, "value", args.save_strategy)) == "no":
        logger.warning(
            "save_strategy='no': no checkpoint is saved, so the trained adapter is lost when the run ends (the folder "
            ".vllm_lora is a cache that holds the latest versions only). Set save_strategy='steps'."
        )
