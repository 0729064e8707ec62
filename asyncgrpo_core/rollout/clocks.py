"""What the rollout loop does by the clock: follow the servers' load, report its own state."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from asyncgrpo_core.rollout.admission import RolloutGate
from asyncgrpo_core.rollout.load_control import POLL_EVERY_S, ConcurrencyCap
from asyncgrpo_core.server.fleet import ServerFleet
from asyncgrpo_core.server.load import LoadSample

REPORT_EVERY_S = 1.0


class LoadWatch:
    """Polls /metrics of every server, moves the gate's limit with the caps and records rollout/vllm_*.

    Over several servers the metrics keep their reductions over engines: usage is the largest, the others are sums.
    """

    def __init__(self, fleet: ServerFleet, cap: ConcurrencyCap, gate: RolloutGate, outbox: Any) -> None:
        self._fleet = fleet
        self._cap = cap
        self._gate = gate
        self._outbox = outbox
        self._preemptions: list[float | None] = [None] * len(cap.servers)
        fleet.on_change = self._servers_changed

    async def run(self) -> None:
        while True:
            await asyncio.sleep(POLL_EVERY_S)
            await self.poll()

    async def poll(self) -> None:
        loads = await self._fleet.loads()
        for index, load in enumerate(loads):
            self._cap.observe(load, index)
            self._fleet.routing.set_cap(index, self._cap.servers[index].value)
        self._servers_changed()
        self.record(loads)
        if len(loads) > 1:
            self._record_servers()

    def record(self, loads: Sequence[LoadSample | None]) -> None:
        """One poll's metrics; preemptions as the difference to the poll before."""
        new_preemptions = [
            self._new_preemptions(index, load.preemptions) for index, load in enumerate(loads) if load is not None
        ]
        answers = [load for load in loads if load is not None]
        values = {
            "rollout/vllm_kv_cache_usage_frac": _over(max, [load.kv_cache_usage for load in answers]),
            "rollout/vllm_running_requests": _over(sum, [load.running for load in answers]),
            "rollout/vllm_queued_requests": _over(sum, [load.waiting for load in answers]),
            "rollout/vllm_preemption_count": _over(sum, new_preemptions),
        }
        for name, value in values.items():
            if value is not None:
                self._outbox.record(name, value)

    def _record_servers(self) -> None:
        for index, server in enumerate(self._fleet.routing.servers):
            name = f"rollout/server_{index}"
            self._outbox.record(f"{name}/in_flight", server.in_flight)
            self._outbox.record(f"{name}/healthy", float(server.usable))
            self._outbox.record(f"{name}/concurrency_cap", self._cap.servers[index].value)

    def _servers_changed(self) -> None:
        self._gate.set_limit(self._cap.set_usable(self._fleet.routing.usable()))

    def _new_preemptions(self, index: int, total: float | None) -> float | None:
        before, self._preemptions[index] = self._preemptions[index], total
        if total is None or before is None:
            return None
        # a counter that went down belongs to a restarted server and counts from 0
        return total - before if total >= before else total


def _over(reduce: Callable[[list[float]], float], values: Sequence[float | None]) -> float | None:
    """The reduction of the values that are there; None of none."""
    known = [value for value in values if value is not None]
    return reduce(known) if known else None


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
