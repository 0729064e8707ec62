"""What the rollout loop does by the clock: follow the server's load, report its own state."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from asyncgrpo_core.rollout.admission import RolloutGate
from asyncgrpo_core.rollout.load_control import POLL_EVERY_S, ConcurrencyCap
from asyncgrpo_core.server.generation import GenerationClient
from asyncgrpo_core.server.load import LoadSample, parse_metrics

REPORT_EVERY_S = 1.0


class LoadWatch:
    """Polls /metrics, moves the gate's limit with the cap and records rollout/vllm_*."""

    def __init__(self, client: GenerationClient, cap: ConcurrencyCap, gate: RolloutGate, outbox: Any) -> None:
        self._client = client
        self._cap = cap
        self._gate = gate
        self._outbox = outbox
        self._preemptions: float | None = None

    async def run(self) -> None:
        while True:
            await asyncio.sleep(POLL_EVERY_S)
            await self.poll()

    async def poll(self) -> None:
        text = await self._client.metrics_text()
        load = parse_metrics(text) if text is not None else None
        self._gate.set_limit(self._cap.observe(load))
        if load is not None:
            self.record(load)

    def record(self, load: LoadSample) -> None:
        """One poll's metrics; preemptions as the difference to the poll before."""
        values = {
            "rollout/vllm_kv_cache_usage_frac": load.kv_cache_usage,
            "rollout/vllm_running_requests": load.running,
            "rollout/vllm_queued_requests": load.waiting,
            "rollout/vllm_preemption_count": self._new_preemptions(load.preemptions),
        }
        for name, value in values.items():
            if value is not None:
                self._outbox.record(name, value)

    def _new_preemptions(self, total: float | None) -> float | None:
        before, self._preemptions = self._preemptions, total
        if total is None or before is None:
            return None
        # a counter that went down belongs to a restarted server and counts from 0
        return total - before if total >= before else total


class Reporter:
    """Records what is sampled once per second: throughput, rollouts in flight, cap, score queue.

    Args:
        outbox: where the metrics go.
        generated_tokens: cumulative generated tokens.
        gauges: name -> current value.
        after: called after each report (sends a record when nothing else did).
    """

    def __init__(
        self,
        outbox: Any,
        generated_tokens: Callable[[], int],
        gauges: dict[str, Callable[[], float]],
        after: Callable[[], None],
    ) -> None:
        self._outbox = outbox
        self._generated_tokens = generated_tokens
        self._gauges = gauges
        self._after = after

    async def run(self) -> None:
        tokens, since = self._generated_tokens(), time.monotonic()
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            total, now = self._generated_tokens(), time.monotonic()
            self._outbox.put(("rollout/generated_tokens_per_s", "rate", float(total - tokens), now - since))
            for name, value in self._gauges.items():
                self._outbox.record(name, value())
            tokens, since = total, now
            self._after()
