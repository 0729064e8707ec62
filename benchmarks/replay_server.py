"""A stand-in for a vLLM server that answers every request at once with a recorded reply, from ready-made bytes.

It must not be the bottleneck: no HTTP framework, one write per reply. The reply's form follows from what the request
asks for (`form_of`); the replies of a form are used in turn.

    python -m benchmarks.replay_server --reply-tokens 256       # prints its port
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
from collections.abc import Iterator
from typing import cast

from benchmarks.rollout_replies import MODEL, ROUTES, replies

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_LOGPROBS = re.compile(rb'"logprobs": ?(\d+)')
_MAX_MODEL_LEN = 1 << 20
_VERSION = 1  # a server that was synced once; ours reads it from every reply of the token route
_METRICS = (
    'vllm:kv_cache_usage_perc{engine="0"} 0.3\nvllm:num_requests_running{engine="0"} 512\n'
    'vllm:num_requests_waiting{engine="0"} 0\nvllm:num_preemptions_total{engine="0"} 0\n'
    f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{_MAX_MODEL_LEN * 512 // 16}"}} 1\n'
)


def form_of(route: bytes, body: bytes) -> str:
    """Which recorded form answers this request.

    Raises:
        ValueError: nothing recorded fits.
    """
    asked = _LOGPROBS.search(body)
    logprobs = int(asked.group(1)) if asked else None
    if route == b"/inference/v1/generate" and logprobs in (0, 9):
        return "tokens-8" if logprobs else "tokens-0"
    if route == b"/v1/completions" and logprobs in (0, 8):
        if b'"return_tokens_as_token_ids"' in body:
            return f"completions-{logprobs}"
        if logprobs == 0:
            return "trl"
    raise ValueError(f"no recorded reply for {route!r} with logprobs={logprobs}")


def http_reply(body: bytes, status: str = "200 OK", kind: str = "application/json") -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\ndate: Mon, 30 Nov 2026 07:19:02 GMT\r\nserver: uvicorn\r\n"
        f"content-length: {len(body)}\r\ncontent-type: {kind}\r\n\r\n"
    )
    return head.encode() + body


class Replay:
    """The ready-made replies; shared by all connections."""

    def __init__(self, num_tokens: int) -> None:
        self.generations: dict[str, Iterator[bytes]] = {}
        for form in ROUTES:
            version = _VERSION if form.startswith("tokens") else None
            self.generations[form] = itertools.cycle([http_reply(b) for b in replies(form, num_tokens, version)])
        card = {"id": MODEL, "object": "model", "max_model_len": _MAX_MODEL_LEN}
        self.pages = {
            b"/openapi.json": http_reply(json.dumps({"paths": {route: {} for route in ROUTES.values()}}).encode()),
            b"/v1/models": http_reply(json.dumps({"object": "list", "data": [card]}).encode()),
            b"/metrics": http_reply(_METRICS.encode(), kind="text/plain"),
            b"/health": http_reply(b""),
        }

    def answer(self, method: bytes, path: bytes, body: bytes) -> bytes:
        if method == b"GET":
            return self.pages.get(path.split(b"?")[0]) or http_reply(b"", "404 Not Found")
        try:
            return next(self.generations[form_of(path, body)])
        except ValueError as error:
            return http_reply(str(error).encode(), "400 Bad Request")


class Connection(asyncio.Protocol):
    """One keep-alive connection: cuts the byte stream into requests."""

    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        self._pending = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        pending = self._pending + data
        while (end := pending.find(b"\r\n\r\n")) >= 0:
            head = pending[:end]
            length = _LENGTH.search(head)
            size = end + 4 + (int(length.group(1)) if length else 0)
            if len(pending) < size:
                break
            method, path, _ = head.split(b" ", 2)
            self._transport.write(self._replay.answer(method, path, pending[end + 4 : size]))
            pending = pending[size:]
        self._pending = pending


async def serve(num_tokens: int) -> None:
    replay = Replay(num_tokens)
    server = await asyncio.get_running_loop().create_server(lambda: Connection(replay), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reply-tokens", type=int, default=256)
    args = parser.parse_args()
    try:
        from uvloop import run  # vLLM brings it
    except ImportError:
        from asyncio import run
    run(serve(args.reply_tokens))


if __name__ == "__main__":
    main()
