"""Adapters at a vLLM server: their names, which servers can serve them, and with which flags. Pure functions.

vLLM loads an adapter from a folder (POST /v1/load_lora_adapter, with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1) under a name
that requests then use as their model. A name belongs to the HTTP process that it was loaded at; the weights go to
every engine behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncgrpo_core.errors import ServerMismatchError
from asyncgrpo_core.server.capabilities import ServerCapabilities

LOAD_ROUTE, UNLOAD_ROUTE = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what --max-lora-rank takes (reference, 'Train adapters')
LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # of most decoders
LORA_BACKEND = "lora"  # the value of weight_sync_backend


def adapter_name(stem: str, version: int) -> str:
    """The name that policy version `version` is requested under; `stem` is the attempt's own."""
    return f"{stem}-v{version}"


def served_rank(rank: int) -> int | None:
    """The smallest --max-lora-rank that serves an adapter of `rank`; None when there is none."""
    return next((served for served in LORA_RANKS if served >= rank), None)


def needed_max_loras(max_staleness: int) -> int:
    """max_staleness + 1 versions are kept, and the next is loaded before the oldest is dropped."""
    return max_staleness + 2


@dataclass(frozen=True)
class AdapterWants:
    """The adapter that a run trains.

    Attributes:
        rank: the highest of its modules.
        max_staleness: decides how many versions are kept.
        obstacle: why vLLM cannot serve such an adapter; None when it can.
    """

    rank: int
    max_staleness: int
    obstacle: str | None = None


def adapter_sync_obstacle(wants: AdapterWants, servers: Sequence[ServerCapabilities], urls: Sequence[str]) -> str:
    """Why merged weights have to be sent instead of the adapter; "" when every server can serve it.

    Values of --max-lora-rank and --max-loras that are too small are no reason: see `check_adapter_flags`.
    """
    if wants.obstacle is not None:
        return wants.obstacle
    if served_rank(wants.rank) is None:
        return f"its rank {wants.rank} is more than vLLM serves ({LORA_RANKS[-1]})"
    for url, cap in zip(urls, servers, strict=True):
        if cap.enable_lora is False:
            return f"{url} was started without --enable-lora"
        if LOAD_ROUTE not in cap.routes:
            return (
                f"{url} does not offer {LOAD_ROUTE}: start it with --enable-lora and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"
            )
        if cap.device_type == "cpu" and cap.adapts_lm_head is not False:
            return (
                f"{url} computes on a CPU and may adapt lm_head, where prompt log-probabilities beside other requests "
                f"end the engine: start it with --lora-target-modules {' '.join(LINEAR_LAYERS)}"
            )
        if (cap.api_servers or 1) > 1:
            return (
                f"{url} answers with {cap.api_servers} HTTP processes, and an adapter is known only to the one that "
                "loaded it: start it with --api-server-count 1"
            )
    return ""


def check_adapter_flags(wants: AdapterWants, cap: ServerCapabilities) -> None:
    """Refuse a server whose flags cannot hold the versions of a run. What it does not report is not refused.

    Raises:
        ServerMismatchError: names the values to restart the server with.
    """
    rank, loras = served_rank(wants.rank), needed_max_loras(wants.max_staleness)
    found, flags = [], []
    if cap.max_lora_rank is not None and cap.max_lora_rank < wants.rank:
        found.append(f"--max-lora-rank is {cap.max_lora_rank} and the adapter's rank {wants.rank}")
        flags.append(f"--max-lora-rank {rank}")
    if cap.max_loras is not None and cap.max_loras < loras:
        found.append(
            f"--max-loras is {cap.max_loras} and max_staleness {wants.max_staleness}, which takes {loras} (the "
            f"{loras - 1} newest versions, and the next one before the oldest is dropped)"
        )
        flags.append(f"--max-loras {loras}")
    if found:
        raise ServerMismatchError(
            f"The vLLM server cannot hold the adapter's versions: its {'; its '.join(found)}.",
            f"Restart it with {' '.join(flags)}.",
        )
