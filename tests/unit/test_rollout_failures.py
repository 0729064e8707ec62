"""Failing inputs: the run goes on or stops with the right message, and the ledger accounts for every group."""

from __future__ import annotations

import asyncio
import copy
import math
import re

import pytest

from asyncgrpo_core.errors import RolloutError
from asyncgrpo_core.ledger import LedgerWriter
from asyncgrpo_core.ledger_counts import CountsReader
from asyncgrpo_core.rollout.loop import AsyncRolloutLoop
from asyncgrpo_core.slots import SlotBook
from tests.unit.agent_parts import CounterEnv, add, agent_tokenizer, broken, call_text, huge, scripted, sleepy
from tests.unit.fakes import RESET, FakeVLLM
from tests.unit.rollout_run import ROWS, loop_run

NUM_ROWS = 6
QUESTIONS = [{"prompt": [{"role": "user", "content": f"Question {i}?"}], "target": 2} for i in range(NUM_ROWS)]


def index_reward(completions, **_):
    return [float(i) for i in range(len(completions))]


class Impatient(AsyncRolloutLoop):
    """Waits milliseconds, not minutes, before it sends a request again."""

    async def connect(self):
        client = await super().connect()
        client.max_retries, client.backoff_s = 2, 0.001
        return client


class Accountant:
    """The trainer's books: takes every record, asks for regenerations, trains every sample at once."""

    def __init__(self, run, folder) -> None:
        self.run, self.path = run, folder / "ledger.sqlite"
        self.book = SlotBook(num_rows=len(run.loop.dataset))
        self.ledger = LedgerWriter(self.path, num_rows=len(run.loop.dataset))
        self.seen = 0
        self.failures = 0

    def two_epochs_have_ended(self) -> bool:
        """Apply what is new, then look."""
        for record in self.run.records[self.seen :]:
            self.failures += record.outcome == "failed"
            samples, regenerate = self.book.apply(record)
            if regenerate is not None:
                self.run.buffer.request_regeneration(*regenerate)
            for sample in samples:
                self.book.sample_trained(sample, 1)
        self.seen = len(self.run.records)
        self.ledger.write(self.book.drain_rows())
        return self.book.passes_done(2)

    def counts(self) -> dict:
        self.ledger.close()
        return CountsReader(self.path).read(fresh=True)


async def two_passes(run, folder) -> tuple[dict, Accountant]:
    books = Accountant(run, folder)
    await run.until(books.two_epochs_have_ended, timeout_s=60)
    return books.counts(), books


def accounts_for_every_group(counts: dict) -> None:
    assert counts["lost"] == 0 and counts["trained_twice"] == 0
    assert counts["prompts"] == counts["trained"] + sum(counts["dropped"].values()) + counts["pending"]
    assert counts["trained"] + sum(counts["dropped"].values()) >= 2 * NUM_ROWS


# -- the server


def fewer_logprobs(number: int, body: dict) -> dict:
    body["choices"][0]["logprobs"]["content"].pop()
    return body


def no_top_logprobs(number: int, body: dict) -> dict:
    for token in body["choices"][0]["logprobs"]["content"]:
        token["top_logprobs"] = []
    return body


def nan_logprob(number: int, body: dict) -> dict:
    body["choices"][0]["logprobs"]["content"][0]["logprob"] = math.nan
    return body


def null_logprob(number: int, body: dict) -> dict:
    body["choices"][0]["logprobs"]["content"][0]["logprob"] = None
    return body


def no_choices(number: int, body: dict) -> dict:
    return {"error": "oops"}


def reset(number: int, body: dict):
    return RESET


def one_in_nine(spoil):
    return lambda number, body: spoil(number, body) if number % 9 == 0 else body


@pytest.mark.parametrize("spoil", [fewer_logprobs, nan_logprob, null_logprob, no_choices, reset])
async def test_a_server_that_answers_badly_now_and_then(tmp_path, spoil) -> None:
    async with FakeVLLM(spoil=one_in_nine(spoil)) as server:
        run = loop_run(server, tmp_path, loop_cls=Impatient, reward_funcs=[index_reward])
        counts, books = await two_passes(run, tmp_path)
    accounts_for_every_group(counts)
    if spoil is reset:
        assert run.metrics()["rollout/vllm_retry_count"] > 0
    else:
        assert books.failures > 0


