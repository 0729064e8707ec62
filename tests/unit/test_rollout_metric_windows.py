"""Windows of rollout, tool and environment metrics computed by hand, and the naming rules of every metric."""

from __future__ import annotations

import ast
import asyncio
import math
import re
from pathlib import Path

import pytest

import asyncgrpo_core
from asyncgrpo_core.metrics import MetricWindow, kind_of
from asyncgrpo_core.rollout.context import FirstPrompt, RolloutContext
from asyncgrpo_core.rollout.group_metrics import GENERATED_SAMPLE_TOKENS, agent_events, generation_events
from asyncgrpo_core.rollout.loop import AsyncRolloutLoop
from asyncgrpo_core.rollout.one_rollout import FinishedRollout
from asyncgrpo_core.rollout.reconcile import reconcile
from asyncgrpo_core.rollout.tools import CallOutcome
from asyncgrpo_core.training.step_metrics import add_length_bias
from asyncgrpo_core.types import Rollout, Slot, TurnRecord
from tests.unit.fakes import FakeVLLM
from tests.unit.rollout_run import loop_run


def finished(*calls: CallOutcome, tokens: int = 2, parallel=(), exhausted=False, **more) -> FinishedRollout:
    turn = TurnRecord([1], [5] * tokens, [-1.0] * tokens)
    rollout = Rollout([], [5] * tokens, [turn], len(calls), sum(call.failed for call in calls))
    context = RolloutContext(
        Slot(0, 0, 0), 0, 0, FirstPrompt(), calls=list(calls), calls_per_message=list(parallel), exhausted=exhausted
    )
    values = {"duration_s": 1.0, "prompt": [], **more}
    return FinishedRollout(rollout, reconcile([turn], 0, want_top=False), context=context, **values)


def reduced(*groups: list[FinishedRollout], tools: bool = True) -> dict[str, float]:
    window = MetricWindow()
    for group in groups:
        window.extend(agent_events(group, tools=tools))
    return window.reduce()


def call(name: str, kind: str = "ok", seconds: float = 0.0) -> CallOutcome:
    return CallOutcome(name, kind, "", seconds)


def test_f074_f075_f076_f045_f046_a_window_of_tool_calls_by_hand() -> None:
    """Two groups of unequal call counts: every mean is over calls (or rollouts, or messages), not over groups."""
    first = [
        finished(call("fast", seconds=1.0), call("slow", seconds=5.0), call("nope", "unknown"), parallel=[3]),
        finished(call("fast", "raised", 3.0), parallel=[1], exhausted=True),
    ]
    second = [finished(), finished(call("fast", "bad_arguments"), call("", "malformed"), parallel=[1, 1])]
    got = reduced(first, second)
    assert got["tools/latency_s"] == pytest.approx((1 + 5 + 3) / 3)
    assert got["tools/fast/latency_s"] == 2.0 and got["tools/slow/latency_s"] == 5.0
    assert got["tools/fast/call_count"] == 3 and got["tools/fast/failure_count"] == 2
    assert got["tools/slow/call_count"] == 1 and got["tools/slow/failure_count"] == 0
    assert got["tools/unknown_name_count"] == got["tools/malformed_count"] == got["tools/bad_arguments_count"] == 1
    assert got["tools/call_frequency"] == 6 / 4 and got["tools/failure_frequency"] == 4 / 6
    assert got["tools/parallel_calls_mean"] == (3 + 1 + 1 + 1) / 4
    assert got["tools/loop_exhausted_frac"] == 1 / 4  # F077: over every rollout


def test_f046_no_call_in_a_window_is_not_zero_failures() -> None:
    assert math.isnan(reduced([finished()])["tools/failure_frequency"])
    assert reduced([finished()], tools=False) == {}


def test_f078_environment_times_only_where_there_is_an_environment() -> None:
    got = reduced([finished(reset_s=1.0), finished(reset_s=3.0, reward_s=0.5)], tools=False)
    assert got == {"env/reset_s": 2.0, "env/reward_s": 0.5}


def test_f187_calls_that_a_custom_generator_reports_are_logged_under_the_same_names() -> None:
    one = finished()
    one.rollout.tool_call_count, one.rollout.tool_failure_count = 4, 1
    got = reduced([one, finished()], tools=False)
    assert got["tools/call_frequency"] == 2.0 and got["tools/failure_frequency"] == 0.25


def test_f064_durations_are_averaged_over_rollouts() -> None:
    window = MetricWindow()
    for group in ([1.0], [2.0, 4.0, 5.0]):
        window.extend(generation_events([finished(duration_s=s) for s in group], frozenset()))
    assert window.reduce()["rollout/duration_s"] == 3.0


def test_f061_a_rate_is_total_tokens_over_total_seconds() -> None:
    window = MetricWindow()
    window.rate("rollout/generated_tokens_per_s", 10, 1.0)
    window.rate("rollout/generated_tokens_per_s", 90, 3.0)
    assert window.reduce() == {"rollout/generated_tokens_per_s": 25.0}  # the mean of the rates would be 20


