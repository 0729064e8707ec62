"""Where our worker's CPU time goes: a loop that times its own parts by the thread's CPU clock.

The parts are plain functions that never wait, so the clock around a call is theirs alone; what is left of the
process's CPU time is HTTP, the event loop and the tasks.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncgrpo_core.rollout import assemble, group_metrics, reconcile
from asyncgrpo_core.rollout.buffer import SampleBuffer
from asyncgrpo_core.rollout.chat.format import ChatFormat
from asyncgrpo_core.rollout.loop import AsyncRolloutLoop
from asyncgrpo_core.server import wire

RESULT = "ROLLOUT_BENCHMARK_PARTS"  # environment variable: the file that the loop leaves its times in
PARTS = {
    "decode reply": [wire.parse_tokens_reply, wire.parse_completions_reply],
    "encode request": [wire.tokens_body, wire.completions_body],
    "reconcile": [reconcile.reconcile],
    "group, metrics, record": [assemble.make_group, assemble.ended_record, group_metrics.generation_events],
}


class ProfiledLoop(AsyncRolloutLoop):
    """AsyncRolloutLoop with clocks around its parts; left in RESULT when it closes."""

    async def setup(self) -> None:
        self._spent: dict[str, float] = collections.defaultdict(float)
        for part, functions in PARTS.items():
            for function in functions:
                _replace_everywhere(function, self._timed(part, function))
        for part, holder, name in (
            ("chat template, tokenize", ChatFormat, "render"),
            ("detokenize", type(self.tokenizer), "decode"),
            ("buffer", SampleBuffer, "put"),
        ):  # the reward functions run in threads and are part of the rest
            setattr(holder, name, self._timed(part, getattr(holder, name)))
        self._began, self._tokens = time.process_time(), self.generated_tokens_value.value

    async def close(self) -> None:
        cpu_s = time.process_time() - self._began
        tokens = self.generated_tokens_value.value - self._tokens
        result = {"parts": dict(self._spent), "cpu_s": cpu_s, "tokens": tokens}
        Path(os.environ[RESULT]).write_text(json.dumps(result))

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        spent, clock = self._spent, time.thread_time

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = clock()
            try:
                return function(*args, **kwargs)
            finally:
                spent[part] += clock() - started

        return timed


def _replace_everywhere(function: Callable[..., Any], other: Callable[..., Any]) -> None:
    """Bind `other` wherever a module of ours has bound `function`."""
    for name, module in list(sys.modules.items()):
        if name.startswith("asyncgrpo_core"):
            for key, value in list(vars(module).items()):
                if value is function:
                    setattr(module, key, other)


def rows(result: dict[str, Any]) -> list[tuple[str, float, float]]:
    """(part, microseconds per token, share) with the rest last."""
    times = dict(sorted(result["parts"].items(), key=lambda item: -item[1]))
    times["HTTP, event loop, rest"] = result["cpu_s"] - sum(times.values())
    return [(name, 1e6 * spent / result["tokens"], spent / result["cpu_s"]) for name, spent in times.items()]


def print_parts(args: argparse.Namespace, folder: Path) -> None:
    """Run our sides once more with clocks inside, and print where their time goes."""
    from benchmarks.rollout_worker import side, stand_in

    for reply_tokens in args.reply_tokens:
        for name in ("ours", "ours, top 8"):
            os.environ[RESULT] = str(folder / "parts.json")
            shared = ["--tokenizer", str(folder / "tokenizer"), "--in-flight", str(args.in_flight), "--profile"]
            shared += ["--reply-tokens", str(reply_tokens)]
            with stand_in(reply_tokens) as (url, _), side(name, Path(sys.executable), [*shared, "--url", url]) as one:
                one.use(args.seconds)
            print(f"\n{name}, replies of {reply_tokens} tokens: us per token and share of the worker's CPU time")
            for part, microseconds, share in rows(json.loads((folder / "parts.json").read_text())):
                print(f"{part:>26} {microseconds:8.3f} {share:6.1%}")
