"""A stand-in for a judge's server that fails as told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from aiohttp import web

from asyncgrpo_core.rewards import JudgeReward

PROMPTS = [[{"role": "user", "content": "2+2?"}]]


def completion(text: str) -> dict:
    return {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]}


class Server:
    """Answers request k with `script(k, body)`: a text (a completion's), a Response, or None (cut off)."""

    def __init__(self) -> None:
        self.script: Callable = lambda k, body: "Score: 1"
        self.bodies: list[dict] = []
        self.headers: list = []
        self.running = self.most = 0
        self.gate: asyncio.Event | None = None
        self.reached = asyncio.Event()
        self.wait_for = 1

    async def handle(self, request: web.Request) -> web.StreamResponse:
        k = len(self.bodies)
        self.bodies.append(await request.json())
        self.headers.append(request.headers)
        self.running += 1
        self.most = max(self.most, self.running)
        if self.running >= self.wait_for:
            self.reached.set()
        try:
            if self.gate is not None:
                await self.gate.wait()
            answer = self.script(k, self.bodies[k])
        finally:
            self.running -= 1
        if answer is None:
            request.transport.close()
            return web.Response()
        return answer if isinstance(answer, web.Response) else web.json_response(completion(answer))


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[tuple[Server, str]]:
    server = Server()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield server, f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def judged_by_server() -> AsyncIterator[tuple[Server, Callable[..., JudgeReward]]]:
    """The server, and a maker of judges that ask it."""
    async with serving() as (server, url):

        def make(**more) -> JudgeReward:
            defaults = {"base_url": url, "model": "judge-7b", "rubric": "Rate {completion}", "backoff_s": 0.001}
            return JudgeReward(**{**defaults, **more})

        yield server, make


async def ask(judge: JudgeReward, *texts: str, **columns) -> list:
    n = len(texts)
    return await judge(
        prompts=PROMPTS * n,
        completions=[[{"role": "assistant", "content": text}] for text in texts],
        completion_ids=[[0]] * n,
        **{name: [value] * n for name, value in columns.items()},
    )
