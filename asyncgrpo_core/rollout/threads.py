"""Sync user code (tools, environments, reward functions) in threads, each call with a deadline."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from typing import Any


class CallDeadlineError(TimeoutError):
    """A call was still running at its deadline. A type of its own: the call itself may raise a TimeoutError."""


class CallThreads:
    """Runs blocking calls of user code beside the event loop, at most `limit` at once.

    A call past its deadline is given up: nothing can end a thread, so it goes on by itself, no longer counts toward the
    limit, and cannot keep the process alive (daemon). Pools of `concurrent.futures` and anyio wait for such a thread
    at exit, and the first loses the place for good.

    Args:
        limit: calls that may run at once; more wait for a place.
        name: prefix of the threads' names, for stack dumps.
    """

    def __init__(self, limit: int, name: str) -> None:
        self.limit = limit
        self.given_up = 0  # calls that were still running at their deadline
        self._name = name
        self._places = asyncio.Semaphore(limit)

    async def run(self, func: Callable[[], Any], timeout_s: float) -> Any:
        """The call's result, or its exception.

        `timeout_s` counts from the call's start, not from the wait for a place.

        Raises:
            CallDeadlineError: still running after `timeout_s`.
        """
        async with self._places:
            loop = asyncio.get_running_loop()
            future: asyncio.Future[Any] = loop.create_future()
            context = contextvars.copy_context()

            def call() -> None:
                try:
                    result, error = context.run(func), None
                except BaseException as raised:
                    result, error = None, raised
                try:
                    loop.call_soon_threadsafe(_settle, future, result, error)
                except RuntimeError:
                    pass  # the loop has ended meanwhile

            threading.Thread(target=call, name=f"{self._name}-call", daemon=True).start()
            done, _ = await asyncio.wait([future], timeout=timeout_s)
            if done:
                return future.result()
            self.given_up += 1
            future.cancel()
            raise CallDeadlineError(f"still running after {timeout_s:g} s")


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        if isinstance(error, StopIteration):  # a future cannot hold one
            error = RuntimeError("the call raised StopIteration")
        future.set_exception(error)
