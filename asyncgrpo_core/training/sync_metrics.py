"""The metrics of one weight sync (reference, performance metrics)."""

from __future__ import annotations

from asyncgrpo_core.metrics import MetricWindow
from asyncgrpo_core.sync.fleet import FleetPublisher
from asyncgrpo_core.sync.reports import SyncReport


def record_sync(window: MetricWindow, report: SyncReport, publisher: FleetPublisher) -> None:
    """`perf/weight_sync_*`; beyond the reference `sync/*`."""
    for name in ("pause", "barrier", "transfer"):
        window.add(f"perf/weight_sync_{name}_s", getattr(report, f"{name}_s"))
    window.add("perf/weight_sync_s", report.total_s)
    if len(publisher.versions) > 1:
        window.add("sync/servers_left_out_count", len(publisher.left_out))
    if report.max_abs_logp_diff is not None:  # beyond the reference: how far the server's canary was off
        window.add("sync/canary_logp_difference/max", report.max_abs_logp_diff)
        window.add("sync/verify_s", report.verify_s)