def test_length_bias_is_trained_length_over_generated_length() -> None:
    """Generated 2, 2, 8; trained the two short ones: long rollouts are thinned out to half."""
    window = MetricWindow()
    window.extend(generation_events([finished(tokens=n) for n in (2, 2, 8)], frozenset()))
    window.add_many("sample/trained_tokens_mean", [2.0, 2.0])
    values = window.reduce()
    add_length_bias(values)
    assert values[GENERATED_SAMPLE_TOKENS] == 4.0 and values["sample/length_bias"] == 0.5
    empty: dict[str, float] = {"sample/trained_tokens_mean": 2.0}
    add_length_bias(empty)
    assert "sample/length_bias" not in empty


class Held:
    """A reward function that waits until the test lets it go."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.entered = 0

    async def __call__(self, completions, **_):
        self.entered += 1
        await self.open.wait()
        return [float(i) for i in range(len(completions))]


class OneAtATime(AsyncRolloutLoop):
    groups_scored_at_once = 1


async def test_f069_a_held_reward_shows_in_the_queue_and_the_waits(tmp_path) -> None:
    """One group is scored, one waits in the queue of one, and generation is blocked behind it."""
    held = Held()
    async with FakeVLLM() as server:
        run = loop_run(server, tmp_path, loop_cls=OneAtATime, reward_funcs=[held], score_queue_maxsize=1)

        def queue_has_been_seen() -> bool:
            sizes = [a for r in run.records for name, _, a, _ in r.metrics if name == "rollout/score_queue_size"]
            if any(size == 1.0 for size in sizes):
                held.open.set()
            return len(run.ended()) >= 4

        await run.until(queue_has_been_seen)
    metrics = run.metrics()
    assert (
        metrics["rollout/score_block_s"] > 0 and metrics["rollout/score_wait_s"] > 0 and metrics["rollout/score_s"] > 0
    )
    assert 0 < metrics["rollout/score_queue_size"] <= 1.0


async def test_generation_waits_while_groups_pile_up_before_the_scorer(tmp_path) -> None:
    """With the one scorer held, no more groups are started than may run at once, plus the queue and the held one."""
    held = Held()
    async with FakeVLLM() as server:
        run = loop_run(
            server, tmp_path, loop_cls=OneAtATime, reward_funcs=[held], score_queue_maxsize=1, max_concurrent_rollouts=8
        )
        looks: list[int] = []

        def nothing_more_is_sent() -> bool:
            looks.append(len(server.requests))
            return held.entered == 1 and len(looks) > 200 and looks[-1] == looks[-200]

        await run.until(nothing_more_is_sent)
        held.open.set()
    groups = 2 + 1 + 1 + 2  # two run at once; one is scored, one queued, one blocked, and what was started beside it
    assert 8 <= looks[-1] <= 4 * groups


async def test_many_groups_are_scored_at_once(tmp_path) -> None:
    """A slow reward holds up its own group only: all twelve groups are inside the function together."""
    held = Held()
    async with FakeVLLM() as server:
        run = loop_run(server, tmp_path, reward_funcs=[held], score_queue_maxsize=1)

        def all_inside() -> bool:
            if held.entered >= 12:
                held.open.set()
            return len(run.ended()) >= 12

        await run.until(all_inside)
    assert held.entered >= 12 and len({r.slot for r in run.ended()}) >= 12


# -- names

ROOT = Path(asyncgrpo_core.__file__).parent
_NAME = re.compile(r"^(rollout|tools|env|sample|batch|perf|sync|completions|sampling|rewards)/[\w/{}]+$")


def metric_names() -> set[str]:
    """Every string in the source that looks like a metric's name; a formatted part becomes {}."""
    names = set()
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
            elif isinstance(node, ast.JoinedStr):
                text = "".join(str(p.value) if isinstance(p, ast.Constant) else "{}" for p in node.values)
            else:
                continue
            if _NAME.match(text):
                names.add(text)
    return names


def test_f063_every_metric_follows_the_unit_suffixes() -> None:
    """_s seconds, tokens_per_s, _frac fractions, _per_step; no other word for a unit is in use."""
    names = metric_names()
    assert len(names) > 60 and "rollout/score_wait_s" in names and "tools/{}/latency_s" in names
    wrong = re.compile(r"(_ms|_sec|_secs|_seconds|_pct|_percent|_fraction|_per_sec|_per_second|_tps|_time|_duration)$")
    assert [name for name in sorted(names) if wrong.search(name)] == []
    for name in names:
        last = name.rsplit("/", 1)[-1]
        if "latency" in last or "wait" in last or "duration" in last:
            assert last.endswith("_s"), name
        if "per_s" in last.split("tokens_")[-1:]:
            assert last.endswith("tokens_per_s"), name


def test_f062_the_last_part_decides_the_reduction() -> None:
    expected = {
        "sample/dropped_stale_count": "count",
        "tools/add/call_count": "count",
        "rollout/counter": "mean",
        "counts/mean": "mean",
        "completions/max_length": "max",
        "sample/staleness_max": "max",
        "clip_ratio/low_min": "min",
        "rollout/maximum": "mean",
        "max/reward": "mean",
    }
    assert {name: kind_of(name) for name in expected} == expected
