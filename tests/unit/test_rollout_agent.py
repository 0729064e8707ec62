"""Tools and environments through the whole loop: a scripted policy behind the stand-in server."""

from __future__ import annotations

import math
import re
from collections import Counter

import pytest

from asyncgrpo_core.errors import ConfigError, DataError
from asyncgrpo_core.rollout.loop import AsyncRolloutLoop
from asyncgrpo_core.rollout.sampling import ConversationTooLongError
from asyncgrpo_core.rollout.tools import ToolsDownError
from asyncgrpo_core.types import Slot
from tests.unit.agent_parts import (
    CounterEnv,
    GameEnv,
    add,
    agent_tokenizer,
    broken,
    call_text,
    huge,
    lookup,
    scripted,
    sleepy,
)
from tests.unit.rollout_run import loop_run

ROWS = [{"prompt": [{"role": "user", "content": f"What is {i} plus 4?"}], "answer": str(i + 4)} for i in range(4)]


def final_answer(completions, answer, **_):
    return [float(c[-1]["content"] == a) for c, a in zip(completions, answer, strict=True)]


def index_reward(completions, **_):
    return [float(i) for i in range(len(completions))]


def calculator(rng, prompt: str) -> str:
    """Calls the tool, then repeats its result; now and then answers at once, and wrong."""
    results = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", prompt)
    if results:
        return results[-1]
    a, b = re.findall(r"What is (\d+) plus (\d+)", prompt)[-1]
    return call_text("add", a=int(a), b=int(b)) if rng.random() < 0.7 else "99"


def agent_run(server, folder, **settings):
    settings = {"tokenizer": agent_tokenizer(), "rows": ROWS, "max_completion_length": 200, **settings}
    return loop_run(server, folder, **settings)


def texts_of(run) -> list[str]:
    tokenizer = agent_tokenizer()
    return [tokenizer.decode(s.sequence.token_ids) for r in run.ended() for s in r.samples]


@pytest.mark.parametrize("turn_prompts", ["render", "append"])
async def test_f170_f184_a_tool_is_called_and_its_result_read(tmp_path, turn_prompts) -> None:
    """F020, F045, F066, F067, F076: two turns, one sample, only generated tokens trained."""
    async with scripted(calculator) as server:
        run = agent_run(server, tmp_path, tools=[add], reward_funcs=[final_answer], turn_prompts=turn_prompts)
        await run.until(lambda: sum(len(r.samples) for r in run.ended()) >= 12)
    tokenizer, eos = agent_tokenizer(), agent_tokenizer().eos_token_id
    called = 0
    for sample in (s for r in run.ended() for s in r.samples):
        sequence = sample.sequence
        trained = tokenizer.decode(sequence.token_ids[sequence.loss_mask])
        whole = tokenizer.decode(sequence.token_ids)
        assert trained.count("<|im_end|>") == (2 if "<tool_response>" in whole else 1)
        assert "<tool_response>" not in trained and sequence.token_ids[-1] == eos
        assert len(sequence.top) == sequence.num_trained and (sequence.sampler_logprobs[sequence.loss_mask] < 0).all()
        if "<tool_response>" in whole:
            called += 1
            assert sample.reward == 1.0 and trained.startswith("<tool_call>") and whole.count("<|im_start|>") == 5
        else:
            assert sample.reward == 0.0 and trained == "99<|im_end|>"
    assert called > 0
    metrics = run.metrics()
    assert metrics["rollout/samples_per_rollout"] == 1.0 and metrics["rollout/fork_frac"] == 0.0
    assert metrics["tools/parallel_calls_mean"] == 1.0 and metrics["tools/failure_frequency"] == 0.0
    assert metrics["tools/call_frequency"] == pytest.approx(metrics["rollout/turns_mean"] - 1)
    assert metrics["tools/add/call_count"] == metrics["tools/call_frequency"] * len(run.ended()) * 4
    assert metrics["tools/loop_exhausted_frac"] == 0.0 and metrics["tools/add/latency_s"] >= 0


