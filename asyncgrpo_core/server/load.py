"""Reads a vLLM server's load from its Prometheus text (`GET /metrics`)."""

from __future__ import annotations

import re
from dataclasses import dataclass

_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_USAGE_NAMES = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")


@dataclass(frozen=True)
class LoadSample:
    """One reading of a server's load; None where the text does not have the metric.

    kv_cache_usage: share of the KV cache in use, 0 to 1, maximum over engines.
    running, waiting: requests being decoded / accepted but not scheduled, summed over engines.
    preemptions: preempted requests since the server started, summed over engines (a counter).
    kv_cache_tokens: capacity of the KV cache in tokens, summed over engines.
    generated_tokens: tokens sampled since the server started, summed over engines (a counter).
    """

    kv_cache_usage: float | None = None
    running: float | None = None
    waiting: float | None = None
    preemptions: float | None = None
    kv_cache_tokens: int | None = None
    generated_tokens: float | None = None


def parse_metrics(text: str) -> LoadSample:
    """Prometheus text -> LoadSample. Lines of other metrics are skipped."""
    values: dict[str, list[float]] = {}
    kv_tokens: list[int] = []
    for line in text.splitlines():
        if not line.startswith("vllm:"):
            continue
        match = _LINE.match(line)
        if match is None:
            continue
        name, labels, value = match.groups()
        if name == "vllm:cache_config_info":
            kv_tokens += _kv_tokens(dict(_LABEL.findall(labels or "")))
        else:
            values.setdefault(name, []).append(float(value))
    usage = next((values[name] for name in _USAGE_NAMES if name in values), None)
    return LoadSample(
        kv_cache_usage=max(usage) if usage else None,
        running=_total(values, "vllm:num_requests_running"),
        waiting=_total(values, "vllm:num_requests_waiting"),
        preemptions=_total(values, "vllm:num_preemptions_total"),
        kv_cache_tokens=sum(kv_tokens) if kv_tokens else None,
        generated_tokens=_total(values, "vllm:generation_tokens_total"),
    )


def _total(values: dict[str, list[float]], name: str) -> float | None:
    found = values.get(name)
    return sum(found) if found else None


def _kv_tokens(labels: dict[str, str]) -> list[int]:
    blocks = labels.get("num_gpu_blocks", "")
    size = labels.get("block_size", "")
    return [int(blocks) * int(size)] if blocks.isdigit() and size.isdigit() else []
