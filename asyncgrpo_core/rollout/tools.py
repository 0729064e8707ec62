"""Tools: plain functions that the model may call, called one at a time with a deadline, each outcome accounted for.

    ToolCall (parsed from the reply) -> known name? -> arguments fit? -> call -> text for the model + `CallOutcome`

A failed call is never an exception of the rollout: the model is told what went wrong and goes on. What it cannot do
anything about - a tool that raises or times out on nearly every call - is found by `FailureWatch` and ends the run.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from asyncgrpo_core.errors import ConfigError, RolloutError
from asyncgrpo_core.rollout.chat.parsing import ToolCall
from asyncgrpo_core.rollout.scoring import is_async
from asyncgrpo_core.rollout.threads import CallDeadlineError, CallThreads

# How a call can end. "unknown", "malformed" and "bad_arguments" are the policy's mistakes, the last two the tool's.
OUTCOMES = ("ok", "unknown", "malformed", "bad_arguments", "raised", "timeout")


@dataclass(frozen=True)
class CallOutcome:
    """One tool call: `name` as the model wrote it, `kind` one of OUTCOMES, `text` what the model reads.

    `seconds` is the time the tool itself ran, without waiting for a thread; 0 for a call that never reached one.
    """

    name: str
    kind: str
    text: str
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        return self.kind != "ok"


class ToolsDownError(RolloutError):
    """A tool or environment fails on nearly every call: the infrastructure is down, whatever the policy does."""


class FailureWatch:
    """Tells a tool that is down from a policy that calls it badly.

    A pure state machine over the last `window` calls of each name; only calls that ran count.

    Args:
        limit: share of failed calls above which the name counts as down; 1.0 never does.
        window: calls looked back on; a name is not judged before it has been called so often.
        fix: what to do about it, for the error's text.
    """

    def __init__(
        self,
        limit: float,
        window: int,
        *,
        fix: str = "Repair it, or raise tool_failure_limit if so many failures are normal for this tool.",
    ) -> None:
        self.limit = limit
        self.window = window
        self._fix = fix
        self._recent: dict[str, deque[bool]] = {}

    def record(self, name: str, error: str | None) -> None:
        """Take one finished call; `error` says how it failed, None that it did not.

        Raises:
            ToolsDownError: with this call, more than `limit` of the last `window` calls of `name` have failed.
        """
        recent = self._recent.setdefault(name, deque(maxlen=self.window))
        recent.append(error is not None)
        failed = sum(recent)
        if error is not None and len(recent) == self.window and failed > self.limit * self.window:
            raise ToolsDownError(
                f"{name} failed in {failed} of the last {self.window} calls, last with {error}. That is not the "
                "policy: what it needs (a service, a sandbox, a file) is probably down.",
                self._fix,
            )


def tool_name(func: Callable[..., Any]) -> str:
    """The name that the model calls a tool by: the function's own.

    Raises:
        ConfigError: the object has none (a partial, a callable object).
    """
    name = getattr(func, "__name__", None)
    if not isinstance(name, str) or not name.isidentifier():
        raise ConfigError(
            f"The tool {func!r} has no name of its own, and the model calls a tool by its name.",
            "Pass a module-level function (def tool(...)); wrap a partial or an object in one.",
        )
    return name


def tool_schema(func: Callable[..., Any]) -> dict[str, Any]:
    """The JSON schema of a tool, from its type hints and Google-style docstring (made by transformers).

    Raises:
        ConfigError: the docstring or a type hint is missing.
    """
    return _schema(getattr(func, "__func__", func), inspect.ismethod(func))


@functools.lru_cache(maxsize=1024)
def _schema(func: Callable[..., Any], is_method: bool) -> dict[str, Any]:
    from transformers.utils import get_json_schema

    name = tool_name(func)
    try:
        # bound to anything: the schema must not show `self` to the model
        return get_json_schema(func.__get__(object()) if is_method else func)
    except Exception as error:  # transformers raises DocstringParsingException, TypeHintParsingException, ...
        raise ConfigError(
            f"The tool {name!r} ({_where(func)}) cannot be described to the model: {' '.join(str(error).split())}.",
            "Give it type hints and a Google-style docstring: a summary, and an `Args:` section with every argument.",
        ) from error


def check_tools(funcs: Iterable[Callable[..., Any]]) -> None:
    """Check that every tool has a name of its own, a schema, and no namesake.

    Raises:
        ConfigError: names the tool and what it lacks.
    """
    seen: dict[str, Callable[..., Any]] = {}
    for func in funcs:
        if not callable(func):
            raise ConfigError(f"tools holds {func!r}, which cannot be called.", "Pass functions.")
        name = tool_name(func)
        if name in seen:
            raise ConfigError(
                f"Two tools are named {name!r} ({_where(seen[name])} and {_where(func)}); the model could not tell "
                "them apart.",
                "Rename one of them.",
            )
        seen[name] = func
        tool_schema(func)


class ToolBox:
    """Calls tools for many rollouts at once.

    Args:
        threads: where sync tools run, so that a slow one does not hold up the other rollouts.
        timeout_s: deadline of one call.
        max_result_chars: longer results are cut, and the model is told how much is missing.
        watch: hears of every call that ran.
    """

    def __init__(self, threads: CallThreads, *, timeout_s: float, max_result_chars: int, watch: FailureWatch) -> None:
        self._threads = threads
        self._timeout_s = timeout_s
        self._max_result_chars = max_result_chars
        self._watch = watch

    async def call(self, tools: dict[str, Callable[..., Any]], call: ToolCall) -> CallOutcome:
        """Run one call.

        Raises:
            ToolsDownError: see `FailureWatch.record`.
        """
        name = call.name or ""
        if call.error is not None:
            return CallOutcome(name, "malformed", f"Error: {call.error}")
        func = tools.get(name)
        if func is None:
            return CallOutcome(name, "unknown", f"Error: there is no tool {name!r}; the tools are {sorted(tools)}.")
        try:
            inspect.signature(func).bind(**call.arguments)
        except TypeError as error:
            return CallOutcome(name, "bad_arguments", f"Error: {name}: {error}.")
        watch = _Stopwatch(func)
        kind, text = await self._run(name, watch.call, call.arguments)
        seconds = self._timeout_s if kind == "timeout" else watch.seconds
        self._watch.record(f"The tool {name!r}", None if kind == "ok" else text.removeprefix("Error: "))
        return CallOutcome(name, kind, self._cut(text), seconds)

    async def _run(self, name: str, func: Callable[..., Any], arguments: dict[str, Any]) -> tuple[str, str]:
        try:
            return "ok", result_text(await call_within(func, arguments, self._threads, self._timeout_s))
        except CallDeadlineError:
            return "timeout", f"Error: {name} did not answer within {self._timeout_s:g} s."
        except Exception as error:  # a tool is user code: whatever it raises is an answer to the model
            return "raised", f"Error: {name} raised {type(error).__name__}: {error}"

    def _cut(self, text: str) -> str:
        if len(text) <= self._max_result_chars:
            return text
        left_out = len(text) - self._max_result_chars
        return f"{text[: self._max_result_chars]}\n[cut here: {left_out} more characters]"


class _Stopwatch:
    """Times a function where it runs; `call` is async when the function is."""

    def __init__(self, func: Callable[..., Any]) -> None:
        self.seconds = 0.0
        self.call = self._async if is_async(func) else self._sync
        self._func = func

    def _sync(self, **arguments: Any) -> Any:
        started = time.monotonic()
        try:
            return self._func(**arguments)
        finally:
            self.seconds = time.monotonic() - started

    async def _async(self, **arguments: Any) -> Any:
        started = time.monotonic()
        try:
            return await self._func(**arguments)
        finally:
            self.seconds = time.monotonic() - started


async def call_within(
    func: Callable[..., Any], arguments: dict[str, Any], threads: CallThreads, timeout_s: float
) -> Any:
    """Call sync or async user code with a deadline; sync code runs in a thread.

    Raises:
        CallDeadlineError: still running after `timeout_s`; anything that `func` raises.
    """
    if not is_async(func):
        return await threads.run(functools.partial(func, **arguments), timeout_s)
    task = asyncio.ensure_future(func(**arguments))
    try:
        done, _ = await asyncio.wait([task], timeout=timeout_s)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not done:
        task.cancel()
        raise CallDeadlineError(f"still running after {timeout_s:g} s")
    return task.result()


def result_text(result: Any) -> str:
    """What the model reads of a tool's result: a string as it is, anything else as JSON, else as `str` prints it."""
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(result)


def _where(func: Any) -> str:
    return f"{getattr(func, '__module__', '?')}:{getattr(func, '__qualname__', repr(func))}"