async def test_errors_500_now_and_then_are_sent_again(tmp_path) -> None:
    async with FakeVLLM(fail=lambda number: 500 if number % 5 == 0 else None) as server:
        run = loop_run(server, tmp_path, loop_cls=Impatient, reward_funcs=[index_reward])
        counts, _ = await two_passes(run, tmp_path)
    accounts_for_every_group(counts)
    assert run.metrics()["rollout/vllm_retry_count"] > 0


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (fewer_logprobs, r"Reading the server's replies failed for 8 .*returned \d tokens with \d log-probabilities"),
        (nan_logprob, "Reading the server's replies failed for 8 .*not a generation reply"),
        (null_logprob, "Reading the server's replies failed for 8 .*not a generation reply"),
        (no_choices, "Reading the server's replies failed for 8 .*not a generation reply"),
        (no_top_logprobs, "Reading the server's replies failed for 8 .*none of the most likely tokens"),
    ],
)
async def test_a_server_that_always_answers_badly_stops_the_run(tmp_path, spoil, message) -> None:
    """Before many prompts are given up: each slot is generated three times at most."""
    async with FakeVLLM(spoil=spoil) as server:
        run = loop_run(server, tmp_path, loop_cls=Impatient, reward_funcs=[index_reward])
        with pytest.raises(RolloutError, match=message):
            await two_passes(run, tmp_path)
    assert len([r for r in run.records if r.outcome == "failed"]) <= 8


# -- rewards


class SometimesSlow:
    """Hangs on every fifth group."""

    def __init__(self, every: int) -> None:
        self.every, self.calls = every, 0

    async def __call__(self, completions, **_):
        self.calls += 1
        if self.calls % self.every == 0:
            await asyncio.Event().wait()
        return [float(i) for i in range(len(completions))]


async def test_a_reward_that_hangs_now_and_then_fails_its_group(tmp_path) -> None:
    async with FakeVLLM() as server:
        run = loop_run(server, tmp_path, reward_funcs=[SometimesSlow(5)], reward_timeout=0.1)
        counts, _ = await two_passes(run, tmp_path)
    accounts_for_every_group(counts)
    failed = [r for r in run.records if r.outcome == "failed"]
    assert failed and "SometimesSlow" in failed[0].error and "0.1 s" in failed[0].error


async def test_a_reward_that_always_hangs_stops_the_run(tmp_path) -> None:
    async with FakeVLLM() as server:
        run = loop_run(server, tmp_path, reward_funcs=[SometimesSlow(1)], reward_timeout=0.05)
        with pytest.raises(RolloutError, match="Scoring failed for .*SometimesSlow.*0.05 s"):
            await two_passes(run, tmp_path)


# -- tools and environments


def one_call(call: str):
    return lambda rng, prompt: "done" if "<tool_response>" in prompt else call


@pytest.mark.parametrize(
    ("tool", "call"),
    [
        (broken, call_text("broken", text="t")),
        (sleepy, call_text("sleepy", seconds=20)),
        (huge, call_text("huge", characters=1 << 20)),
        (add, call_text("add", a="one", b=[])),
    ],
)
async def test_tools_that_fail_cost_no_group(tmp_path, tool, call) -> None:
    async with scripted(one_call(call)) as server:
        run = loop_run(
            server,
            tmp_path,
            rows=QUESTIONS,
            tokenizer=agent_tokenizer(),
            tools=[tool],
            reward_funcs=[index_reward],
            tool_timeout=0.05,
            max_tool_result_chars=200,
            max_completion_length=120,
            tool_failure_limit=1.0,
        )
        counts, books = await two_passes(run, tmp_path)
    accounts_for_every_group(counts)
    assert counts["trained"] >= 2 * NUM_ROWS and books.failures == 0


class FailingNowAndThen(CounterEnv):
    calls = 0

    def reset(self, **kwargs):
        type(self).calls += 1
        if type(self).calls % 30 == 0:
            raise OSError("the game server is gone")
        return super().reset(**kwargs)


async def test_a_reset_that_raises_now_and_then_is_accounted_for(tmp_path) -> None:
    FailingNowAndThen.calls = 0
    async with scripted(one_call(call_text("increment", step=2))) as server:
        run = loop_run(
            server,
            tmp_path,
            rows=QUESTIONS,
            tokenizer=agent_tokenizer(),
            environment_factory=FailingNowAndThen,
            reward_funcs=[index_reward],
            max_completion_length=120,
        )
        counts, books = await two_passes(run, tmp_path)
    accounts_for_every_group(counts)
    assert books.failures >= 1


def test_the_spoilers_spoil() -> None:
    """Each of them changes a reply, so that no test above passes for want of a failure."""
    token = {"logprob": -1.0, "rank": 1, "top_logprobs": [{"token_id": i, "logprob": -1.0} for i in range(5)]}
    body = {"choices": [{"logprobs": {"content": [token, copy.deepcopy(token)]}}]}
    for spoil in (fewer_logprobs, no_top_logprobs, nan_logprob, null_logprob, no_choices):
        changed = spoil(1, copy.deepcopy(body))
        assert changed != body and not re.match("x", spoil.__name__)
    assert ROWS and reset(1, body) is RESET
