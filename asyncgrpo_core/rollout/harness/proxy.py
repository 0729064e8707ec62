"""An OpenAI-compatible web server inside the rollout worker: one base URL and one API key per rollout.

    POST {base_url}/chat/completions     GET {base_url}/models         base_url = http://127.0.0.1:PORT/rollouts/ID/v1

It runs on the loop's own event loop, so a request is one more coroutine of the rollout that it belongs to.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from aiohttp import web

from asyncgrpo_core.errors import RolloutError
from asyncgrpo_core.rollout.harness.reply import reply_body, reply_events
from asyncgrpo_core.rollout.harness.request import IGNORED_HEADER, HarnessRequestError, read_request
from asyncgrpo_core.rollout.harness.session import HarnessSession, gone

if TYPE_CHECKING:
    from asyncgrpo_core.rollout.loop import AsyncRolloutLoop

logger = logging.getLogger(__name__)

_MAX_BODY_BYTES = 32 << 20
_ENDED_KEPT = 10_000  # ids of ended sessions, answered with 410 instead of 404


class OpenAIProxy:
    """`start`, then `open_session` per rollout, `close_session` when it ends, `close` at the end.

    Args:
        loop: its `chat`, `sampling`, `model_name` and `generate_one_turn` answer the requests.
        max_body_bytes: larger requests are refused with HTTP 413.
    """

    def __init__(self, loop: AsyncRolloutLoop, *, max_body_bytes: int = _MAX_BODY_BYTES) -> None:
        self._loop = loop
        self._max_body_bytes = max_body_bytes
        self._sessions: dict[str, HarnessSession] = {}
        self._ended: deque[str] = deque(maxlen=_ENDED_KEPT)
        self._warned: set[str] = set()
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self) -> None:
        """Listen on a free port of 127.0.0.1."""
        app = web.Application(client_max_size=self._max_body_bytes, middlewares=[_errors_as_json])
        app.router.add_post("/rollouts/{id}/v1/chat/completions", self._chat_completions)
        app.router.add_get("/rollouts/{id}/v1/models", self._models)
        # a harness that goes away takes its request with it
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, backlog=1024).start()
        self.port = self._runner.addresses[0][1]

    async def close(self) -> None:
        """End all sessions and stop listening."""
        for session in list(self._sessions.values()):
            self.close_session(session)
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def open_session(self, session: HarnessSession) -> str:
        """Admit a rollout; returns its base URL.

        Raises:
            RolloutError: the proxy does not run.
        """
        if self._runner is None:
            raise RolloutError("The harness proxy is not running.", "Call start() first.")
        self._sessions[session.id] = session
        return f"http://127.0.0.1:{self.port}/rollouts/{session.id}/v1"

    def close_session(self, session: HarnessSession) -> None:
        """End a rollout's session: what is still asked is answered with HTTP 410."""
        session.close()
        if self._sessions.pop(session.id, None) is not None:
            self._ended.append(session.id)

    async def _chat_completions(self, request: web.Request) -> web.Response:
        session = self._session_of(request)
        try:
            body = json.loads(await request.read())
        except (ValueError, RecursionError) as error:
            raise HarnessRequestError(400, f"the body is not JSON: {error}.") from error
        loop = self._loop
        chat = read_request(body, loop.sampling, tools_on=loop.chat.tools_on)
        reply = await session.answer(chat)
        headers = {}
        if chat.ignored:
            headers[IGNORED_HEADER] = ", ".join(chat.ignored)
            self._warn(chat.ignored)
        head = (f"chatcmpl-{session.id[:8]}-{len(session.turns)}", loop.model_name, int(time.time()))
        if not chat.stream:
            return web.json_response(reply_body(reply, *head), headers=headers)
        headers |= {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        return web.Response(body=reply_events(reply, *head, chat.include_usage).encode(), headers=headers)

    async def _models(self, request: web.Request) -> web.Response:
        self._session_of(request)
        card = {"id": self._loop.model_name, "object": "model", "created": 0, "owned_by": "asyncgrpo"}
        return web.json_response({"object": "list", "data": [card]})

    def _session_of(self, request: web.Request) -> HarnessSession:
        session_id = request.match_info["id"]
        session = self._sessions.get(session_id)
        if session is None:
            if session_id in self._ended:
                raise gone()
            raise HarnessRequestError(404, f"there is no rollout {session_id!r}; use the base URL that it was given.")
        key = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if not session.accepts(key):
            raise HarnessRequestError(
                401,
                "this API key is not this rollout's; use the one that came with the base URL.",
                code="invalid_api_key",
            )
        return session

    def _warn(self, ignored: list[str]) -> None:
        new = [name for name in ignored if name not in self._warned]
        self._warned.update(new)
        if new:
            logger.warning(
                "the harness sends %s, which the run overrules: the importance ratio is that of its own settings",
                ", ".join(new),
            )


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error in OpenAI's form. `x-should-retry` tells its clients that asking again cannot help."""
    try:
        return await handler(request)
    except HarnessRequestError as error:
        return _error_response(error)
    except web.HTTPException as error:
        text = {
            404: "only POST chat/completions and GET models are served",
            413: "the request is larger than the proxy takes",
        }.get(error.status, error.reason)
        return _error_response(HarnessRequestError(error.status, f"{request.method} {request.path}: {text}."))
    except asyncio.CancelledError:
        raise
    except Exception as error:
        logger.exception("the harness proxy failed at %s", request.path)
        return _error_response(HarnessRequestError(500, f"the proxy failed: {type(error).__name__}: {error}."))


def _error_response(error: HarnessRequestError) -> web.Response:
    body: dict[str, Any] = error.body()
    return web.json_response(body, status=error.status, headers={"x-should-retry": "false"})
