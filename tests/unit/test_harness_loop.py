"""HarnessRolloutLoop in a run: rewards, failures of the engine and of the harness, deadlines."""

from __future__ import annotations

import asyncio

import numpy as np
import openai
import pytest

from asyncgrpo_core.errors import ConfigError, RolloutError
from asyncgrpo_core.rollout.harness import HarnessResult, HarnessRolloutLoop
from asyncgrpo_core.rollout.sampling import ConversationTooLongError
from asyncgrpo_core.server.generation import ServerUnavailableError
from tests.unit.agent_parts import agent_tokenizer, call_text, scripted
from tests.unit.fakes import FakeTokenizer, FakeVLLM
from tests.unit.harness_parts import (
    AddingAgent,
    ClientLoop,
    OneTurn,
    Silent,
    adding_script,
    agent_run,
    digits,
    generated,
    ready,
    rollout,
    trained,
)


def digit_reward(completions, **_):
    return [float(completion[-1]["content"]) for completion in completions]


async def test_the_harness_reward_is_added_to_the_other_sources(tmp_path) -> None:
    """F164, F158: a group's reward is the reward function's plus the 1 of the harness."""
    async with scripted(digits) as server:
        run = agent_run(server, tmp_path, OneTurn, reward_funcs=[digit_reward])
        await run.until(lambda: len(run.ended()) >= 3)
    tokenizer = agent_tokenizer()
    samples = [sample for record in run.ended() if record.outcome == "scored" for sample in record.samples]
    assert samples
    for sample in samples:
        reply = sample.sequence.token_ids[sample.sequence.loss_mask]
        assert sample.reward == float(tokenizer.decode(reply, skip_special_tokens=True)) + 1.0


async def test_tool_metrics_have_their_usual_names(tmp_path) -> None:
    """F187: two calls per rollout, one per message, none failed."""
    async with scripted(adding_script) as server:
        run = agent_run(server, tmp_path, AddingAgent)
        await run.until(lambda: len(run.ended()) >= 2)
    metrics = run.metrics()
    assert metrics["tools/call_frequency"] == 2.0 and metrics["tools/failure_frequency"] == 0.0
    assert metrics["tools/parallel_calls_mean"] == 1.0 and metrics["tools/loop_exhausted_frac"] == 0.0
    assert metrics["rollout/turns_mean"] == 3.0 and metrics["rollout/samples_per_rollout"] == 1.0
    assert not [name for name in metrics if name.startswith("tools/latency") or "/add/" in name]


async def test_groups_that_call_nothing_count_too(tmp_path) -> None:
    """F187: the mean number of calls is over all rollouts, half of which call once."""

    def script(_rng, prompt: str) -> str:
        return call_text("add", a=1, b=1) if "q0" in prompt and "tool_response" not in prompt else "no"

    async with scripted(script) as server:
        run = agent_run(server, tmp_path, AddingAgent)
        await run.until(lambda: {0, 1} <= {r.slot.row for r in run.ended()})
    run.records = [next(r for r in run.ended() if r.slot.row == row) for row in (0, 1)]
    assert run.metrics()["tools/call_frequency"] == 0.5


class TwoQuestions(ClientLoop):
    async def run_harness(self, base_url, api_key, prompt, row):
        total = 0.0
        for question in ("a", "b"):
            messages = [{"role": "user", "content": question}]
            reply = await self.api(base_url, api_key).chat.completions.create(model="x", messages=messages)
            total += float(reply.choices[0].message.content)
        return total


async def test_every_sample_of_a_rollout_has_its_advantage(tmp_path) -> None:
    """F186: two conversations per rollout, so two samples; the advantages are those of the rollouts' rewards."""
    async with scripted(digits) as server:
        run = agent_run(server, tmp_path, TwoQuestions, num_generations=3)
        await run.until(lambda: any(record.samples for record in run.ended()))
    record = next(record for record in run.ended() if record.samples)
    by_rollout: dict[str, list] = {}
    for sample in record.samples:
        by_rollout.setdefault(sample.rollout_id, []).append(sample)
    assert len(by_rollout) == 3 and {len(samples) for samples in by_rollout.values()} == {2}
    rewards = np.array([samples[0].reward for samples in by_rollout.values()])
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
    for advantage, samples in zip(expected, by_rollout.values(), strict=True):
        np.testing.assert_allclose([sample.advantage for sample in samples], advantage)
        assert {sample.reward for sample in samples} == {samples[0].reward}


class Reporting(OneTurn):
    async def then(self, reply, row):
        return HarnessResult(
            0.5, tool_failure_count=3, exhausted=True, completion=[{"role": "assistant", "content": "!"}]
        )


async def test_a_harness_may_report_more_than_a_reward(tmp_path) -> None:
    async with scripted(digits) as server, ready(server, tmp_path, Reporting) as loop:
        done = await rollout(loop)
    assert (done.rollout.reward, done.rollout.tool_failure_count, done.context.exhausted) == (0.5, 3, True)
    assert done.rollout.completion == [{"role": "assistant", "content": "!"}]


