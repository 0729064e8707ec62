"""Conversations of a harness become samples: changed replies, sub-agents, branches, the families' formats."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from asyncgrpo_core.rollout.chat.families import FAMILIES
from tests.unit.agent_parts import agent_tokenizer, call_text, scripted
from tests.unit.chat_tokenizers import tokenizer_of
from tests.unit.fakes import FakeVLLM
from tests.unit.harness_parts import ADD, AddingAgent, ClientLoop, generated, ready, rollout, texts, trained


class Loose(ClientLoop):
    """Sends back every reply in a worse form than it got it."""

    async def run_harness(self, base_url, api_key, prompt, row):
        api, messages = self.api(base_url, api_key), list(prompt)
        for _ in range(3):
            reply = await api.chat.completions.create(model="x", messages=messages, tools=[ADD])
            message = reply.choices[0].message
            call = message.tool_calls[0]
            arguments = call.function.arguments.replace(": ", " :  ")
            mine = {"id": "mine", "type": "function", "function": {"name": "add", "arguments": arguments}}
            back = {"role": "assistant", "content": None, "audio": None, "tool_calls": [mine]}
            messages += [back, {"role": "tool", "tool_call_id": "mine", "content": [{"type": "text", "text": "5"}]}]


async def test_a_reply_that_comes_back_changed_in_form_keeps_the_prefix(tmp_path) -> None:
    """F184. The policy's own spacing inside the call would not survive a round trip through JSON."""

    def script(rng: random.Random, _prompt: str) -> str:
        return f'<tool_call>\n{{"name":"add",   "arguments":{{"b": {rng.randrange(9)} ,"a":1}}}}\n</tool_call>'

    async with scripted(script) as server, ready(server, tmp_path, Loose) as loop:
        done = await rollout(loop)
    assert (done.reconciled.transitions, done.reconciled.forks) == (2, 0)
    assert trained(done) == generated(done) and done.rollout.tool_call_count == 3
    assert done.rollout.reward is None


class Delegating(ClientLoop):
    """A main agent whose two sub-agents work at the same time, each in a conversation of its own."""

    async def run_harness(self, base_url, api_key, prompt, row):
        api = self.api(base_url, api_key)

        async def talk(name: str, turns: int) -> str:
            messages = [{"role": "user", "content": f"{name} {row['answer']}"}]
            for _ in range(turns):
                reply = await api.chat.completions.create(model="x", messages=messages)
                messages += [{"role": "assistant", "content": reply.choices[0].message.content}]
                messages += [{"role": "user", "content": "go on"}]
            return messages[-2]["content"]

        results = await asyncio.gather(talk("left", 3), talk("right", 3))
        return float(len("".join(results)))


async def test_parallel_conversations_of_one_rollout_and_of_several_stay_apart(tmp_path) -> None:
    """F185, F186: two rollouts with two sub-agents each at once; every token is trained once, in its own rollout."""

    def script(rng: random.Random, prompt: str) -> str:
        return f"{'left' if 'left' in prompt else 'right'} {prompt.count('go on')} {rng.randrange(10**6)}"

    async with scripted(script, delay_s=0.01) as server, ready(server, tmp_path, Delegating) as loop:
        done = await asyncio.gather(rollout(loop, 0), rollout(loop, 1), rollout(loop, 0, row=3))
    for one in done:
        assert len(one.rollout.turns) == 6 and trained(one) == generated(one)
        rows = {agent_tokenizer().decode(turn.prompt_ids).split()[2] for turn in one.rollout.turns}
        assert len(rows) == 1, "no turn of another row's rollout"
        assert Counter(text.split()[0] for text in texts(one)) == {"left": 3, "right": 3}
        assert len(one.rollout.completion) == 5, "one of the two longest conversations"
    seeds = [body["sampling_params"]["seed"] for _, body in server.requests]
    assert len(set(seeds)) == 18


class Wandering(ClientLoop):
    """A random walk over conversations: go on, go back to an earlier point, rewrite, start anew, ask twice at once."""

    async def run_harness(self, base_url, api_key, prompt, row):
        rng, api = random.Random(row["answer"]), self.api(base_url, api_key)
        known = [[{"role": "user", "content": "start"}]]

        async def ask(messages: list) -> None:
            reply = await api.chat.completions.create(model="x", messages=messages, tools=[ADD])
            message = reply.choices[0].message.model_dump(exclude_none=True)
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": "7"} for call in message.get("tool_calls", [])
            ]
            known.append([*messages, message, *(results or [{"role": "user", "content": f"more {rng.random()}"}])])

        for _ in range(10):
            messages = rng.choice([known[-1], known[-1], rng.choice(known)])
            if rng.random() < 0.2:
                messages = [{**messages[0], "content": f"rewritten {rng.random()}"}, *messages[1:]]
            await asyncio.gather(*(ask(messages) for _ in range(rng.choice([1, 1, 2]))))


@pytest.mark.parametrize("row", range(4))
async def test_every_generated_token_is_trained_exactly_once(tmp_path, row) -> None:
    """F185 over random branching conversations."""

    def script(rng: random.Random, _prompt: str) -> str:
        return call_text("add", a=1, b=rng.randrange(99)) if rng.random() < 0.4 else f"text {rng.randrange(10**6)}"

    async with scripted(script, max_model_len=1 << 16) as server, ready(server, tmp_path, Wandering) as loop:
        done = await rollout(loop, row=row)
    assert len(done.rollout.turns) == len(server.requests) >= 10
    assert trained(done) == generated(done) and sum(trained(done).values()) > 100
    assert len(done.reconciled.sequences) > 1


class Forgetful(AddingAgent):
    """Keeps of a reply what OpenAI's API knows: no reasoning."""

    async def ask(self, api, messages):
        message = await super().ask(api, messages)
        self.reasoning.append(message.pop("reasoning_content", None))
        return message


@pytest.mark.parametrize("turn_prompts", ["render", "append"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
async def test_every_familys_replies_go_on_where_they_ended(tmp_path, family, turn_prompts) -> None:
    """F184, F187: reasoning that the harness drops is still what the policy wrote."""
    tokenizer, known = tokenizer_of(family), FAMILIES[family]

    def sample(_rng: random.Random, prompt_ids: list[int]) -> list[int]:
        done = len(asked)
        asked.append(prompt_ids)
        text = "" if known.bare_calls else f"Step {done}."
        calls = [("add", {"a": done, "b": 20})] if done < 2 else None
        reply = known.write(text if calls else "It is 7.", f"thought {done}" if known.thinks else "", calls)
        end = known.next_headers[0] if calls and known.next_headers else tokenizer.eos_token
        return tokenizer(reply + end, add_special_tokens=False)["input_ids"]

    asked: list = []
    Forgetful.reasoning = []
    engine = {"vocab": len(tokenizer), "eos_id": tokenizer.eos_token_id, "max_model_len": 1 << 14}
    settings = {"tokenizer": tokenizer, "turn_prompts": turn_prompts}
    async with FakeVLLM(sample=sample, **engine) as server, ready(server, tmp_path, Forgetful, **settings) as loop:
        done = await rollout(loop)
    assert done.rollout.tool_call_count == 2 and len(done.rollout.turns) == 3
    assert done.reconciled.forks == 0 and trained(done) == generated(done)
    if known.thinks:
        assert [text.strip() for text in Forgetful.reasoning] == ["thought 0", "thought 1", "thought 2"]
