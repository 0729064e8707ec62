"""Harnesses that are commands: what they are given, how they are read, that nothing of them stays."""

from __future__ import annotations

import asyncio
import os
import sys
import textwrap

import pytest

from asyncgrpo_core.errors import ConfigError
from asyncgrpo_core.rollout.harness import CommandHarnessLoop, HarnessFailedError
from asyncgrpo_core.rollout.harness.command import CommandFailedError, command_result
from asyncgrpo_core.rollout.harness.process import CommandOutput, run_command
from tests.unit.agent_parts import scripted
from tests.unit.harness_parts import adding_script, generated, ready, rollout, trained

# an agent that knows nothing of this project: the environment, stdin, HTTP and JSON of the standard library
AGENT = """
    import json, os, sys, urllib.request

    given = json.load(sys.stdin)
    messages = given["prompt"]
    function = {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": function}]
    while True:
        body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "tools": tools}
        request = urllib.request.Request(
            os.environ["OPENAI_BASE_URL"] + "/chat/completions",
            json.dumps(body).encode(),
            {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
        )
        message = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
        messages.append(message)
        for call in message.get("tool_calls", []):
            sum_of = sum(json.loads(call["function"]["arguments"]).values())
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(sum_of)})
        if "tool_calls" not in message:
            break
    print("it went well")
    print(json.dumps({"reward": given["row"]["answer"] + len(messages), "tool_failure_count": 1}))
"""
OPENAI_AGENT = """
    import json
    from openai import OpenAI  # takes URL and key from the environment

    reply = OpenAI(max_retries=0).chat.completions.create(model="any", messages=[{"role": "user", "content": "go"}])
    print(json.dumps({"reward": len(reply.choices[0].message.content)}))
"""


class Command(CommandHarnessLoop):
    script = AGENT

    def harness_command(self, prompt, row):
        return [sys.executable, "-c", textwrap.dedent(self.script)]


async def test_any_program_can_be_the_harness(tmp_path, monkeypatch) -> None:
    """F158, F184: a program of the standard library, two tool calls, one sample."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    async with scripted(adding_script) as server, ready(server, tmp_path, Command) as loop:
        done = await rollout(loop, row=2)
    assert done.rollout.reward == 2 + 6 and len(done.rollout.turns) == 3
    assert done.reconciled.forks == 0 and trained(done) == generated(done)
    assert (done.rollout.tool_call_count, done.rollout.tool_failure_count) == (2, 1)


async def test_openais_client_needs_no_settings(tmp_path) -> None:
    async with scripted(lambda *_: "hello") as server, ready(server, tmp_path, Command) as loop:
        loop.script = OPENAI_AGENT
        assert (await rollout(loop)).rollout.reward == 5.0


async def test_a_command_that_fails_says_why(tmp_path) -> None:
    async with scripted(adding_script) as server, ready(server, tmp_path, Command) as loop:
        loop.script = "import sys; sys.exit('no module named agent')"
        with pytest.raises(HarnessFailedError, match="exit status 1; .*no module named agent"):
            await rollout(loop)
        loop.harness_command = lambda prompt, row: ["/no/such/program"]
        with pytest.raises(HarnessFailedError, match="FileNotFoundError.*/no/such/program"):
            await rollout(loop)


def test_the_command_is_checked_and_python_is_this_one() -> None:
    class Plain(CommandHarnessLoop):
        command = ["{python}", "agent.py"]  # noqa: RUF012

    plain = object.__new__(Plain)
    assert plain.harness_command([], {}) == [sys.executable, "agent.py"]


async def test_a_class_without_a_command_is_refused(tmp_path) -> None:
    class Empty(CommandHarnessLoop):
        pass

    async with scripted(adding_script) as server:
        with pytest.raises(ConfigError, match="Empty has no command"):
            async with ready(server, tmp_path, Empty):
                pass


@pytest.mark.parametrize(
    ("stdout", "reward"), [('{"reward": 1}', 1), ('chatter\n{"reward": null, "exhausted": true}\n\n', None)]
)
def test_the_last_line_is_the_result(stdout, reward) -> None:
    result = command_result(["x"], CommandOutput(0, stdout, ""))
    assert result.reward == reward and result.exhausted == (reward is None)


@pytest.mark.parametrize("stdout", ["", "1.0", "[1]", '{"reward": "1"}', '{"score": 1}', '{"reward": 1}\nbye'])
def test_anything_else_is_no_result(stdout) -> None:
    with pytest.raises(CommandFailedError, match='"reward": 1.0'):
        command_result(["x"], CommandOutput(0, stdout, ""))


def test_a_signal_is_named() -> None:
    with pytest.raises(CommandFailedError, match="signal 9.*last words"):
        command_result(["x"], CommandOutput(-9, "", "last words"))


# processes

# a child of a child that ignores SIGTERM and holds the output open
FAMILY = """
import os, signal, subprocess, sys, time
deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", deaf])
with open(sys.argv[1] + ".part", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename(sys.argv[1] + ".part", sys.argv[1])
time.sleep(float(sys.argv[2]))
print("done")
"""


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def gone(pids: list[int]) -> bool:
    for _ in range(400):
        if not any(map(alive, pids)):
            return True
        await asyncio.sleep(0.01)
    return False


async def family(tmp_path) -> list[int]:
    while not (tmp_path / "pids").exists():
        await asyncio.sleep(0.01)
    return [int(pid) for pid in (tmp_path / "pids").read_text().split()]


def run_family(tmp_path, seconds: float):
    command = [sys.executable, "-c", FAMILY, str(tmp_path / "pids"), str(seconds)]
    return run_command(command, env=dict(os.environ), stdin=b"")


async def test_what_a_command_leaves_behind_is_killed(tmp_path) -> None:
    """The grandchild holds the output open: the end of the command is its exit, not the end of its output."""
    output = await asyncio.wait_for(run_family(tmp_path, 0.0), 30)
    assert output == CommandOutput(0, "done\n", "")
    assert await gone(await family(tmp_path))


async def test_a_cancelled_command_is_killed_with_its_children(tmp_path) -> None:
    task = asyncio.create_task(run_family(tmp_path, 600.0))
    pids = await family(tmp_path)
    assert all(map(alive, pids))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await gone(pids)


async def test_a_hanging_command_is_killed_at_the_deadline(tmp_path) -> None:
    async with scripted(adding_script) as server, ready(server, tmp_path, Command) as loop:
        loop.harness_timeout = 3.0
        loop.harness_command = lambda p, r: [sys.executable, "-c", FAMILY, str(tmp_path / "pids"), "600"]
        with pytest.raises(HarnessFailedError, match="still running after 3 s"):
            await rollout(loop)
        assert await gone(await family(tmp_path))


async def test_long_output_is_kept_from_the_end_and_unread_input_is_no_error() -> None:
    script = "import sys\nfor i in range(200000): print(i)\nprint('last', file=sys.stderr)"
    command = [sys.executable, "-c", script]
    output = await run_command(command, env=dict(os.environ), stdin=b"x" * (1 << 20), keep_bytes=1000)
    assert output.stdout.endswith("199998\n199999\n") and len(output.stdout) == 1000 and output.stderr == "last\n"
