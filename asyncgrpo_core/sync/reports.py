"""What one sync reports, what a run sums up, and what a wrong delivery is called."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from asyncgrpo_core.errors import WeightSyncError
from asyncgrpo_core.server.adapters import LORA_BACKEND
from asyncgrpo_core.sync.backend import TensorEvidence, Transfer, name_list
from asyncgrpo_core.sync.canary import UNVERIFIED, Verdict


class DeliveryError(WeightSyncError):
    """Weights reached a server wrong, or could not be proved three times: a fault that other servers may share."""


@dataclass(frozen=True)
class SyncReport:
    """One sync. Times in seconds; `total_s` = pause + barrier + transfer (reference, perf/weight_sync_s).

    Attributes:
        verified: True proved, False could not be proved, None not asked.
        max_abs_logp_diff: largest canary difference in nats; None when not asked.
        pause_s: until the server was paused.
        barrier_s: waiting for the other trainer processes.
        transfer_s: writing, sending, loading and resuming.
        verify_s: the proof, made while the server generates again (not part of `total_s`).
    """

    version: int
    verified: bool | None
    max_abs_logp_diff: float | None
    pause_s: float
    barrier_s: float
    transfer_s: float
    total_s: float
    verify_s: float = 0.0
    num_bytes: int = 0
    reason: str = ""


@dataclass
class SyncTotals:
    """Counters over the syncs of one attempt, the one at its start left out (its difference is in the maximum)."""

    count: int = 0
    verified: int = 0
    unverified: int = 0
    max_abs_logp_diff: float = 0.0
    sum_s: float = 0.0

    def saw_difference(self, value: float) -> None:
        if math.isfinite(value):
            self.max_abs_logp_diff = max(self.max_abs_logp_diff, value)

    def add(self, report: SyncReport) -> None:
        self.count += 1
        self.sum_s += report.total_s
        self.verified += report.verified is True
        self.unverified += report.verified is False

    def summary(self, backend: str, previous: dict[str, Any] | None) -> dict[str, Any]:
        """`weight_sync` of run_summary.json, on top of `previous`."""
        before = previous or {}
        count = before.get("count", 0) + self.count
        seconds = before.get("mean_s", 0.0) * before.get("count", 0) + self.sum_s
        return {
            "backend": backend,
            "count": count,
            "verified": before.get("verified", 0) + self.verified,
            "unverified": before.get("unverified", 0) + self.unverified,
            "max_abs_logp_diff": max(before.get("max_abs_logp_diff", 0.0), self.max_abs_logp_diff),
            "mean_s": seconds / count if count else 0.0,
        }


@dataclass
class Phases:
    """Wall time per phase, and the name of the phase that is running (for errors)."""

    seconds: dict[str, float] = field(default_factory=dict)
    current: str = ""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.current = name
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


def build_report(version: int, transfer: Transfer, verdict: Verdict | None, seconds: dict[str, float]) -> SyncReport:
    """The report of a sync whose phases took `seconds` (pause, barrier, transfer, and verify when proved)."""
    pause, barrier, sending = seconds["pause"], seconds["barrier"], seconds["transfer"]
    return SyncReport(
        version=version,
        verified=None if verdict is None else verdict.state != UNVERIFIED,
        max_abs_logp_diff=None if verdict is None else verdict.max_abs_diff,
        pause_s=pause,
        barrier_s=barrier,
        transfer_s=sending,
        total_s=pause + barrier + sending,
        verify_s=seconds.get("verify", 0.0),
        num_bytes=transfer.num_bytes,
        reason="" if verdict is None else verdict.reason,
    )


def delivery_message(version: int, backend: str, verdict: Verdict, tensors: TensorEvidence | None) -> tuple[str, str]:
    """The error for weights that did not arrive: which parameters differ, how far the canary is off."""
    if backend == LORA_BACKEND:
        which = f"its {'engine' if tensors is None or tensors.compared == 1 else 'engines'} loaded the adapter's folder"
    elif verdict.differing and tensors is not None:
        total = tensors.compared + len(tensors.unchecked)
        which = f"these parameters differ from what was sent: {name_list(verdict.differing, total)}"
    elif tensors is not None and tensors.missing:
        which = f"nothing was sent for the server's {name_list(tensors.missing)}"
    elif tensors is not None and tensors.equal:
        which = f"all {tensors.compared} tensors are equal, so the two models compute differently with them"
    else:
        which = "the server cannot say which parameters differ"
    message = (
        f"Weight sync of policy version {version} ({backend}) reached the server wrong: {which}. "
        f"Canary log-probabilities differ by up to {verdict.max_abs_diff:.3g} "
        f"(mean {verdict.mean_abs_diff:.3g}): {verdict.reason}."
    )
    if backend == LORA_BACKEND:
        return message, (
            "Nothing generated from this server can be trained on. If another run sends merged weights to it, give "
            "each run a server of its own; restart this one, whose base model may have been overwritten."
        )
    fix = (
        "Nothing generated from this server can be trained on. Check that the server runs this asyncgrpo's plugin, "
        "serves the same model in the same dtype, and that ASYNCGRPO_SYNC_FAULT is not set in its environment."
    )
    return message, fix
