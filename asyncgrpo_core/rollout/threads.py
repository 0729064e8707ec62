"""Sync user code (tools, environments, reward functions) in threads, each call with a deadline."""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections.abc import Callable
from typing import Any

_Jobs = queue.SimpleQueue[Callable[[], None] | None]


class CallDeadlineError(TimeoutError):
    """A call was still running at its deadline. A type of its own: the call itself may raise a TimeoutError."""


class CallThreads:
    """Runs blocking calls of user code beside the event loop, at most `limit` at once.

    A call past its deadline is given up: nothing can end a thread, so it goes on by itself, no longer counts toward the
    limit, and cannot keep the process alive (daemon). Pools of `concurrent.futures` and anyio wait for such a thread
    at exit, and the first loses the place for good. Threads are kept for the next call: starting one makes the event
    loop wait until it runs, which takes milliseconds on a busy machine.

    Args:
        limit: calls that may run at once; more wait for a place.
        name: prefix of the threads' names, for stack dumps.
    """

    def __init__(self, limit: int, name: str) -> None:
        self.limit = limit
        self.given_up = 0  # calls that were still running at their deadline
        self._name = name
        self._places = asyncio.Semaphore(limit)
        self._idle: list[_Jobs] = []

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
            jobs = self._idle.pop() if self._idle else self._new_thread()

            def call() -> None:
                try:
                    result, error = context.run(func), None
                except BaseException as raised:
                    result, error = None, raised
                try:
                    loop.call_soon_threadsafe(self._finished, jobs, future, result, error)
                except RuntimeError:
                    jobs.put(None)  # the loop has ended meanwhile, and with it the need for this thread

            jobs.put(call)
            done, _ = await asyncio.wait([future], timeout=timeout_s)
            if done:
                return future.result()
            self.given_up += 1
            future.cancel()
            raise CallDeadlineError(f"still running after {timeout_s:g} s")

    def close(self) -> None:
        """Let the idle threads end."""
        while self._idle:
            self._idle.pop().put(None)

    def _new_thread(self) -> _Jobs:
        jobs: _Jobs = queue.SimpleQueue()
        threading.Thread(target=_work, args=(jobs,), name=f"{self._name}-call", daemon=True).start()
        return jobs

    def _finished(self, jobs: _Jobs, future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        self._idle.append(jobs)
        _settle(future, result, error)


def _work(jobs: _Jobs) -> None:
    while (call := jobs.get()) is not None:
        call()
        del call  # or it would keep the last call's result until the next one


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        if isinstance(error, StopIteration):  # a future cannot hold one
            error = RuntimeError("the call raised StopIteration")
        future.set_exception(error)
