"""For tests of harnesses: agents written with OpenAI's own client, against the scripted policies of agent_parts."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
from openai import AsyncOpenAI, OpenAI

from asyncgrpo_core.rollout.context import FirstPrompt, RolloutContext
from asyncgrpo_core.rollout.harness import HarnessResult, HarnessRolloutLoop
from asyncgrpo_core.rollout.one_rollout import FinishedRollout, run_rollout
from asyncgrpo_core.types import Slot
from tests.unit.agent_parts import add, agent_tokenizer, call_text
from tests.unit.fakes import FakeVLLM
from tests.unit.rollout_run import LoopRun, loop_run

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two integers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


@functools.cache
def sync_client() -> OpenAI:
    return OpenAI(base_url="http://127.0.0.1:1/v1", api_key="none", max_retries=0, timeout=20.0)


class ClientLoop(HarnessRolloutLoop):
    """Makes one client (60 ms of certificates) for all rollouts; `api` gives it a rollout's URL and key."""

    async def setup(self) -> None:
        await super().setup()
        self._client = AsyncOpenAI(base_url="http://127.0.0.1:1/v1", api_key="none", max_retries=0, timeout=20.0)

    async def close(self) -> None:
        await super().close()
        await self._client.close()

    def api(self, base_url: str, api_key: str, **options: Any) -> AsyncOpenAI:
        return self._client.with_options(base_url=base_url, api_key=api_key, **options)


def no_reward(completions: list, **_: Any) -> list[None]:
    return [None] * len(completions)


def agent_run(server: FakeVLLM, folder: Any, loop_cls: type[HarnessRolloutLoop], **settings: Any) -> LoopRun:
    """A run of one harness, with Qwen's tool format and no other reward."""
    settings = {
        "tokenizer": agent_tokenizer(),
        "reward_funcs": [no_reward],
        "num_generations": 2,
        "max_concurrent_rollouts": 4,
        "max_completion_length": 256,
        **settings,
    }
    return loop_run(server, folder, loop_cls=loop_cls, **settings)


class AddingAgent(ClientLoop):
    """Asks, runs `add`, asks again, until a reply calls no tool; the messages go back as the client's objects do."""

    stream = False
    dialogues: list = []  # noqa: RUF012 -- shared with the test on purpose

    async def run_harness(self, base_url, api_key, prompt, row):
        messages = [{"role": "system", "content": "You add."}, *prompt]
        while True:
            message = await self.ask(self.api(base_url, api_key), messages)
            messages.append(message)
            calls = message.get("tool_calls")
            if not calls:
                break
            for call in calls:
                result = str(add(**json.loads(call["function"]["arguments"])))
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        self.dialogues.append(messages)
        return HarnessResult(reward=float(len(messages)))

    async def ask(self, api: AsyncOpenAI, messages: list) -> dict:
        if not self.stream:
            reply = await api.chat.completions.create(model="policy", messages=messages, tools=[ADD])
            return reply.choices[0].message.model_dump(exclude_none=True)
        async with api.chat.completions.stream(model="policy", messages=messages, tools=[ADD]) as events:
            async for _ in events:
                pass
            reply = await events.get_final_completion()
        message = reply.choices[0].message
        calls = [
            {"id": c.id, "type": "function", "function": {"name": c.function.name, "arguments": c.function.arguments}}
            for c in message.tool_calls or []
        ]
        return {"role": "assistant", "content": message.content, **({"tool_calls": calls} if calls else {})}


class OneTurn(ClientLoop):
    """Asks once; then does what the test says (`then`), or returns 1."""

    then = None
    options: dict = {}  # noqa: RUF012

    async def run_harness(self, base_url, api_key, prompt, row):
        reply = await self.api(base_url, api_key).chat.completions.create(model="x", messages=prompt)
        return 1.0 if self.then is None else await self.then(reply, row)


def digits(rng, _prompt: str) -> str:
    return str(rng.randrange(1000))


class Silent(HarnessRolloutLoop):
    harness_tools = False

    async def run_harness(self, base_url, api_key, prompt, row):
        return 1.0


class SyncAgent(HarnessRolloutLoop):
    """One question by the blocking client."""

    harness_tools = False

    def run_harness(self, base_url, api_key, prompt, row):
        api = sync_client().with_options(base_url=base_url, api_key=api_key)
        reply = api.chat.completions.create(model="any", messages=prompt)
        assert self.rollout_row() is row and self.rollout_tools() == []
        return float(len(reply.choices[0].message.content))


def adding_script(rng: Any, prompt: str) -> str:
    """Calls add until two results are there, then answers."""
    results = prompt.count("<tool_response>")
    if results < 2:
        return f"step {rng.randrange(10)}\n" + call_text("add", a=results, b=rng.randrange(100))
    return f"done {rng.randrange(1000)}"


@contextlib.asynccontextmanager
async def ready(
    server: FakeVLLM, folder: Any, loop_cls: type[HarnessRolloutLoop], **settings: Any
) -> AsyncIterator[Any]:
    """A loop whose `setup` has run, without its pipeline: for tests of single rollouts."""
    loop = agent_run(server, folder, loop_cls, **settings).loop
    loop.failure_grace_s = 0.5
    try:
        await loop.connect()
        assert loop.servers is not None
        loop.servers.max_retries = 0
        await loop.prepare()
        yield loop
    finally:
        await loop.release()


async def rollout(loop: HarnessRolloutLoop, index: int = 0, row: int = 0) -> FinishedRollout:
    context = RolloutContext(Slot(0, row, row), 0, index, FirstPrompt(), 0, loop.dataset[row])
    return await asyncio.create_task(run_rollout(loop, context, 0, want_top=True))


def texts(finished: FinishedRollout) -> list[str]:
    """What the policy wrote, turn by turn."""
    return [agent_tokenizer().decode(turn.output_ids) for turn in finished.rollout.turns]


def trained(finished: FinishedRollout) -> Counter:
    """Every trained token with its log-probability."""
    return Counter(
        (int(token), float(np.float32(logprob)))
        for s in finished.reconciled.sequences
        for token, logprob in zip(s.token_ids[s.loss_mask], s.sampler_logprobs[s.loss_mask], strict=True)
    )


def generated(finished: FinishedRollout) -> Counter:
    return Counter(
        (token, float(np.float32(logprob)))
        for turn in finished.rollout.turns
        for token, logprob in zip(turn.output_ids, turn.output_log_probs, strict=True)
    )