# the engine fails


class Swallowing(ClientLoop):
    """Takes every HTTP error for a bad day and returns a reward all the same."""

    statuses: list = []  # noqa: RUF012

    async def run_harness(self, base_url, api_key, prompt, row):
        api, messages = self.api(base_url, api_key, max_retries=2), list(prompt)
        for _ in range(3):
            try:
                reply = await api.chat.completions.create(model="x", messages=messages)
                messages += [{"role": "assistant", "content": reply.choices[0].message.content}]
                messages += [{"role": "user", "content": "go on"}]
            except openai.APIStatusError as error:
                self.statuses.append((error.status_code, error.body["message"], error.body["code"]))
        return 1.0


async def test_an_engine_error_that_the_harness_swallows_fails_the_rollout(tmp_path) -> None:
    Swallowing.statuses = []
    failures = {2: 500}
    async with scripted(digits, fail=failures.get) as server, ready(server, tmp_path, Swallowing) as loop:
        with pytest.raises(ServerUnavailableError, match="fake failure 500"):
            await rollout(loop)
    assert [status for status, *_ in Swallowing.statuses] == [502, 502]
    assert "fake failure 500" in Swallowing.statuses[0][1]
    assert len(server.requests) == 2, "neither the client nor the harness asks the engine again"


async def test_an_engine_error_fails_the_group_and_the_run_goes_on(tmp_path) -> None:
    async with scripted(digits, fail=lambda n: 500 if n == 1 else None) as server:
        run = agent_run(server, tmp_path, Swallowing, reward_funcs=[digit_reward])
        task = asyncio.create_task(run.until(lambda: {"failed", "scored"} <= {r.outcome for r in run.ended()}))
        while run.loop.servers is None:
            await asyncio.sleep(0)
        run.loop.servers.max_retries = 0
        await task
    (failed,) = [record for record in run.ended() if record.outcome == "failed"]
    assert "fake failure 500" in failed.error and not failed.samples


async def test_long_conversations_follow_the_config(tmp_path) -> None:
    """With "stop" the run ends and says the lengths, with "end" the rollout ends with the turns that it has."""
    Swallowing.statuses = []
    bound = {"max_completion_length": 55}
    says = 'max_model_len=100.*after 1 turns.*long_conversation="end"'
    async with scripted(lambda rng, _prompt: str(100 + rng.randrange(800)), max_model_len=100) as server:
        async with ready(server, tmp_path, Swallowing, long_conversation="stop", **bound) as loop:
            with pytest.raises(ConversationTooLongError, match=says):
                await rollout(loop)
        async with ready(
            server, tmp_path / "end", Swallowing, long_conversation="end", max_completion_length=55
        ) as loop:
            done = await rollout(loop)
    assert done.context.context_full and len(done.rollout.turns) == 1 and done.rollout.reward == 1.0
    assert {(status, code) for status, _, code in Swallowing.statuses} == {
        (400, "context_length_exceeded"),
        (502, None),
    }


class Raising(OneTurn):
    async def run_harness(self, base_url, api_key, prompt, row):
        api, messages = self.api(base_url, api_key), list(prompt)
        while True:
            reply = await api.chat.completions.create(model="x", messages=messages)
            messages += [{"role": "assistant", "content": reply.choices[0].message.content}, *prompt]


async def test_a_harness_that_raises_on_a_full_context_ends_unscored(tmp_path) -> None:
    settings = {"long_conversation": "end", "max_completion_length": 40}
    async with scripted(digits, max_model_len=150) as server, ready(server, tmp_path, Raising, **settings) as loop:
        done = await rollout(loop)
    assert done.context.context_full and done.rollout.reward is None and trained(done) == generated(done)
    assert len(done.rollout.turns) > 1


# set-up


class Unfinished(HarnessRolloutLoop):
    pass


class SilentWithTools(Silent):
    harness_tools = True


class FakeTokenizerWithEos(FakeTokenizer):
    eos_token_id = 2


class NoSetup(HarnessRolloutLoop):
    async def setup(self):
        pass

    async def run_harness(self, base_url, api_key, prompt, row):
        return 1.0


async def test_what_is_missing_is_said_before_the_first_rollout(tmp_path) -> None:
    async with FakeVLLM() as server:
        with pytest.raises(ConfigError, match="Unfinished has no run_harness"):
            async with ready(server, tmp_path / "a", Unfinished):
                pass
        with pytest.raises(ConfigError, match="harness_tools"):
            async with ready(server, tmp_path / "b", SilentWithTools, tokenizer=FakeTokenizerWithEos()):
                pass
        async with ready(server, tmp_path / "c", NoSetup) as loop:
            with pytest.raises(RolloutError, match="super"):
                await rollout(loop)
