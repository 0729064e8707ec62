"""Tools: schemas, the outcome of every kind of call, and telling a broken tool from a bad policy."""

from __future__ import annotations

import asyncio
import functools
import pickle
import threading

import pytest

from asyncgrpo_core.errors import ConfigError
from asyncgrpo_core.rollout.chat.parsing import ToolCall
from asyncgrpo_core.rollout.threads import CallDeadlineError, CallThreads
from asyncgrpo_core.rollout.tools import (
    FailureWatch,
    ToolBox,
    ToolsDownError,
    check_tools,
    result_text,
    tool_schema,
)
from tests.unit.agent_parts import CounterEnv, add, broken, huge, lookup, sleepy


def box(timeout_s: float = 5.0, limit: float = 1.0, window: int = 4, chars: int = 100, threads: int = 4) -> ToolBox:
    watch = FailureWatch(limit, window)
    return ToolBox(CallThreads(threads, "tool"), timeout_s=timeout_s, max_result_chars=chars, watch=watch)


def call(name: str | None, error: str | None = None, **arguments) -> ToolCall:
    return ToolCall(name=name, arguments=arguments, error=error)


TOOLS = {"add": add, "lookup": lookup, "broken": broken, "sleepy": sleepy, "huge": huge}


def test_f170_schema_comes_from_hints_and_docstring() -> None:
    function = tool_schema(add)["function"]
    assert function["name"] == "add" and function["description"] == "Add two integers."
    assert function["parameters"]["properties"] == {
        "a": {"type": "integer", "description": "The first integer."},
        "b": {"type": "integer", "description": "The second integer."},
    }
    assert function["parameters"]["required"] == ["a", "b"]


def test_f175_a_method_is_described_without_self() -> None:
    function = tool_schema(CounterEnv().increment)["function"]
    assert function["name"] == "increment" and list(function["parameters"]["properties"]) == ["step"]


def undescribed(a: int) -> int:
    return a


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([undescribed], "'undescribed'.*cannot be described"),
        ([add, add], "Two tools are named 'add'"),
        ([functools.partial(add, 1)], "has no name of its own"),
        ([lambda a: a], "has no name of its own"),
        (["add"], "cannot be called"),
    ],
)
def test_f170_unusable_tools_are_refused_by_name(tools, message) -> None:
    with pytest.raises(ConfigError, match=message):
        check_tools(tools)


@pytest.mark.parametrize(
    ("one", "kind", "text"),
    [
        (call("add", a=1, b=2), "ok", "3"),
        (call("lookup", key="k"), "ok", "<k>"),
        (call("nope"), "unknown", "Error: there is no tool 'nope'; the tools are ['add', "),
        (call(None, "not valid JSON: x"), "malformed", "Error: not valid JSON: x"),
        (call("add", a=1), "bad_arguments", "Error: add: missing a required argument: 'b'."),
        (call("add", a=1, b=2, c=3), "bad_arguments", "Error: add: got an unexpected keyword argument 'c'."),
        (call("broken", text="t"), "raised", "Error: broken raised ConnectionError: no route to the sandbox for t"),
        (call("huge", characters=250), "ok", "x" * 100 + "\n[cut here: 150 more characters]"),
    ],
)
async def test_every_kind_of_call_is_answered_to_the_model(one, kind, text) -> None:
    """F075: unknown names and bad arguments are the policy's, raising and timing out the tool's."""
    outcome = await box().call(TOOLS, one)
    assert outcome.kind == kind and outcome.text.startswith(text) and outcome.failed == (kind != "ok")


async def test_a_tool_that_hangs_is_given_up_and_keeps_no_place() -> None:
    """The thread goes on; the next calls run all the same, also with a limit of one."""
    tool_box = box(timeout_s=0.05, threads=1)
    outcomes = [await tool_box.call(TOOLS, call("sleepy", seconds=1.0)) for _ in range(2)]
    assert [o.kind for o in outcomes] == ["timeout", "timeout"] and "within 0.05 s" in outcomes[0].text
    assert (await tool_box.call(TOOLS, call("add", a=1, b=1))).text == "2"


async def never(x: int) -> int:
    """Never return.

    Args:
        x: Anything.
    """
    await asyncio.Event().wait()
    return x


async def test_f074_latency_is_the_tools_own_time() -> None:
    """Waiting for a place is not in it: of three calls behind one place the last waits 0.4 s."""
    tool_box = box(threads=1)
    outcomes = await asyncio.gather(*(tool_box.call(TOOLS, call("sleepy", seconds=0.2)) for _ in range(3)))
    assert all(0.2 <= outcome.seconds < 0.39 for outcome in outcomes)
    assert (await tool_box.call(TOOLS, call("lookup", key="k"))).seconds < 0.2


