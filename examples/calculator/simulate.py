"""Rollouts with the real tool in one process and without a server: to measure a start policy.

Prompts, replies and calls are handled by the parts that the rollout loop has (`ChatFormat`, `ToolBox`), so that the
policy sees exactly the texts of a run; only the sampling, by transformers' `generate` in batches, is another.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from asyncgrpo_core.rollout.chat import ChatFormat
from asyncgrpo_core.rollout.threads import CallThreads
from asyncgrpo_core.rollout.tools import FailureWatch, ToolBox, tool_schema
from examples.calculator.task import Row, calculate, tool_answer_reward

TOOLS: list[Any] = [tool_schema(calculate)]
MAX_REPLY_TOKENS = 48
TOOL_TURNS = 2
Message = dict[str, Any]


@dataclass
class Talk:
    """One rollout: the whole conversation, and the tokens of every turn (prompt, reply)."""

    messages: list[Message]
    turns: list[tuple[list[int], list[int]]] = field(default_factory=list)
    ended: bool = False

    @property
    def completion(self) -> list[Message]:
        return self.messages[1:]


def rollouts(model: Any, tokenizer: Any, rows: list[Row], *, greedy: bool = False, seed: int = 0) -> list[Talk]:
    """One rollout per row, sampled at temperature 1 over the whole vocabulary, or the likeliest tokens."""
    torch.manual_seed(seed)
    chat = ChatFormat(tokenizer, tools_on=True)
    talks = [Talk(list(row["prompt"])) for row in rows]
    for turn in range(TOOL_TURNS + 1):
        going = [talk for talk in talks if not talk.ended]
        if going:
            prompts = [chat.render(talk.messages, TOOLS) for talk in going]
            replies = _sample(model, tokenizer, prompts, greedy)
            for talk, prompt, reply in zip(going, prompts, replies, strict=True):
                talk.turns.append((prompt, reply))
            asyncio.run(_answer(chat, going, more=turn < TOOL_TURNS))
    return talks


async def _answer(chat: ChatFormat, talks: list[Talk], *, more: bool) -> None:
    """Append each talk's latest reply and, when there may be `more` turns, the results of its calls."""
    toolbox = ToolBox(
        CallThreads(8, "tools"), timeout_s=10.0, max_result_chars=1000, watch=FailureWatch(limit=1.0, window=100)
    )
    for talk in talks:
        prompt, tokens = talk.turns[-1]
        reply = chat.parse(prompt, tokens, TOOLS)
        talk.messages.append(reply.message)
        talk.ended = not (reply.calls and more and len(tokens) < MAX_REPLY_TOKENS)
        for call in [] if talk.ended else reply.calls:
            outcome = await toolbox.call({"calculate": calculate}, call)
            talk.messages.append({"role": "tool", "name": outcome.name, "content": outcome.text})


@torch.no_grad()
def _sample(model: Any, tokenizer: Any, prompts: list[list[int]], greedy: bool) -> list[list[int]]:
    batch = tokenizer.pad({"input_ids": prompts}, padding=True, padding_side="left", return_tensors="pt")
    how = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    output = model.generate(**batch, max_new_tokens=MAX_REPLY_TOKENS, **how)
    replies = output[:, batch["input_ids"].shape[1] :].tolist()
    end = tokenizer.eos_token_id
    return [reply[: reply.index(end) + 1] if end in reply else reply for reply in replies]


def rewards_of(talks: list[Talk], rows: list[Row]) -> list[float]:
    return tool_answer_reward([talk.completion for talk in talks], [row["answer"] for row in rows])


def mean_reward(talks: list[Talk], rows: list[Row]) -> float:
    return sum(rewards_of(talks, rows)) / len(rows)


def summary(talks: list[Talk], rows: list[Row]) -> str:
    """How often each kind of rollout occurs, for people to read."""
    kinds: Counter[str] = Counter()
    for talk, row in zip(talks, rows, strict=True):
        results = [message["content"] for message in talk.messages if message["role"] == "tool"]
        if not results:
            kind = "no call"
        elif row["answer"] not in results:
            kind = "no call with the right result"
        elif talk.messages[-1]["content"] != row["answer"]:
            kind = "right result, wrong answer"
        else:
            kind = "right" if len(results) == 1 else "right at the second call"
        kinds[kind] += 1
    return ", ".join(f"{kind} {count / len(rows):.2f}" for kind, count in kinds.most_common())
