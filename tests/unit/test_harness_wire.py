"""The proxy's JSON, recognised replies and cut turns: pure functions."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from asyncgrpo_core.rollout.harness.cut import before_stop, cut_turn
from asyncgrpo_core.rollout.harness.memory import GivenReply, ReplyMemory
from asyncgrpo_core.rollout.harness.reply import ChatReply, openai_message, reply_body, reply_events
from asyncgrpo_core.rollout.harness.request import HarnessRequestError, read_messages, read_request
from asyncgrpo_core.server.generation import SamplingSettings
from asyncgrpo_core.types import TopLogprobs, TurnRecord
from tests.unit.harness_parts import ADD

USER = {"role": "user", "content": "hi"}
SAMPLING = SamplingSettings(max_tokens=64, temperature=0.8, top_p=0.95)


def request(**fields):
    return read_request({"messages": [USER], **fields}, SAMPLING, tools_on=True)


def test_a_plain_request() -> None:
    read = request(model="gpt-4o", user="x", stream=True, stream_options={"include_usage": True}, tools=[ADD])
    assert read.messages == [USER] and read.tools == [ADD] and read.stream and read.include_usage
    assert read.ignored == [] and read.stop == [] and read.max_tokens is None


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"temperature": 0.8, "top_p": 0.95}, []),
        ({"temperature": 0}, ["temperature"]),
        ({"temperature": 0.8, "top_p": 1.0, "seed": 1}, ["top_p", "seed"]),
        ({"frequency_penalty": 0, "presence_penalty": 0.1, "parallel_tool_calls": True}, ["presence_penalty"]),
        ({"parallel_tool_calls": False, "reasoning_effort": "low"}, ["parallel_tool_calls", "reasoning_effort"]),
        ({"tool_choice": "required"}, ["tool_choice"]),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, ["tool_choice"]),
        ({"temperature": None, "seed": None, "tool_choice": "auto", "response_format": {"type": "text"}}, []),
    ],
)
def test_the_runs_sampling_settings_hold_and_the_request_hears_of_it(fields, ignored) -> None:
    assert request(**fields).ignored == ignored


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"n": 2}, "n=2"),
        ({"logprobs": True}, "logprobs=true"),
        ({"logit_bias": {"5": 100}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": {}, "messages": []}, "messages"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"stop": [1]}, "stop"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "critic", "content": ""}]}, "'critic'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "'image_url'"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "not valid JSON",
        ),
    ],
)
def test_what_is_refused_names_its_field(fields, names) -> None:
    with pytest.raises(HarnessRequestError) as caught:
        request(**fields)
    assert caught.value.status == 400 and names in caught.value.message
    assert caught.value.body()["error"]["type"] == "invalid_request_error"


def test_tools_need_a_reader_and_tool_choice_none_offers_none() -> None:
    assert request(tools=[ADD], tool_choice="none").tools is None
    with pytest.raises(HarnessRequestError, match="harness_tools"):
        read_request({"messages": [USER], "tools": [ADD]}, SAMPLING, tools_on=False)


def test_the_shorter_bound_holds() -> None:
    read = request(max_tokens=9, max_completion_tokens=5, stop="\n")
    assert (read.max_tokens, read.stop) == (5, ["\n"])


def test_messages_become_what_templates_take() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": ' {"a" : 1}'}, "index": 0}
    read = read_messages(
        [
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call], "reasoning": "hm"},
            {"role": "tool", "tool_call_id": "c1", "content": "1"},
            {"role": "tool", "tool_call_id": "c9", "content": [{"type": "text", "text": "2"}]},
        ]
    )
    assert read == [
        {"role": "system", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "name": "add", "content": "1"},
        {"role": "tool", "content": "2"},
    ]


def test_replies_are_what_openais_own_types_read() -> None:
    parsed = {
        "role": "assistant",
        "content": "",
        "reasoning_content": "so",
        "raw": "never shown",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "ü"}}}],
    }
    reply = ChatReply(openai_message(parsed, 3), "tool_calls", 7, 5)
    whole = ChatCompletion.model_validate(reply_body(reply, "id", "policy", 1))
    message = whole.choices[0].message
    assert message.content is None and message.tool_calls[0].id == "call_3_0" and "raw" not in message.model_dump()
    assert json.loads(message.tool_calls[0].function.arguments) == {"a": 1, "b": "ü"}
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (7, 5, 12)

    events = reply_events(reply, "id", "policy", 1, include_usage=True).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [ChatCompletionChunk.model_validate_json(event.removeprefix("data: ")) for event in events[:-2]]
    assert chunks[0].choices[0].delta.tool_calls[0].function.name == "add"
    assert chunks[1].choices[0].finish_reason == "tool_calls" and chunks[2].usage.total_tokens == 12


# recognised replies


def made(content: str, calls=(), **more) -> GivenReply:
    tool_calls = [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in calls]
    message = {"role": "assistant", "content": content, "tool_calls": tool_calls, "raw": f"exact {content}", **more}
    return GivenReply(message, TurnRecord([1], [2]), "null")


def test_a_reply_is_recognised_in_the_harness_own_form() -> None:
    """F184: ids, spaces, key order, null and dropped reasoning make no other reply; other words do."""
    memory = ReplyMemory()
    first = made("", [("add", {"a": 1, "b": 2})], reasoning_content="thought")
    start = memory.recall(read_messages([USER]))
    memory.remember(start.place, openai_message(first.message, 0), first)
    arguments = '{"b":2,  "a":1}'
    call = {"id": "other", "type": "function", "function": {"name": "add", "arguments": arguments}}
    back = {"role": "assistant", "content": None, "tool_calls": [call], "annotations": []}
    again = memory.recall(read_messages([USER, back, {"role": "tool", "tool_call_id": "other", "content": "3"}]))
    assert again.messages[1] is first.message and (again.latest, again.latest_index) == (first, 1)

    for other in ({**back, "content": "I edited it"}, {**back, "tool_calls": []}):
        assert memory.recall(read_messages([USER, other])).latest is None
    elsewhere = memory.recall(read_messages([{**USER, "content": "another question"}, back]))
    assert elsewhere.latest is None, "an equal text at another place is another reply"


def test_the_latest_reply_of_a_long_conversation_is_found() -> None:
    memory, messages = ReplyMemory(), [USER]
    for i in range(3):
        reply = made(f"r{i}")
        memory.remember(memory.recall(read_messages(messages)).place, openai_message(reply.message, i), reply)
        messages = [*messages, {"role": "assistant", "content": f" r{i}\n"}, {"role": "user", "content": "go on"}]
    found = memory.recall(read_messages(messages))
    assert found.latest is reply and found.latest_index == 5
    assert [m.get("raw") for m in found.messages] == [None, "exact r0", None, "exact r1", None, "exact r2", None]


# cut turns


def turn_of(text: str, **more) -> TurnRecord:
    ids = [ord(c) for c in text]
    top = TopLogprobs(np.arange(len(ids), dtype=np.int32)[:, None], np.zeros((len(ids), 1), np.float32))
    return TurnRecord([1], ids, [-float(i) for i in range(len(ids))], output_sampler_logprobs=top, **more)


def decode(ids: list[int]) -> str:
    return "".join(map(chr, ids))


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=3), max_size=2), st.integers(1, 14))
def test_a_cut_keeps_the_shortest_text_that_holds_a_stop_string(text, stop, max_tokens) -> None:
    """Against the definition: the first prefix, one token at a time."""
    whole = turn_of(text, output_versions=list(range(len(text))), finish_reason="stop")
    cut = cut_turn(whole, stop, max_tokens, decode)
    short = text[:max_tokens]
    ends = [n for n in range(len(short) + 1) if any(s in short[:n] for s in stop)]
    n = ends[0] if ends else len(short)
    assert decode(cut.output_ids) == text[:n] and cut.output_log_probs == whole.output_log_probs[:n]
    assert cut.output_versions == list(range(n)) and cut.output_sampler_logprobs.ids[:, 0].tolist() == list(range(n))
    assert cut.finish_reason == ("stop" if ends or len(text) <= max_tokens else "length")
    assert not any(s in before_stop(text, stop) for s in stop) and text.startswith(before_stop(text, stop))