async def test_an_async_tool_that_hangs_is_cancelled() -> None:
    outcome = await box(timeout_s=0.05).call({"never": never}, call("never", x=1))
    others = asyncio.all_tasks() - {asyncio.current_task()}
    assert outcome.kind == "timeout" and all(task.cancelling() for task in others)


def own_timeout(x: int) -> int:
    """Raise TimeoutError at once.

    Args:
        x: Anything.
    """
    raise TimeoutError("the service timed out")


async def test_a_timeout_error_of_the_tool_itself_is_no_deadline() -> None:
    outcome = await box().call({"own_timeout": own_timeout}, call("own_timeout", x=1))
    assert outcome.kind == "raised" and "the service timed out" in outcome.text


async def test_f171_sync_tools_run_side_by_side_up_to_the_limit() -> None:
    """Three calls meet at a barrier that opens for three: they can only pass when all run at once."""
    barrier = threading.Barrier(3)

    def meet(x: int) -> int:
        """Meet.

        Args:
            x: Anything.
        """
        barrier.wait(10)
        return x

    tool_box = box(timeout_s=20, threads=3)
    outcomes = await asyncio.gather(*(tool_box.call({"meet": meet}, call("meet", x=i)) for i in range(3)))
    assert [o.text for o in outcomes] == ["0", "1", "2"]


async def test_no_more_threads_than_the_limit() -> None:
    running, most, lock = 0, 0, threading.Lock()

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        threading.Event().wait(0.01)
        with lock:
            running -= 1

    threads = CallThreads(2, "test")
    await asyncio.gather(*(threads.run(work, 5) for _ in range(8)))
    assert most == 2


async def test_threads_are_kept_for_the_next_call_and_end_when_closed() -> None:
    threads = CallThreads(2, "kept")
    names = [await threads.run(lambda: threading.current_thread().ident, 5) for _ in range(20)]
    assert len(set(names)) <= 2
    threads.close()
    for _ in range(500):
        if not [thread for thread in threading.enumerate() if thread.name == "kept-call"]:
            break
        await asyncio.sleep(0.01)
    else:
        raise AssertionError("an idle thread did not end")


async def test_a_call_in_a_thread_gives_back_its_exception() -> None:
    def stop() -> None:
        raise StopIteration

    with pytest.raises(RuntimeError, match="StopIteration"):
        await CallThreads(1, "test").run(stop, 5)
    with pytest.raises(ZeroDivisionError):
        await CallThreads(1, "test").run(lambda: 1 / 0, 5)
    with pytest.raises(CallDeadlineError, match="still running after 0.01 s"):
        await CallThreads(1, "test").run(lambda: threading.Event().wait(0.5), 0.01)


@pytest.mark.parametrize(
    ("failures", "limit", "down_at"),
    [
        ("ffff", 0.5, 4),  # judged as soon as the window is full
        ("fff", 0.5, None),  # not before
        ("ofof", 0.5, None),  # exactly the limit is not above it
        ("ofoff", 0.5, 5),  # the window moves: f o f f
        ("ffffffff", 1.0, None),  # a limit of 1 never stops
        ("oooofffo", 0.5, 7),
        ("ffofoooo", 0.74, 4),
    ],
)
def test_failure_watch_table(failures, limit, down_at) -> None:
    watch = FailureWatch(limit, 4)
    raised_at = None
    for number, letter in enumerate(failures, start=1):
        try:
            watch.record("The tool 't'", "refused" if letter == "f" else None)
        except ToolsDownError as error:
            raised_at = number
            assert "The tool 't' failed in" in str(error) and "last with refused" in str(error)
            assert str(pickle.loads(pickle.dumps(error))) == str(error)
            break
    assert raised_at == down_at


def test_failure_watch_judges_each_name_by_itself() -> None:
    watch = FailureWatch(0.5, 2)
    for name in "abcabc"[:3]:
        watch.record(name, "down")
    with pytest.raises(ToolsDownError):
        watch.record("a", "down")


async def test_the_policys_mistakes_never_stop_a_run() -> None:
    tool_box = box(limit=0.5, window=2)
    for _ in range(5):
        await tool_box.call(TOOLS, call("nope"))
        await tool_box.call(TOOLS, call("add", a=1))
        await tool_box.call(TOOLS, call(None, "broken JSON"))
    await tool_box.call(TOOLS, call("broken", text="t"))
    with pytest.raises(ToolsDownError, match="broken raised ConnectionError"):
        await tool_box.call(TOOLS, call("broken", text="t"))


@pytest.mark.parametrize(
    ("result", "text"),
    [("as it is", "as it is"), (3, "3"), ({"ä": [1, None]}, '{"ä": [1, null]}'), (None, "null"), ({1}, "{1}")],
)
def test_results_as_the_model_reads_them(result, text) -> None:
    assert result_text(result) == text