async def test_completions_hold_calls_and_results_as_messages(tmp_path) -> None:
    """F148, F198: reward functions see every message after the prompt."""
    seen: list = []

    def recording(prompts, completions, completion_ids, answer, **_):
        seen.extend(zip(prompts, completions, completion_ids, strict=True))
        return [float(i) for i in range(len(completions))]

    async with scripted(
        lambda rng, prompt: calculator(type("R", (), {"random": lambda self: 0.0})(), prompt)
    ) as server:
        run = agent_run(server, tmp_path, tools=[add], reward_funcs=[recording])
        await run.until(lambda: len(run.ended()) >= 2)
    prompt, completion, ids = seen[0]
    number = int(re.findall(r"\d+", prompt[0]["content"])[0])
    assert [m["role"] for m in completion] == ["assistant", "tool", "assistant"]
    function = completion[0]["tool_calls"][0]["function"]
    assert function["name"] == "add" and function["arguments"] == {"a": number, "b": 4}
    assert completion[1] == {"role": "tool", "name": "add", "content": str(number + 4)}
    assert completion[2]["content"] == str(number + 4)
    assert agent_tokenizer().decode(ids).count("<|im_end|>") == 2 and "<tool_response>" not in agent_tokenizer().decode(
        ids
    )


def many_mistakes(rng, prompt: str) -> str:
    """One reply with every kind of mistake, then the end."""
    if "<tool_response>" in prompt:
        return "done"
    calls = [call_text("add", a=1, b=2), call_text("nope"), call_text("add", a=1), call_text("broken", text="t")]
    return "\n".join(
        [*calls, '<tool_call>\n{"name": "add", "arguments": {\n</tool_call>', call_text("lookup", key="k")]
    )


async def test_f075_f076_f172_mistakes_are_answered_in_order_and_counted_apart(tmp_path) -> None:
    async with scripted(many_mistakes) as server:
        run = agent_run(
            server, tmp_path, tools=[add, broken, lookup], reward_funcs=[index_reward], max_completion_length=600
        )
        await run.until(lambda: len(run.ended()) >= 1)
    text = texts_of(run)[0]
    answers = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", text, re.DOTALL)
    assert len(answers) == 6 and answers[0] == "3" and answers[5] == "<k>"
    assert "there is no tool 'nope'" in answers[1] and "missing a required argument: 'b'" in answers[2]
    assert "broken raised ConnectionError" in answers[3] and answers[4].startswith("Error: ")
    metrics, rollouts = run.metrics(), 4 * len(run.ended())
    for name, per_rollout in {
        "tools/unknown_name_count": 1,
        "tools/malformed_count": 1,
        "tools/bad_arguments_count": 1,
        "tools/raised_count": 1,
        "tools/add/call_count": 2,
        "tools/add/failure_count": 1,
        "tools/broken/call_count": 1,
        "tools/broken/failure_count": 1,
        "tools/lookup/failure_count": 0,
    }.items():
        assert metrics[name] == per_rollout * rollouts, name
    assert metrics["tools/parallel_calls_mean"] == 6 and metrics["tools/call_frequency"] == 6
    assert metrics["tools/failure_frequency"] == pytest.approx(4 / 6)


async def test_f174_f077_the_limit_of_tool_turns_cuts_an_endless_caller(tmp_path) -> None:
    async with scripted(lambda rng, prompt: call_text("add", a=1, b=1)) as server:
        run = agent_run(
            server, tmp_path, tools=[add], reward_funcs=[index_reward], rows=ROWS[:1], max_tool_calling_iterations=2
        )
        await run.until(lambda: len(run.ended()) >= 2)
    metrics = run.metrics()
    assert metrics["tools/loop_exhausted_frac"] == 1.0 and metrics["rollout/turns_mean"] == 3.0
    assert metrics["tools/call_frequency"] == 2.0  # the calls of the third turn are not run


