"""Generation requests over one or several servers of the same policy (which one: `routing.py`).

With one server every call goes straight to its `GenerationClient`. With several, a request that fails is sent to
another server at once, a server that fails repeatedly is left out until /health answers again, and a server whose
weights are not the newest is left out until a weight sync has been proved there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from asyncgrpo_core.server.freshness import Freshness
from asyncgrpo_core.server.generation import (
    GenerationClient,
    SamplingSettings,
    ServerFacts,
    ServerUnavailableError,
    UnknownModelError,
)
from asyncgrpo_core.server.load import LoadSample, parse_metrics
from asyncgrpo_core.server.routing import ServerRouting
from asyncgrpo_core.types import TurnRecord

logger = logging.getLogger(__name__)

_TICK_S = 0.25  # the trainer's shared values have no way to wake us
_CHECK_EVERY_S = 5.0
_HEALTH_TIMEOUT_S = 10.0


def _forwarded(name: str) -> Any:
    """A setting that every client has, the same for all."""

    def read(fleet: ServerFleet) -> Any:
        return getattr(fleet.clients[0], name)

    def write(fleet: ServerFleet, value: Any) -> None:
        for client in fleet.clients:
            setattr(client, name, value)

    return property(read, write)


class ServerFleet:
    """Sends sampling requests to the servers at `base_urls`.

    Args:
        base_urls: one URL or several.
        model_name: the name that all of them serve the policy under.
        versions: policy version that each server holds, `LEFT_OUT` for one that missed a sync; read at every
            request, written by the trainer. None: not known, nothing is left out for it.
        version: the policy version where `versions` is None; None: `cache_salt` is sent as it is.
        on_retry: called with the reason before a request is sent again.
        client_settings: for every `GenerationClient` (use_token_route, timeout_s, max_connections, ...).

    Attributes:
        clients: one per server, in the order of `base_urls`.
        routing: the state of each server.
        on_change: called when a server was left out or came back.
    """

    use_token_route = _forwarded("use_token_route")
    max_logprobs = _forwarded("max_logprobs")
    max_retries = _forwarded("max_retries")
    backoff_s = _forwarded("backoff_s")
    backoff_max_s = _forwarded("backoff_max_s")
    max_connections = _forwarded("max_connections")

    def __init__(
        self,
        base_urls: str | Sequence[str],
        model_name: str,
        *,
        versions: Sequence[int] | None = None,
        version: Callable[[], int] | None = None,
        on_retry: Callable[[str], None] | None = None,
        **client_settings: Any,
    ) -> None:
        urls = [base_urls] if isinstance(base_urls, str) else list(base_urls)
        self.clients = [GenerationClient(url, model_name, on_retry=on_retry, **client_settings) for url in urls]
        self.routing = ServerRouting(len(urls), self.clients[0].max_connections)
        self.on_change: Callable[[], None] = lambda: None
        self._on_retry = on_retry or (lambda _reason: None)
        self._freshness = Freshness(len(urls), versions)
        self._version = version
        self._running: list[set[asyncio.Task[TurnRecord]]] = [set() for _ in urls]
        self._moved: set[asyncio.Task[TurnRecord]] = set()
        self._watchers: list[asyncio.Task[None]] = []

    @property
    def num_servers(self) -> int:
        return len(self.clients)

    @property
    def base_url(self) -> str:
        """All URLs, for messages."""
        return ", ".join(client.base_url for client in self.clients)

    async def __aenter__(self) -> ServerFleet:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        self._watchers = []
        for client in self.clients:
            await client.close()

    async def facts(self) -> ServerFacts:
        """What holds for all servers (see `ServerFacts.common`). Raises ServerError when one does not answer."""
        return ServerFacts.common(await asyncio.gather(*(client.facts() for client in self.clients)))

    async def metrics_text(self) -> str | None:
        """The first server's Prometheus text; see `loads` for all of them."""
        return await self.clients[0].metrics_text()

    async def loads(self) -> list[LoadSample | None]:
        """Every server's load, None where it has no /metrics or does not answer."""
        texts = await asyncio.gather(*(client.metrics_text() for client in self.clients))
        loads = [parse_metrics(text) if text is not None else None for text in texts]
        if self.num_servers > 1:
            for index, load in enumerate(loads):
                if load is not None and self._freshness.saw_load(index, load):
                    self._lose(index)
        return loads

    async def generate(
        self,
        prompt_ids: list[int],
        sampling: SamplingSettings,
        seed: int | None,
        cache_salt: str | None = None,
        *,
        affinity: int | None = None,
        member: Hashable = None,
        model: str | None = None,
    ) -> TurnRecord:
        """Sample one reply; see `GenerationClient.generate`.

        Args:
            cache_salt: the run's own; the policy version of the chosen server is added to it.
            model: name of an adapter, which is a policy version by itself: then the salt is sent as it is.
            affinity: the group; its requests share a server (and so the prompt's keys and values).
            member: which rollout of the group; its turns share a server.

        Raises:
            RequestRejectedError: the server refused the request.
            ServerUnavailableError: no server could answer after `max_retries` waits.
            ServerError: the reply lacks what was asked for.
        """
        if self.num_servers == 1:
            salt = self._salt(0, cache_salt, model)
            return await self.clients[0].generate(prompt_ids, sampling, seed, salt, model=model)
        if not self._watchers:
            self._watchers = [asyncio.create_task(self._watch(index)) for index in range(self.num_servers)]
        tried: set[int] = set()
        waits = 0
        reason = f"none of {self.base_url} is healthy and holds the newest weights"
        while True:
            self._see_versions()
            index = self.routing.choose(affinity, member, avoid=tried)
            if index is not None and index not in tried:
                try:
                    request = (prompt_ids, sampling, seed)
                    return await self._send(index, affinity, member, request, cache_salt, model)
                except ServerUnavailableError as error:
                    reason = error.message
                tried.add(index)
                if any(other not in tried for other in self.routing.usable()):
                    self._on_retry(reason)
                    continue
            if waits >= self.max_retries:
                break
            self._on_retry(reason)
            await asyncio.sleep(min(self.backoff_s * 2**waits, self.backoff_max_s))
            tried.clear()
            waits += 1
        raise ServerUnavailableError(
            f"No answer from {self.base_url}, after {waits} waits; the last reason: {reason}",
            "Look at the servers' logs; they may be down or overloaded.",
        )

    def server_of(self, affinity: int, member: Hashable = None) -> int:
        """The server of a rollout's latest request; the first where there was none."""
        return self.routing.server_of(affinity, member) or 0

    def forget(self, affinity: int) -> None:
        """The group has ended."""
        self.routing.forget(affinity)

    # one attempt

    async def _send(
        self,
        index: int,
        affinity: int | None,
        member: Hashable,
        request: tuple[list[int], SamplingSettings, int | None],
        cache_salt: str | None,
        model: str | None,
    ) -> TurnRecord:
        """One attempt at one server. Raises ServerUnavailableError when another server should be asked."""
        salt = self._salt(index, cache_salt, model)
        task = asyncio.create_task(self.clients[index].generate(*request, salt, model=model, retries=0))
        self.routing.started(index, affinity, member)
        self._running[index].add(task)
        try:
            turn = await task
            self._check_weights(index, turn)
        except ServerUnavailableError:
            if self.routing.failed(index, time.monotonic()):
                self._leave_out(index, "it failed several times in a row")
            raise
        except UnknownModelError as error:
            self.routing.gave_up(index)
            if model is None:
                raise
            raise ServerUnavailableError(error.message) from error  # started again: another server may have it
        except asyncio.CancelledError:
            self.routing.gave_up(index)
            current = asyncio.current_task()
            if task in self._moved and not (current is not None and current.cancelling()):
                raise ServerUnavailableError(f"{self.clients[index].base_url} was left out") from None
            raise
        except BaseException:
            self.routing.gave_up(index)
            raise
        finally:
            self._running[index].discard(task)
            self._moved.discard(task)
        self.routing.finished(index)
        return turn

    def _check_weights(self, index: int, turn: TurnRecord) -> None:
        """Refuse a reply that was not, or not only, computed with a policy of this run."""
        if self._freshness.saw_turn(index, turn):
            self._lose(index)
        self._see_versions()
        if self.routing.servers[index].stale:
            raise ServerUnavailableError(f"{self.clients[index].base_url} does not hold the newest weights")

    def _salt(self, index: int, cache_salt: str | None, model: str | None) -> str | None:
        versions = self._freshness.versions
        if cache_salt is None or model is not None or (versions is None and self._version is None):
            return cache_salt
        version = versions[index] if versions is not None else self._version and self._version()
        return f"{cache_salt}-{version}"

    # weights

    def _see_versions(self) -> None:
        """Leave out servers that missed a sync, take in those that got the newest weights."""
        for index, server in enumerate(self.routing.servers):
            stale = self._freshness.is_stale(index)
            if stale == server.stale:
                continue
            self.routing.set_stale(index, stale)
            if stale:
                self._leave_out(index, "it does not hold the newest weights")
            else:
                logger.info("%s holds the newest weights: in use again.", self.clients[index].base_url)
                self.on_change()

    def _lose(self, index: int) -> None:
        """The server's process is a new one: it waits for the next sync."""
        logger.warning("%s was started again and holds other weights.", self.clients[index].base_url)
        self._freshness.lost(index)
        self._see_versions()

    # health

    async def _watch(self, index: int) -> None:
        """Check one server's health every few seconds while it is in use, with growing waits while it is not."""
        checked = time.monotonic()
        while True:
            await asyncio.sleep(_TICK_S)
            self._see_versions()
            server, now = self.routing.servers[index], time.monotonic()
            if server.retry_at is not None:
                if now >= server.retry_at:
                    await self._probe(index)
            elif now - checked >= _CHECK_EVERY_S:
                healthy = await self.clients[index].is_healthy(_HEALTH_TIMEOUT_S)
                checked = time.monotonic()
                if not healthy and self.routing.missed(index, checked):
                    self._leave_out(index, "/health did not answer several times in a row")

    async def _probe(self, index: int) -> None:
        client = self.clients[index]
        if not await client.is_healthy(_HEALTH_TIMEOUT_S):
            self.routing.probe_failed(index, time.monotonic())
            return
        text = await client.metrics_text()
        # None, it cannot be told, counts as a new process: wrong weights cost more than waiting for a sync
        if self._freshness.saw_load(index, parse_metrics(text) if text is not None else None) is not False:
            self._lose(index)
        self.routing.bring_back(index)
        logger.info("%s answers again.", client.base_url)
        self.on_change()

    def _leave_out(self, index: int, why: str) -> None:
        """Send the requests that run there elsewhere."""
        logger.warning("%s is left out: %s.", self.clients[index].base_url, why)
        for task in list(self._running[index]):
            if not task.done():
                self._moved.add(task)
                task.cancel()
        self.on_change()
