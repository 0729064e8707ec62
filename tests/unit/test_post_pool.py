"""The generation client's HTTP connections, against a server that answers byte by byte as told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest

from asyncgrpo_core.server.post_pool import HttpError, PostPool

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


class Server:
    """Hands every request's (head, body) to `answer`, which returns the pieces to write; None closes."""

    def __init__(self, answer: Callable[[int, bytes, bytes], list[bytes | None]]) -> None:
        self.requests: list[tuple[bytes, bytes]] = []
        self.connections = 0
        self._answer = answer
        self._server: asyncio.Server | None = None

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/base"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                body = await reader.readexactly(length)
                self.requests.append((head, body))
                for piece in self._answer(len(self.requests), head, body):
                    if piece is None:
                        return writer.close()
                    writer.write(piece)
                    await asyncio.sleep(0.001)  # so that the pieces arrive apart

    def stop(self) -> None:
        if self._server is not None:
            self._server.close()


@contextlib.asynccontextmanager
async def pool_for(
    answer: Callable[[int, bytes, bytes], list[bytes | None]], *, limit: int = 4, keepalive_s: float = 4.0
) -> AsyncIterator[tuple[PostPool, Server]]:
    server = Server(answer)
    pool = PostPool(await server.start(), limit=limit, keepalive_s=keepalive_s, headers={"X-Key": "k"})
    try:
        yield pool, server
    finally:
        pool.close()
        server.stop()


async def test_a_request_is_whole_and_its_connection_used_again() -> None:
    async with pool_for(lambda *_: [OK]) as (pool, server):
        for _ in range(3):
            assert await pool.post("/v1/completions", b'{"a":1}', 5.0) == (200, b"hello")
    assert server.connections == 1
    head, body = server.requests[0]
    assert head.startswith(b"POST /base/v1/completions HTTP/1.1\r\n") and body == b'{"a":1}'
    assert b"\r\nX-Key: k\r\n" in head and b"\r\nHost: 127.0.0.1:" in head


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([OK[i : i + 1] for i in range(len(OK))], (200, b"hello")),
        ([b"HTTP/1.1 503 Busy\r\ncontent-length:0\r\n\r\n"], (503, b"")),
        ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n", b"2;x=y\r\nlo", b"\r\n0\r\n\r\n"],
         (200, b"hello")),
        ([b"HTTP/1.1 200 OK\r\n\r\nhe", b"llo", None], (200, b"hello")),
        ([b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello", None], (200, b"hello")),
    ],
)  # fmt: skip
async def test_replies_in_every_form_and_piece(pieces, expected) -> None:
    async with pool_for(lambda *_: pieces) as (pool, _):
        assert await pool.post("/x", b"{}", 5.0) == expected
        assert await pool.post("/x", b"{}", 5.0) == expected


@pytest.mark.parametrize(
    "pieces",
    [
        [None],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhel", None],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel", None],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"],
        [b"SSH-2.0-OpenSSH\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhello"],
    ],
)
async def test_a_reply_cut_off_or_not_http_is_an_error_and_the_pool_goes_on(pieces) -> None:
    async with pool_for(lambda number, *_: pieces if number == 1 else [OK]) as (pool, _):
        with pytest.raises(HttpError):
            await pool.post("/x", b"{}", 5.0)
        assert await pool.post("/x", b"{}", 5.0) == (200, b"hello")


async def test_no_reply_in_time_is_a_timeout_and_a_late_reply_reaches_nobody() -> None:
    async with pool_for(lambda number, *_: [] if number == 1 else [OK], limit=1) as (pool, server):
        with pytest.raises(TimeoutError):
            await pool.post("/x", b"{}", 0.05)
        assert await pool.post("/x", b"{}", 5.0) == (200, b"hello")
        assert server.connections == 2


async def test_no_connection_is_an_oserror() -> None:
    pool = PostPool("http://127.0.0.1:1", limit=1, keepalive_s=4.0, headers={})
    for _ in range(2):  # the place is given back
        with pytest.raises(OSError):
            await asyncio.wait_for(pool.post("/x", b"{}", 5.0), 5.0)


async def test_more_requests_than_places_wait_and_a_cancelled_one_gives_its_place_back() -> None:
    async with pool_for(lambda *_: [OK], limit=2) as (pool, server):
        tasks = [asyncio.create_task(pool.post("/x", b"{}", 5.0)) for _ in range(20)]
        await asyncio.sleep(0)
        for task in tasks[::5]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(isinstance(result, asyncio.CancelledError) for result in results) == 4
        assert results.count((200, b"hello")) == 16
        assert len(server.requests) <= 20
        assert await pool.post("/x", b"{}", 5.0) == (200, b"hello")


async def test_a_connection_idle_for_too_long_is_not_used_again() -> None:
    async with pool_for(lambda *_: [OK], keepalive_s=0.0) as (pool, server):
        await pool.post("/x", b"{}", 5.0)
        await pool.post("/x", b"{}", 5.0)
        assert server.connections == 2