async def test_f046_a_window_without_a_call_has_no_failure_frequency(tmp_path) -> None:
    async with scripted(lambda rng, prompt: "no") as server:
        run = agent_run(server, tmp_path, tools=[add], reward_funcs=[index_reward])
        await run.until(lambda: len(run.ended()) >= 2)
    metrics = run.metrics()
    assert math.isnan(metrics["tools/failure_frequency"]) and metrics["tools/call_frequency"] == 0.0
    assert "tools/latency_s" not in metrics and "tools/parallel_calls_mean" not in metrics


async def test_f045_no_tools_no_tool_metrics(tmp_path) -> None:
    async with scripted(lambda rng, prompt: "no") as server:
        run = agent_run(server, tmp_path, reward_funcs=[index_reward])
        await run.until(lambda: len(run.ended()) >= 2)
    assert not [name for name in run.metrics() if name.startswith(("tools/", "env/"))]


async def test_a_reply_that_is_cut_off_ends_the_rollout_without_its_calls(tmp_path) -> None:
    """F043: truncated, and none of its complete calls is run: results cannot follow an unfinished reply."""
    long = call_text("add", a=1, b=1) + " and then " + "x" * 300
    async with scripted(lambda rng, prompt: long) as server:
        run = agent_run(server, tmp_path, tools=[add], reward_funcs=[index_reward])
        await run.until(lambda: len(run.ended()) >= 1)
    metrics = run.metrics()
    assert metrics["completions/clipped_ratio"] == 1.0 and metrics["tools/call_frequency"] == 0.0
    assert metrics["rollout/turns_mean"] == 1.0


async def test_a_tool_that_hangs_is_answered_and_the_run_goes_on(tmp_path) -> None:
    def script(rng, prompt):
        return "done" if "<tool_response>" in prompt else call_text("sleepy", seconds=30)

    async with scripted(script) as server:
        run = agent_run(server, tmp_path, tools=[sleepy], reward_funcs=[index_reward], tool_timeout=0.1)
        await run.until(lambda: len(run.ended()) >= 2)
    assert "Error: sleepy did not answer within 0.1 s." in texts_of(run)[0]
    assert run.metrics()["tools/timeout_count"] == 4 * len(run.ended())


async def test_a_tool_that_is_down_stops_the_run_with_its_error(tmp_path) -> None:
    def script(rng, prompt):
        return "done" if "<tool_response>" in prompt else call_text("broken", text="t")

    async with scripted(script) as server:
        run = agent_run(server, tmp_path, tools=[broken], reward_funcs=[index_reward], tool_failure_window=8)
        with pytest.raises(ToolsDownError, match="no route to the sandbox.*probably down"):
            await run.until(lambda: False)


async def test_a_tool_that_returns_a_megabyte_is_cut_for_the_model(tmp_path) -> None:
    def script(rng, prompt):
        return "done" if "<tool_response>" in prompt else call_text("huge", characters=1 << 20)

    async with scripted(script) as server:
        run = agent_run(server, tmp_path, tools=[huge], reward_funcs=[index_reward], max_tool_result_chars=500)
        await run.until(lambda: len(run.ended()) >= 1)
    assert f"x\n[cut here: {(1 << 20) - 500} more characters]" in texts_of(run)[0]


async def test_f100_a_conversation_that_outgrows_the_server_stops_the_run(tmp_path) -> None:
    """F099: the message names turn, tool and size."""

    def script(rng, prompt):
        return "done" if "<tool_response>" in prompt else call_text("huge", characters=5000)

    async with scripted(script) as server:
        run = agent_run(server, tmp_path, tools=[huge], reward_funcs=[index_reward])
        with pytest.raises(ConversationTooLongError, match=r"=4096. It is turn 2 .* 5000 characters of 'huge'"):
            await run.until(lambda: False)
        run = agent_run(server, tmp_path / "end", tools=[huge], reward_funcs=[index_reward], long_conversation="end")
        await run.until(lambda: len(run.ended()) >= 2)
    assert run.metrics()["rollout/context_full_frac"] == 1.0 and run.metrics()["rollout/turns_mean"] == 1.0


# -- environments

