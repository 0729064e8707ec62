"""Token-in, token-out requests to a vLLM server: one coroutine call is one turn.

Two routes give the same `TurnRecord`. `/inference/v1/generate` (server flag --enable-scale-out) also reports the
policy version of every token and the candidate set under top-k / top-p; `/v1/completions` is there on every server.
The request and reply bodies are in `wire.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp

from asyncgrpo_core.errors import ServerError
from asyncgrpo_core.server.wire import (
    SamplingSettings,
    completions_body,
    parse_completions_reply,
    parse_tokens_reply,
    tokens_body,
)
from asyncgrpo_core.types import TurnRecord

__all__ = [
    "GenerationClient",
    "RequestRejectedError",
    "SamplingSettings",
    "ServerFacts",
    "ServerUnavailableError",
    "UnknownModelError",
]

TOKEN_ROUTE = "/inference/v1/generate"
COMPLETIONS_ROUTE = "/v1/completions"

# vLLM's HTTP server closes an idle connection after 5 s; a request sent on one at that moment is lost and would
# look like a retry, so we drop idle connections first.
_KEEPALIVE_S = 4.0
_RETRYABLE = frozenset({408, 425, 429})


class RequestRejectedError(ServerError):
    """The server refused a request that will never succeed (HTTP 4xx): sending it again cannot help."""


class UnknownModelError(RequestRejectedError):
    """The server does not know the model or adapter that the request names."""


class ServerUnavailableError(ServerError):
    """Every attempt at a request failed in a way that may pass: no connection, no answer in time, HTTP 5xx."""


@dataclass(frozen=True)
class ServerFacts:
    """What a server says about itself; None where it does not say (`max_logprobs` needs developer mode)."""

    routes: frozenset[str]
    max_model_len: int | None
    served_models: tuple[str, ...]
    max_logprobs: int | None

    @property
    def token_route(self) -> bool:
        return TOKEN_ROUTE in self.routes

    @classmethod
    def common(cls, several: Sequence[ServerFacts]) -> ServerFacts:
        """What holds for all of several servers: shared routes and models, the smallest bounds."""
        first, *others = several
        lengths = [facts.max_model_len for facts in several if facts.max_model_len is not None]
        bounds = [facts.max_logprobs for facts in several if facts.max_logprobs is not None]
        return cls(
            routes=first.routes.intersection(*(facts.routes for facts in others)),
            max_model_len=min(lengths) if lengths else None,
            served_models=tuple(m for m in first.served_models if all(m in facts.served_models for facts in others)),
            max_logprobs=smallest_max_logprobs(bounds),
        )


def smallest_max_logprobs(bounds: Sequence[int]) -> int | None:
    """The tightest of several --max-logprobs (-1 is no bound); None of none."""
    return min(bounds, key=lambda bound: bound if bound >= 0 else float("inf")) if bounds else None


class GenerationClient:
    """Sends sampling requests over one pooled HTTP session; retries what may succeed later.

    Args:
        base_url: e.g. "http://127.0.0.1:8000".
        model_name: the name the server serves the policy (or adapter) under.
        use_token_route: True for /inference/v1/generate, False for /v1/completions.
        timeout_s: deadline of one attempt, from sending to the last byte.
        max_connections: requests that may be in flight at once; more wait inside the client.
        max_retries: attempts after the first; between attempts the wait doubles from `backoff_s` to `backoff_max_s`.
        on_retry: called with the reason before each wait (counting, logging).
        max_logprobs: the server's --max-logprobs where known. One more than `num_logprobs` is requested when it
            allows (see `wire.requested_logprobs`).
        api_key: sent as a bearer token.

    All methods run on the event loop that first used the client.
    """

    def __init__(
        self,
        base_url: str,
        model_name: str,
        *,
        use_token_route: bool,
        timeout_s: float = 1800.0,
        max_connections: int = 512,
        max_retries: int = 6,
        backoff_s: float = 0.5,
        backoff_max_s: float = 30.0,
        on_retry: Callable[[str], None] | None = None,
        max_logprobs: int | None = None,
        api_key: str | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.model_name = model_name
        self.use_token_route = use_token_route
        self.timeout_s = timeout_s
        self.max_connections = max_connections
        self.max_retries = max_retries
        self.backoff_s = backoff_s
        self.backoff_max_s = backoff_max_s
        self.on_retry = on_retry
        self.max_logprobs = max_logprobs
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> GenerationClient:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def generate(
        self,
        prompt_ids: list[int],
        sampling: SamplingSettings,
        seed: int | None,
        cache_salt: str | None = None,
        *,
        model: str | None = None,
        retries: int | None = None,
    ) -> TurnRecord:
        """Sample one reply.

        Args:
            prompt_ids: token ids of the whole prompt.
            sampling: how to sample; one object is shared by all requests of a run.
            seed: this request's own seed (int64 range), None to let the server draw.
            cache_salt: keys of the prefix cache are kept apart by it; the policy version, so that no request
                reuses keys and values of older weights.
            model: name of the policy or adapter; None: `model_name`.
            retries: attempts after the first; None: `max_retries`.

        Raises:
            RequestRejectedError: HTTP 4xx; the message holds the server's text. Not retried. `UnknownModelError`
                where the server does not know the model.
            ServerUnavailableError: still failing after the last retry.
            ServerError: the reply lacks what was asked for.
        """
        name = self.model_name if model is None else model
        if self.use_token_route:
            body = tokens_body(name, prompt_ids, sampling, seed, cache_salt, max_logprobs=self.max_logprobs)
            reply = await self._post(TOKEN_ROUTE, body, parse_tokens_reply, prompt_ids, sampling, retries)
        else:
            body = completions_body(name, prompt_ids, sampling, seed, cache_salt, max_logprobs=self.max_logprobs)
            reply = await self._post(COMPLETIONS_ROUTE, body, parse_completions_reply, prompt_ids, sampling, retries)
        return reply

    async def facts(self) -> ServerFacts:
        """Ask the server what it offers (/openapi.json, /v1/models, in developer mode /server_info)."""
        openapi = await self._get_json("/openapi.json")
        routes = frozenset(openapi.get("paths", {}))
        models = await self._get_json("/v1/models")
        cards = models.get("data", [])
        lengths = [card["max_model_len"] for card in cards if card.get("max_model_len")]
        max_logprobs = None
        if "/server_info" in routes:
            info = await self._get_json("/server_info?config_format=json")
            config = info.get("vllm_config")
            model = config.get("model_config") if isinstance(config, dict) else None
            max_logprobs = model.get("max_logprobs") if isinstance(model, dict) else None
        return ServerFacts(
            routes=routes,
            max_model_len=min(lengths) if lengths else None,
            served_models=tuple(card.get("id", "") for card in cards),
            max_logprobs=max_logprobs,
        )

    async def metrics_text(self) -> str | None:
        """The server's Prometheus text, or None when it has no /metrics or does not answer in 5 s."""
        try:
            async with self._open().get(self.base_url + "/metrics", timeout=aiohttp.ClientTimeout(total=5.0)) as reply:
                return await reply.text() if reply.status == 200 else None
        except (TimeoutError, aiohttp.ClientError, OSError):
            return None

    async def is_healthy(self, timeout_s: float = 10.0) -> bool:
        """Whether /health answers 200 in time."""
        try:
            timeout = aiohttp.ClientTimeout(total=timeout_s)
            async with self._open().get(self.base_url + "/health", timeout=timeout) as reply:
                return reply.status == 200
        except (TimeoutError, aiohttp.ClientError, OSError):
            return False

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self.max_connections, keepalive_timeout=_KEEPALIVE_S),
                timeout=aiohttp.ClientTimeout(total=self.timeout_s),
                headers=self._headers,
            )
        return self._session

    async def _get_json(self, route: str) -> dict:
        for attempt in range(self.max_retries + 1):
            try:
                async with self._open().get(self.base_url + route) as reply:
                    if reply.status == 200:
                        return await reply.json(content_type=None)
                    reason = f"HTTP {reply.status}: {(await reply.text())[:500]}"
            except (TimeoutError, aiohttp.ClientError, OSError) as error:
                reason = _describe(error)
            await self._wait(attempt, self.max_retries, reason)
        raise ServerUnavailableError(
            f"GET {self.base_url}{route} failed {self.max_retries + 1} times, last with {reason}.",
            "Check that a vLLM server runs at this URL.",
        )

    async def _post(
        self, route: str, body: bytes, parse, prompt_ids: list[int], sampling: SamplingSettings, retries: int | None
    ) -> TurnRecord:
        url = self.base_url + route
        reason = ""
        retries = self.max_retries if retries is None else retries
        for attempt in range(retries + 1):
            try:
                async with self._open().post(url, data=body) as reply:
                    payload = await reply.read()
                    status = reply.status
            except (TimeoutError, aiohttp.ClientError, OSError) as error:
                reason = _describe(error)
            else:
                if status == 200:
                    turn = parse(payload, prompt_ids, sampling)
                    if turn.finish_reason != "abort":
                        return turn
                    reason = "the server aborted the request"
                else:
                    reason = f"HTTP {status}: {payload[:1000].decode('utf-8', 'replace')}"
                    if 400 <= status < 500 and status not in _RETRYABLE:
                        raise self._rejected(route, status, reason)
            await self._wait(attempt, retries, reason)
        raise ServerUnavailableError(
            f"POST {url} failed {retries + 1} times, last with {reason}.",
            "Look at the server's log; the server may be down or overloaded.",
        )

    async def _wait(self, attempt: int, retries: int, reason: str) -> None:
        if attempt >= retries:
            return
        if self.on_retry is not None:
            self.on_retry(reason)
        await asyncio.sleep(min(self.backoff_s * 2**attempt, self.backoff_max_s))

    def _rejected(self, route: str, status: int, reason: str) -> RequestRejectedError:
        fixes = {
            401: "Set the API key that the server was started with.",
            404: f"Start the server with --served-model-name {self.model_name}"
            + (" and --enable-scale-out." if route == TOKEN_ROUTE else "."),
        }
        fix = fixes.get(
            status, "Compare the prompt length, max_completion_length and sampling settings with the server's flags."
        )
        kind = UnknownModelError if status == 404 and "does not exist" in reason else RequestRejectedError
        return kind(f"POST {self.base_url}{route} was refused with {reason}.", fix)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
