"""CommandHarnessLoop: the harness is a command, so any language and any framework will do."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from asyncgrpo_core.errors import AsyncGRPOError, ConfigError
from asyncgrpo_core.rollout.harness.loop import HarnessResult, HarnessRolloutLoop
from asyncgrpo_core.rollout.harness.process import CommandOutput, run_command

_SHOWN_CHARS = 2000


class CommandFailedError(AsyncGRPOError):
    """A harness command ended badly or printed no result; the message holds the end of its output."""


class CommandHarnessLoop(HarnessRolloutLoop):
    """Runs a command per rollout.

    The command finds OPENAI_BASE_URL, OPENAI_API_KEY (also OPENAI_API_BASE, as older programs call it) and OPENAI_MODEL
    in its environment and reads one JSON object from its standard input: {"prompt": [messages], "row": {columns}}. The
    last line that it prints is its result, a JSON object with "reward" (a number or null) and, optionally,
    "tool_failure_count" and "exhausted". Another exit status than 0 is a failure of the harness.

    It runs in a process group of its own, which is killed as a whole at `harness_timeout`, when the rollout is
    cancelled, and when the command has ended.

    Attributes:
        command: program and arguments, no shell; "{python}" stands for this interpreter.
        harness_cwd: its working directory; None: the run's.
    """

    command: list[str]
    harness_cwd: str | None = None

    def harness_command(self, prompt: list[dict[str, Any]], row: dict[str, Any]) -> list[str]:
        """The command of one rollout. Override it to put the row's columns into the arguments."""
        return [sys.executable if part == "{python}" else part for part in self.command]

    def harness_environment(self, prompt: list[dict[str, Any]], row: dict[str, Any]) -> dict[str, str]:
        """Environment variables of one rollout beside the inherited ones. Override it to add some."""
        return {}

    async def setup(self) -> None:
        overridden = type(self).harness_command is not CommandHarnessLoop.harness_command
        if not overridden and not getattr(self, "command", None):
            raise ConfigError(
                f"{type(self).__name__} has no command.", 'Set `command = ["python", "agent.py"]` in the class.'
            )
        await super().setup()

    async def run_harness(
        self, base_url: str, api_key: str, prompt: list[dict[str, Any]], row: dict[str, Any]
    ) -> HarnessResult:
        command = self.harness_command(prompt, row)
        env = {
            **os.environ,
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_BASE": base_url,
            "OPENAI_API_KEY": api_key,
            "OPENAI_MODEL": self.model_name,
            **_without_proxy(),
            **self.harness_environment(prompt, row),
        }
        stdin = json.dumps({"prompt": prompt, "row": row}, default=str).encode()
        return command_result(command, await run_command(command, env=env, stdin=stdin, cwd=self.harness_cwd))


def command_result(command: list[str], output: CommandOutput) -> HarnessResult:
    """Read the last line of a command's output.

    Raises:
        CommandFailedError: the command failed, or the line is no result.
    """
    if output.status != 0:
        how = f"exit status {output.status}" if output.status > 0 else f"signal {-output.status}"
        raise CommandFailedError(
            f"{command[0]} ended with {how}; the end of its output: {(output.stderr or output.stdout)[-_SHOWN_CHARS:]}"
        )
    lines = [line for line in output.stdout.splitlines() if line.strip()]
    line = lines[-1] if lines else ""
    try:
        result = json.loads(line)
        reward, failures = result["reward"], result.get("tool_failure_count", 0)
    except (ValueError, TypeError, KeyError, AttributeError):
        result = None
    number = result is not None and isinstance(reward, int | float | None) and isinstance(failures, int)
    if not number:
        raise CommandFailedError(
            f"The last line that {command[0]} printed is {line[-_SHOWN_CHARS:]!r}.",
            'Let it end with one like {"reward": 1.0}.',
        )
    return HarnessResult(reward, tool_failure_count=failures, exhausted=bool(result.get("exhausted")))


def _without_proxy() -> dict[str, str]:
    """NO_PROXY with this machine in it: a proxy of the environment must not be asked for 127.0.0.1."""
    names = {}
    for name in ("NO_PROXY", "no_proxy"):
        names[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1,localhost"]))
    return names