COUNT_ROWS = [{"prompt": [{"role": "user", "content": "Count."}], "target": t} for t in (1, 2, 3)]


def counting(rng, prompt: str) -> str:
    if "<tool_response>" in prompt:
        return "done"
    return call_text("increment", step=rng.choice([1, 2, 3]))


async def test_f176_f177_f179_f182_an_environment_owns_state_and_reward(tmp_path) -> None:
    """F047, F078: rewards under the class's name; instances are reused and never shared (the class asserts it)."""
    CounterEnv.made = 0
    async with scripted(counting, delay_s=0.002) as server:
        run = agent_run(
            server,
            tmp_path,
            rows=COUNT_ROWS,
            environment_factory=CounterEnv,
            reward_funcs=[],
            max_concurrent_rollouts=6,
        )
        await run.until(lambda: len(run.ended()) >= 12)
    assert 1 < CounterEnv.made <= 6
    for record in run.ended():
        for sample in record.samples:
            text = agent_tokenizer().decode(sample.sequence.token_ids)
            target = COUNT_ROWS[record.slot.row]["target"]
            assert f"Count. Target {target}." in text
            step = int(re.findall(r'"step": (\d)', text)[-1])
            assert sample.reward == float(step == target)
    metrics = run.metrics()
    assert 0 < metrics["rewards/CounterEnv/mean"] < 1 and metrics["reward"] == metrics["rewards/CounterEnv/mean"]
    assert metrics["env/reset_s"] >= 0 and metrics["env/reward_s"] >= 0


class SelfSampling(CounterEnv):
    """Owns its task: there is no dataset."""

    def reset(self, **kwargs):
        assert kwargs == {}
        return "Count." + super().reset(target=2)


async def test_f178_f002_an_environment_without_a_dataset(tmp_path) -> None:
    """F173: every row is empty, the prompt is what reset() returned, the slots go on without an epoch."""
    async with scripted(counting) as server:
        run = agent_run(server, tmp_path, rows=None, environment_factory=SelfSampling, reward_funcs=[])
        await run.until(lambda: len(run.ended()) >= 8)
    slots = [r.slot for r in run.ended()]
    assert len(set(slots)) == len(slots) and all(slot.epoch == 0 for slot in slots)
    assert "<|im_start|>user\nCount. Target 2.<|im_end|>" in texts_of(run)[0]


def mixed(rng, prompt: str) -> str:
    if "<tool_response>" in prompt:
        return "done"
    names = set(re.findall(r'"name": "(\w+)"', prompt.split("</tools>")[0]))
    assert names in ({"increment", "add"}, {"move", "add"}), names
    if "move" in names:
        return call_text("move", action=rng.choice(["up", "down"]))
    return call_text("increment", step=rng.choice([1, 2]))


async def test_f180_f152_two_environments_mixed_by_a_column(tmp_path) -> None:
    """Only its own environment's tools are shown to a rollout; the trainer's tools and rewards come on top."""
    rows = [{"environment": name} for name in ("count", "game")] * 2

    def style(completions, environment, **_):
        return [0.25 for _ in completions]

    class Counting(CounterEnv):
        def reset(self, **kwargs):
            return "Count." + super().reset(**kwargs)

    async with scripted(mixed) as server:
        run = agent_run(
            server,
            tmp_path,
            rows=rows,
            tools=[add],
            environment_factory={"count": Counting, "game": GameEnv},
            reward_funcs=[style],
        )
        await run.until(lambda: len({r.slot.row % 2 for r in run.ended() if r.samples}) == 2)
    rewards = Counter(s.reward for r in run.ended() for s in r.samples if r.slot.row % 2)
    assert set(rewards) == {0.25, 2.25}  # GameEnv gives 2
    metrics = run.metrics()
    assert {"rewards/Counting/mean", "rewards/GameEnv/mean", "rewards/style/mean"} <= metrics.keys()
    assert metrics["tools/move/call_count"] > 0 and metrics["tools/increment/call_count"] > 0


