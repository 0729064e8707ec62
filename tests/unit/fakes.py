"""A stand-in for a vLLM server, in this process: answers the routes that the rollout side calls.

Replies have the exact shape of vLLM 0.32 (field names, the sampled token first in `top_logprobs`, the list cut at the
requested length). The sampled tokens are a pure function of the request's seed and prompt.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Callable
from typing import Any

from aiohttp import web

EOS_ID = 2
VOCAB = 50
RESET: Any = object()


class FakeVLLM:
    """`async with FakeVLLM() as server:` then `server.base_url`.

    Attributes that a test may set: `fail` (callable: request number -> HTTP status or None), `delay_s`, `version`
    (weight version reported), `sample` (callable: (rng, prompt_ids) -> token ids), `metrics` (text or None for 404),
    `token_route` (whether /inference/v1/generate exists), `max_model_len`, `vocab`, `eos_id`, `health`
    (status of /health) and `port`.
    `spoil` (callable: (request number, reply body) -> reply body, or RESET for a connection that is cut).
    `requests` holds (route, body) of every generation request; `max_in_flight` the most at once.
    """

    def __init__(self, **settings: Any) -> None:
        self.fail: Callable[[int], int | None] = lambda _number: None
        self.delay_s = 0.0
        self.version = "0"
        self.sample: Callable[[random.Random, list[int]], list[int]] = default_sample
        self.metrics: str | None = None
        self.token_route = True
        self.max_model_len = 512
        self.health = 200
        self.port = 0
        self.vocab = VOCAB
        self.eos_id = EOS_ID
        self.spoil: Callable[[int, dict], Any] = lambda _number, body: body
        for name, value in settings.items():
            setattr(self, name, value)
        self.requests: list[tuple[str, dict]] = []
        self.in_flight = 0
        self.max_in_flight = 0
        self.base_url = ""
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> FakeVLLM:
        app = web.Application(client_max_size=1 << 26)
        if self.token_route:
            app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/openapi.json", self._openapi)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.base_url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_exc: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _openapi(self, _request: web.Request) -> web.Response:
        assert self._runner is not None
        return web.json_response({"paths": {r.canonical: {} for r in self._runner.app.router.resources()}})

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "policy", "max_model_len": self.max_model_len}]})

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(status=self.health)

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(text=self.metrics) if self.metrics is not None else web.Response(status=404)

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        params = body["sampling_params"]
        refused = await self._enter(request.path, body)
        if refused is not None:
            return refused
        ids, tops = self._tokens(params.get("seed"), body["token_ids"], params)
        want = max(params["logprobs"], 1)
        content = [
            {
                "token_id": token,
                "logprob": entries[0]["logprob"],
                "rank": entries[0]["rank"],
                "top_logprobs": entries[:want],
            }
            for token, entries in zip(ids, tops, strict=True)
        ]
        choice = {
            "index": 0,
            "finish_reason": finish_reason(ids, params["max_tokens"], self.eos_id),
            "stop_reason": None,
            "token_ids": ids,
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": [{"version": self.version, "start": 0, "end": len(ids)}],
            "logprobs": {"content": content},
        }
        return self._reply(request, {"request_id": "r", "output_mode": "tokens", "choices": [choice]})

    async def _completions(self, request: web.Request) -> web.Response:
        body = await request.json()
        refused = await self._enter(request.path, body)
        if refused is not None:
            return refused
        ids, tops = self._tokens(body.get("seed"), body["prompt"], body)
        names = [{f"token_id:{e['token_id']}": e["logprob"] for e in entries} for entries in tops]
        logprobs = {
            "text_offset": [0] * len(ids),
            "tokens": [f"token_id:{token}" for token in ids],
            "token_logprobs": [entries[0]["logprob"] for entries in tops],
            "top_logprobs": names,
        }
        choice = {
            "index": 0,
            "text": "",
            "token_ids": ids,
            "logprobs": logprobs,
            "finish_reason": finish_reason(ids, body["max_tokens"], self.eos_id),
        }
        return self._reply(request, {"id": "c", "object": "text_completion", "choices": [choice]})

    def _reply(self, request: web.Request, body: dict) -> web.Response:
        body = self.spoil(len(self.requests), body)
        if body is RESET:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        return web.Response(text=json.dumps(body), content_type="application/json")

    async def _enter(self, route: str, body: dict) -> web.Response | None:
        self.requests.append((route, body))
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            status = self.fail(len(self.requests))
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
        finally:
            self.in_flight -= 1
        if status is None:
            return None
        return web.json_response({"error": {"message": f"fake failure {status}"}}, status=status)

    def _tokens(self, seed: int | None, prompt_ids: list[int], params: dict) -> tuple[list[int], list[list[dict]]]:
        rng = random.Random(f"{seed}-{prompt_ids}")
        ids = self.sample(rng, prompt_ids)[: params["max_tokens"]]
        return ids, [top_entries(rng, token, params["logprobs"], self.vocab) for token in ids]


def default_sample(rng: random.Random, _prompt_ids: list[int]) -> list[int]:
    return [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 5))] + [EOS_ID]


_LOGPROBS = [-0.5 - 0.25 * i for i in range(1000)]


def top_entries(rng: random.Random, token: int, k: int, vocab: int = VOCAB) -> list[dict]:
    """The engine's dict at one position: the sampled token first, then the k most likely without repeating it."""
    logprobs = _LOGPROBS[:vocab]
    if vocab > VOCAB:  # a shuffle of every position would take most of a test's time
        first = rng.randrange(vocab)
        ranked = [(first + i) % vocab for i in range(k)]
        rank = (token - first) % vocab + 1
    else:
        order = list(range(vocab))
        rng.shuffle(order)  # order[i] has rank i + 1
        ranked, rank = order[:k], order.index(token) + 1
    entries = [{"token_id": token, "logprob": logprobs[rank - 1], "rank": rank}]
    entries += [{"token_id": t, "logprob": logprobs[i], "rank": i + 1} for i, t in enumerate(ranked) if t != token]
    return entries


def finish_reason(ids: list[int], max_tokens: int, eos_id: int = EOS_ID) -> str:
    return "length" if len(ids) >= max_tokens and (not ids or ids[-1] != eos_id) else "stop"


class FakeTokenizer:
    """One token per character code modulo VOCAB; knows `enable_thinking` like Qwen3's template. Picklable."""

    def apply_chat_template(
        self,
        messages: list[dict],
        *,
        add_generation_prompt: bool,
        tokenize: bool,
        return_dict: bool,
        enable_thinking: bool = True,
    ) -> list[int]:
        assert add_generation_prompt and tokenize and not return_dict
        text = "".join(f"{m['role']}:{m['content']}\n" for m in messages) + ("<think>" if enable_thinking else "")
        return [3 + ord(c) % (VOCAB - 3) for c in text]

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return " ".join(str(i) for i in ids if not (skip_special_tokens and i == EOS_ID))


class ThreadedFakeVLLM:
    """The same server on an event loop in a thread of its own: `with ThreadedFakeVLLM() as server:`."""

    def __init__(self, **settings: Any) -> None:
        self.fake = FakeVLLM(**settings)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    @property
    def base_url(self) -> str:
        return self.fake.base_url

    def __enter__(self) -> ThreadedFakeVLLM:
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *_exc: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with self.fake:
            self._ready.set()
            await self._stop.wait()
