"""Made-up messages, tools and replies for the trial conversations of forks.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from asyncgrpo_core.rollout.chat.families import Calls, Family
from asyncgrpo_core.rollout.chat.parsing import CALLS

if TYPE_CHECKING:
    from asyncgrpo_core.rollout.chat.format import ChatFormat

USER, SYSTEM, TOOL = "user", "system", "tool"


def _tool(name: str, **properties: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {key: {"type": kind, "description": f"The {key}."} for key, kind in properties.items()},
        "required": list(properties),
    }
    return {"type": "function", "function": {"name": name, "description": "A sample.", "parameters": parameters}}


SAMPLE_TOOLS = [_tool("get_weather", city="string", days="integer"), _tool("search", query="string")]


@dataclass(frozen=True)
class Reply:
    """A made-up reply. `compact` writes the calls' JSON without spaces, which no template would."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[int, ...] = ()  # which of the two sample calls
    compact: bool = False


def write_reply(chat: ChatFormat, messages: list[dict[str, Any]], reply: Reply, names: list[str]) -> str | None:
    """The text that a model of this family would sample for `reply`; None when it cannot be told."""
    calls = _calls(names, reply.calls)
    if chat.known is not None:
        opened = "<think>" in chat.prefill and not chat.prefill.rstrip().endswith("</think>")
        reasoning = (reply.reasoning or "So.") if opened else reply.reasoning
        text = chat.known.write(reply.content, reasoning, calls)
        text = text.removeprefix(chat.prefill)
    else:
        found = _written_by_own(chat, messages, reply.content, calls)
        if found is None:
            return None
        text = found
    return text.replace('": ', '":').replace(', "', ',"') if reply.compact else text


def _written_by_own(chat: ChatFormat, messages: list[dict[str, Any]], content: str, calls: Calls) -> str | None:
    """What the tokenizer's own template renders for a reply with calls, between the header and the end mark."""
    if not calls:
        return content
    message: dict[str, Any] = {"role": "assistant", "content": content}
    message[CALLS] = [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in calls]
    eos = getattr(chat.tokenizer, "eos_token", None)
    try:
        start = chat.own_text(messages, SAMPLE_TOOLS, True)
        full = chat.own_text([*messages, message], SAMPLE_TOOLS, False)
    except Exception:  # a template may raise what it likes
        return None
    if not full.startswith(start) or not eos or eos not in full[len(start) :]:
        return None
    return full[len(start) :].rpartition(eos)[0]


def sample_call(chat: ChatFormat) -> str | None:
    """The text of a reply that is one call of the first sample tool, None when it cannot be told."""
    return write_reply(
        chat, [sample_message(USER, 0)], Reply(calls=(0,)), [t["function"]["name"] for t in SAMPLE_TOOLS]
    )


def _calls(names: list[str], which: tuple[int, ...]) -> Calls:
    arguments: tuple[dict[str, Any], ...] = ({"city": "Bad Ems", "days": 2}, {"query": 'über "x" {y}'})
    return [(names[min(i, len(names) - 1)], arguments[i]) for i in which]


def sample_message(role: str, position: int) -> dict[str, Any]:
    """A message that is no reply; `position` makes its text unlike the others'."""
    texts = {USER: "Question", SYSTEM: "Be brief.", TOOL: "Result"}
    extra = {"name": "get_weather"} if role == TOOL else {}
    return {"role": role, **extra, "content": f"{texts[role]} {position}"}


def end_mark(chat: ChatFormat, before_tool: bool) -> str:
    """What a model of this family writes at the end of a reply that a tool result or a user message follows."""
    if chat.known is None:
        return getattr(chat.tokenizer, "eos_token", None) or ""
    if chat.known.next_headers:
        return chat.known.next_headers[0 if before_tool else 1]
    return chat.known.turn_ends[0]


def cannot_write(family: Family, reply: Reply) -> bool:
    """Whether the family has no way to write such a reply."""
    return (family.one_call and len(reply.calls) > 1) or (family.bare_calls and bool(reply.calls and reply.content))


def may_reason(chat: ChatFormat) -> bool:
    """Whether replies can hold reasoning: the family thinks and the prompt has not closed the block already."""
    return chat.known is not None and chat.known.thinks and "</think>" not in chat.prefill