async def test_f181_an_unknown_environment_stops_the_run_with_the_known_names(tmp_path) -> None:
    async with scripted(mixed) as server:
        run = agent_run(
            server, tmp_path, rows=[{"environment": "chess"}], environment_factory={"game": GameEnv}, reward_funcs=[]
        )
        with pytest.raises(DataError, match=r"'chess'.*\['game'\]"):
            await run.until(lambda: False)


class FlakyEnv(CounterEnv):
    """Its third and fourth resets fail."""

    resets = 0

    def reset(self, **kwargs):
        type(self).resets += 1
        if type(self).resets in (9, 10):
            raise OSError("the game server is gone")
        return super().reset(**kwargs)


async def test_a_reset_that_raises_fails_its_group_and_nothing_else(tmp_path) -> None:
    FlakyEnv.resets = 0
    async with scripted(counting) as server:
        run = agent_run(server, tmp_path, rows=COUNT_ROWS, environment_factory=FlakyEnv, reward_funcs=[])
        await run.until(lambda: len(run.ended()) >= 9)
    failed = [r for r in run.ended() if r.outcome == "failed"]
    assert 1 <= len(failed) <= 2 and "FlakyEnv.reset() failed: OSError: the game server is gone" in failed[0].error
    announced = [pair for record in run.records for pair in record.dispatched]
    assert {(r.slot, r.generation) for r in run.ended()} <= set(announced)
    assert len({r.slot for r in run.ended()}) == len(run.ended())


class AlwaysBroken(CounterEnv):
    def reset(self, **kwargs):
        raise OSError("the game server is gone")


async def test_a_reset_that_always_raises_stops_the_run(tmp_path) -> None:
    async with scripted(counting) as server:
        run = agent_run(server, tmp_path, rows=COUNT_ROWS, environment_factory=AlwaysBroken, reward_funcs=[])
        with pytest.raises(ToolsDownError, match=r"AlwaysBroken.reset\(\) failed in .* the game server is gone"):
            await run.until(lambda: False)


class Unscored:
    def reset(self, **kwargs):
        return "Go."


async def test_f152_nothing_that_scores_is_refused_before_the_first_request(tmp_path) -> None:
    async with scripted(counting) as server:
        run = agent_run(server, tmp_path, rows=None, environment_factory=Unscored, reward_funcs=[])
        with pytest.raises(ConfigError, match="Nothing scores the rollouts"):
            await run.until(lambda: False)
        assert not server.requests


async def test_f114_a_rollout_keeps_its_place_while_its_tool_runs(tmp_path) -> None:
    """Two places, a slow tool: never more than two environments, never more than two requests at once."""
    CounterEnv.made = 0

    def script(rng, prompt):
        return "done" if "<tool_response>" in prompt else call_text("sleepy", seconds=0.02)

    async with scripted(script) as server:
        run = agent_run(
            server,
            tmp_path,
            rows=COUNT_ROWS,
            tools=[sleepy],
            environment_factory=CounterEnv,
            reward_funcs=[index_reward],
            max_concurrent_rollouts=2,
        )
        await run.until(lambda: len(run.ended()) >= 3)
        assert server.max_in_flight <= 2
    assert CounterEnv.made <= 2


class FirstTurnOnly(AsyncRolloutLoop):
    """A custom generator that needs the row and sets the reward."""

    async def generate_one(self, prompt, tools, group_id=0):
        rollout = await super().generate_one(prompt, [], group_id)
        rollout.reward = float(self.rollout_row()["answer"] == "5")
        return rollout


async def test_f158_f164_a_custom_generator_may_score_and_see_the_row(tmp_path) -> None:
    async with scripted(lambda rng, prompt: "x" * rng.randrange(1, 9)) as server:
        run = agent_run(server, tmp_path, loop_cls=FirstTurnOnly, reward_funcs=[index_reward])
        await run.until(lambda: any(r.slot == Slot(0, 1, 1) for r in run.ended()))
    record = next(r for r in run.ended() if r.slot == Slot(0, 1, 1))
    assert [s.reward for s in record.samples] == [1.0, 2.0, 3.0, 4.0]
