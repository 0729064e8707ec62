"""What a harness is answered, in the forms that OpenAI's clients read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from asyncgrpo_core.rollout.harness.request import Message


@dataclass
class ChatReply:
    """What the harness gets: `message` in OpenAI's form, `finish_reason` "stop", "tool_calls" or "length"."""

    message: Message
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


def openai_message(message: Message, turn: int) -> Message:
    """An assistant message in the template's form -> OpenAI's: arguments as text, ids that repeat in every run."""
    calls = [
        {
            "id": f"call_{turn}_{i}",
            "type": "function",
            "function": {
                "name": call["function"]["name"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for i, call in enumerate(message.get("tool_calls") or [])
    ]
    shown: Message = {"role": "assistant", "content": message["content"] or (None if calls else "")}
    if message.get("reasoning_content"):
        shown["reasoning_content"] = message["reasoning_content"]
    if calls:
        shown["tool_calls"] = calls
    return shown


def reply_body(reply: ChatReply, reply_id: str, model: str, created: int) -> dict[str, Any]:
    """A chat.completion object."""
    choice = {"index": 0, "message": reply.message, "logprobs": None, "finish_reason": reply.finish_reason}
    head = {"id": reply_id, "object": "chat.completion", "created": created, "model": model}
    return {**head, "choices": [choice], "usage": _usage(reply)}


def reply_events(reply: ChatReply, reply_id: str, model: str, created: int, include_usage: bool) -> str:
    """The same as server-sent events: the whole message is one delta."""
    head = {"id": reply_id, "object": "chat.completion.chunk", "created": created, "model": model}
    delta = dict(reply.message)
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
    chunks: list[dict[str, Any]] = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": reply.finish_reason}]},
    ]
    if include_usage:
        chunks.append({**head, "choices": [], "usage": _usage(reply)})
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def _usage(reply: ChatReply) -> dict[str, int]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }
