"""Publishing a policy version to several servers, one after the other: the others generate meanwhile.

    in use --the sync fails, or /health does not answer--> left out --a later sync is proved--> in use

A server that is left out takes no requests (`on_version` says so) and is tried again at every sync. Weights that
arrive wrong stop the run, whatever the other servers say; so does a sync that reaches no server at all.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from asyncgrpo_core.errors import AsyncGRPOError, ServerError
from asyncgrpo_core.server.freshness import LEFT_OUT
from asyncgrpo_core.sync.publisher import Publisher
from asyncgrpo_core.sync.reports import DeliveryError, SyncReport, SyncTotals

logger = logging.getLogger(__name__)

_RETRY_WITHIN_S = 60.0  # a failure that took longer is not tried twice in one sync
_CLOSE_S = 10.0  # releasing the channel to a dead server
_SAY_EVERY = 100  # missed syncs between two warnings about the same server
_HANGING_SHARE = 20  # a server that does not answer costs at most 1 / 20 of the time


class HealthControl(Protocol):
    """The part of `server.control.VLLMControl` that is used here."""

    def is_healthy(self) -> bool: ...


@dataclass
class SyncServer:
    """One server: `make_publisher` meets it anew (capabilities, channel); its first sync is always proved.

    `make_publisher` is given what to call when a sync fails, before the server is resumed.
    """

    url: str
    control: HealthControl
    make_publisher: Callable[[Callable[[], None]], Publisher]
    publisher: Publisher | None = None
    ask_again_at: float = 0.0
    missed: int = 0  # syncs in a row


class FleetPublisher:
    """Sends policy versions to all servers and proves that they arrived; with one server, exactly a `Publisher`.

    Args:
        servers: at least one.
        on_version: called with (index, policy version) as soon as a server holds it, proved when that was due, and
            with (index, LEFT_OUT) when a server missed a sync.
    """

    def __init__(self, servers: Sequence[SyncServer], on_version: Callable[[int, int], None] | None = None) -> None:
        self.versions = [LEFT_OUT] * len(servers)
        self._servers = list(servers)
        self._on_version = on_version or (lambda _index, _version: None)
        self._backend = ""
        self._started = False
        self._totals = SyncTotals()
        self._num_left_out = 0

    @property
    def left_out(self) -> list[str]:
        """URLs of the servers that do not hold the newest weights."""
        return [s.url for s, version in zip(self._servers, self.versions, strict=True) if version == LEFT_OUT]

    def publish(self, version: int, *, verify: bool | None = None) -> SyncReport:
        """Send the policy as it is now to every server; done when all that answer have it.

        The first sync must reach every server. Times in the report are sums over the servers: what the trainer waited.

        Raises:
            WeightSyncError, ServerError: no server could be reached; the first sync did not reach all.
            DeliveryError: weights arrived wrong at a server, or cannot be proved there.
        """
        first, reports = not self._started, []
        failure: AsyncGRPOError | None = None
        for index, server in enumerate(self._servers):
            try:
                reports.append(self._send(index, version, verify))
            except DeliveryError:
                raise
            except AsyncGRPOError as error:
                if first or len(self._servers) == 1:
                    raise
                failure = error
                server.missed += 1
                if server.missed == 1 or server.missed % _SAY_EVERY == 0:  # not at every sync of a night
                    said = "%s is left out from policy version %d on (%d in a row so far): %s"
                    logger.warning(said, server.url, version, server.missed, error)
                self._set(index, LEFT_OUT)
            else:
                if server.missed:
                    said = "%s is in use again with policy version %d; it missed %d."
                    logger.warning(said, server.url, version, server.missed)
                    server.missed = 0
                self._set(index, version)
        if failure is not None and not reports:
            raise failure
        report = combined(reports)
        self._started = True
        if not first:
            self._totals.add(report)
            self._num_left_out += len(self._servers) - len(reports)
        return report

    def stats(self, previous: dict[str, Any] | None = None) -> dict[str, Any]:
        """`weight_sync` of run_summary.json: `count` counts syncs, not servers.

        With several servers also `left_out`: how often a sync did not reach one of them.
        """
        for server in self._servers:
            if server.publisher is not None:
                self._totals.saw_difference(server.publisher.max_abs_logp_diff)
        summary = self._totals.summary(self._backend, previous)
        if len(self._servers) > 1:
            summary["left_out"] = (previous or {}).get("left_out", 0) + self._num_left_out
        return summary

    def close(self) -> None:
        """Release every channel. The first error is raised after all were tried."""
        errors: list[Exception] = []
        for server in self._servers:
            if server.publisher is not None:
                try:
                    server.publisher.close()
                except Exception as error:
                    errors.append(error)
        if errors:
            raise errors[0]

    def _send(self, index: int, version: int, verify: bool | None) -> SyncReport:
        server = self._servers[index]
        several = len(self._servers) > 1 and self._started
        if several:
            self._require_healthy(server)
        known = server.publisher is not None
        started = time.monotonic()
        try:
            return self._publish(index, version, verify)
        except DeliveryError:
            raise
        except AsyncGRPOError:
            if not several:
                raise
            self._drop(server)
            if not known or time.monotonic() - started > _RETRY_WITHIN_S or not server.control.is_healthy():
                raise
        # A server that was started again since the last sync knows nothing of us: meet it anew.
        logger.info("%s failed a sync and answers; meeting it anew.", server.url)
        try:
            return self._publish(index, version, verify)
        except DeliveryError:
            raise
        except AsyncGRPOError:
            self._drop(server)
            raise

    def _publish(self, index: int, version: int, verify: bool | None) -> SyncReport:
        server = self._servers[index]
        if server.publisher is None:
            alone = len(self._servers) == 1  # its failure ends the run
            server.publisher = server.make_publisher(lambda: None if alone else self._set(index, LEFT_OUT))
            self._backend = server.publisher.backend.name
        return server.publisher.publish(version, verify=verify)

    def _require_healthy(self, server: SyncServer) -> None:
        """A call to a server that hangs would hold the trainer for the whole vllm_server_timeout: ask first."""
        now = time.monotonic()
        if now < server.ask_again_at:
            raise ServerError(f"{server.url} did not answer a moment ago.", "Look at the server's log.")
        if not server.control.is_healthy() and not server.control.is_healthy():
            ended = time.monotonic()
            server.ask_again_at = ended + _HANGING_SHARE * (ended - now)
            self._drop(server)
            raise ServerError(f"{server.url} does not answer /health.", "Look at the server's log.")

    def _drop(self, server: SyncServer) -> None:
        """Let go of a publisher whose server failed; releasing a channel to a dead process may hang."""
        publisher, server.publisher = server.publisher, None
        if publisher is None:
            return
        self._totals.saw_difference(publisher.max_abs_logp_diff)

        def close() -> None:
            try:
                publisher.close()
            except Exception as error:
                logger.warning("The channel to %s could not be released: %s", server.url, error)

        thread = threading.Thread(target=close, name="asyncgrpo-close-channel", daemon=True)
        thread.start()
        thread.join(_CLOSE_S)

    def _set(self, index: int, version: int) -> None:
        self.versions[index] = version
        self._on_version(index, version)


def combined(reports: Sequence[SyncReport]) -> SyncReport:
    """One report of one sync over several servers: times and bytes are sums, the difference is the largest.

    `verified` is None unless every server was asked for a proof, and False when one could not give it.
    """
    if len(reports) == 1:
        return reports[0]
    states = [report.verified for report in reports]
    differences = [r.max_abs_logp_diff for r in reports if r.max_abs_logp_diff is not None]
    return SyncReport(
        version=reports[0].version,
        verified=False if False in states else None if None in states else True,
        max_abs_logp_diff=max(differences) if differences else None,
        pause_s=sum(r.pause_s for r in reports),
        barrier_s=sum(r.barrier_s for r in reports),
        transfer_s=sum(r.transfer_s for r in reports),
        total_s=sum(r.total_s for r in reports),
        verify_s=sum(r.verify_s for r in reports),
        num_bytes=sum(r.num_bytes for r in reports),
        reason="; ".join(dict.fromkeys(r.reason for r in reports if r.reason)),
    )
