"""Reading replies: canonical forms of every family, malformed calls, and anything a model may write."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from asyncgrpo_core.rollout.chat import ChatFormat, ParsedReply
from asyncgrpo_core.rollout.chat.families import FAMILIES
from tests.unit.chat_tokenizers import CHAT_TEMPLATES, QWEN3_THINKING, tokenizer_of, with_template

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "search", "description": "S.", "parameters": {"type": "object", "properties": {}}},
    },
]
FIRST = ("get_weather", {"city": "Bad {Ems}", "days": 2})
SECOND = ("search", {"query": 'über "x"', "deep": {"a": [1, {"b": None}]}})
_BOTH = ("qwen3", "qwen2.5")

# replies as the families' documentation shows them, written out by hand
ONE_CALL = {
    "qwen3": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bad {Ems}", "days": 2}}\n</tool_call>',
    "qwen2.5": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bad {Ems}", "days": 2}}\n</tool_call>',
    "llama3": '{"name": "get_weather", "parameters": {"city": "Bad {Ems}", "days": 2}}',
    "deepseek-v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    '{"city": "Bad {Ems}", "days": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek-v3.1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    '{"city": "Bad {Ems}", "days": 2}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "glm-4.5": "\n<think></think>\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Bad {Ems}</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
    "glm-4": 'get_weather\n{"city": "Bad {Ems}", "days": 2}',
}


@cache
def chat_of(family: str) -> ChatFormat:
    return ChatFormat(tokenizer_of(family), tools_on=True)


@cache
def prompt_of(family: str) -> tuple[int, ...]:
    return tuple(chat_of(family).render([{"role": "user", "content": "Question"}], TOOLS))


def parse(family: str, text: str, tools: Any = TOOLS, end: bool = True) -> ParsedReply:
    chat = chat_of(family)
    ends = FAMILIES[family].next_headers or FAMILIES[family].turn_ends
    return chat.parse(list(prompt_of(family)), chat.encode(text + (ends[0] if end else "")), tools)


def called(reply: ParsedReply) -> list[tuple[str | None, dict]]:
    return [(call.name, call.arguments) for call in reply.calls]


@pytest.mark.parametrize("family", list(CHAT_TEMPLATES))
def test_f173_the_family_is_seen_in_the_template(family: str) -> None:
    assert chat_of(family).family == family


@pytest.mark.parametrize("family", list(CHAT_TEMPLATES))
def test_one_call(family: str) -> None:
    reply = parse(family, ONE_CALL[family])
    assert called(reply) == [FIRST] and reply.calls[0].error is None
    assert reply.message == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": FIRST[0], "arguments": FIRST[1]}}],
        "raw": ONE_CALL[family],
    }


@pytest.mark.parametrize("family", list(CHAT_TEMPLATES))
def test_the_family_writes_what_its_documentation_shows(family: str) -> None:
    assert FAMILIES[family].write("", "", [FIRST]) == ONE_CALL[family]


@pytest.mark.parametrize("family", [f for f in CHAT_TEMPLATES if not FAMILIES[f].one_call])
def test_text_reasoning_and_two_calls(family: str) -> None:
    """Around the calls the text is kept, the reasoning is a field of its own; the calls come in emitted order."""
    known = FAMILIES[family]
    text = known.write("Let me see.", "I ask twice." if known.thinks else "", [SECOND, FIRST])
    reply = parse(family, text)
    assert [name for name, _ in called(reply)] == ["search", "get_weather"]
    assert called(reply)[1] == FIRST
    if family != "glm-4.5":  # its values are typed by the tool's schema, which does not have these
        assert called(reply)[0] == SECOND
    assert reply.message["content"] == "Let me see."
    assert reply.message.get("reasoning_content") == ("I ask twice." if known.thinks else None)


@pytest.mark.parametrize("family", list(CHAT_TEMPLATES))
@pytest.mark.parametrize("end", [True, False], ids=["ended", "cut off"])
def test_a_reply_without_calls_keeps_its_text(family: str, end: bool) -> None:
    reply = parse(family, ' Hello {"a": 1} ', end=end)
    assert reply.calls == []
    assert reply.message == {"role": "assistant", "content": 'Hello {"a": 1}', "raw": ' Hello {"a": 1} '}


@pytest.mark.parametrize("family", list(CHAT_TEMPLATES))
def test_an_empty_reply(family: str) -> None:
    for reply in (parse(family, "", end=False), parse(family, "")):
        assert reply.message == {"role": "assistant", "content": "", "raw": ""} and reply.calls == []


# how a call of each family is broken, and a word that the model is told
MALFORMED = [
    *(
        (f, '<tool_call>\n{"name": "get_weather", "arguments": {"city": \n</tool_call>', "not valid JSON")
        for f in _BOTH
    ),
    ("qwen3", '<tool_call>\n{"arguments": {}}\n</tool_call>', '"name" is missing'),
    ("qwen3", '<tool_call>\n{"name": 3, "arguments": {}}\n</tool_call>', '"name" is missing'),
    ("qwen3", '<tool_call>\n{"name": "search"}\n</tool_call>', '"arguments" is missing'),
    ("qwen3", '<tool_call>\n{"name": "search", "arguments": "x"}\n</tool_call>', '"arguments" is not a JSON object'),
    ("qwen3", '<tool_call>\n["search"]\n</tool_call>', "not a JSON object"),
    ("qwen3", '<tool_call>\n{"name": "search", "arguments": {}}', "no end"),
    ("qwen3", '<tool_call>\n{"name": "search", "arguments": {"q": "\\ud800"}}\n</tool_call>', "Unicode"),
    ("qwen3", "<tool_call>" + "[" * 100_000 + "</tool_call>", "too deep"),
    ("qwen3", '<tool_call>{"name": "search", "arguments": {}} {"name": "search"}</tool_call>', "Extra data"),
    ("llama3", '{"name": "search", "parameters": {"q": 1}', "not valid JSON"),
    ("llama3", '<|python_tag|>{"name": "search"}', '"parameters" is missing'),
    ("llama3", "<|python_tag|>print(1)", "not valid JSON"),
    (
        "deepseek-v3",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\n```<｜tool▁call▁end｜>",
        "not valid JSON",
    ),
    ("deepseek-v3", "<｜tool▁call▁begin｜>{}<｜tool▁call▁end｜>", "name is missing"),
    (
        "deepseek-v3",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n[]\n```<｜tool▁call▁end｜>",
        "not a JSON object",
    ),
    ("deepseek-v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n", "no end"),
    ("deepseek-v3.1", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{x}<｜tool▁call▁end｜>", "not valid JSON"),
    ("glm-4.5", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1\n</tool_call>", "belongs to no argument"),
    ("glm-4.5", "<tool_call>\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", "name is missing"),
    ("glm-4.5", "<tool_call>f\n<arg_key>a</arg_key>", "no end"),
    ("glm-4", 'search\n{"q": ', "not valid JSON"),
]


@pytest.mark.parametrize(("family", "text", "word"), MALFORMED)
def test_a_malformed_call_says_what_is_wrong_and_stays_in_the_text(family: str, text: str, word: str) -> None:
    reply = parse(family, text)
    assert [call.error is not None for call in reply.calls] == [True]
    assert word in (reply.calls[0].error or "") and FAMILIES[family].call_form in (reply.calls[0].error or "")
    assert reply.message["content"] == text.strip() and "tool_calls" not in reply.message
    assert reply.message["raw"] == text


def test_good_and_malformed_calls_keep_their_order() -> None:
    good = ONE_CALL["qwen3"]
    reply = parse("qwen3", f"<think>\nHm.\n</think>\n\nA\n{good}\nB\n<tool_call>\n{{oops\n</tool_call>\n{good}\nC")
    assert [call.name for call in reply.calls] == ["get_weather", None, "get_weather"]
    assert [call.error is None for call in reply.calls] == [True, False, True]
    assert reply.message["reasoning_content"] == "Hm."
    assert reply.message["content"] == "A\n\nB\n<tool_call>\n{oops\n</tool_call>\n\nC"
    assert len(reply.message["tool_calls"]) == 2


def test_the_name_of_a_malformed_call_is_told_where_it_is_known() -> None:
    assert parse("qwen3", '<tool_call>{"name": "search", "arguments": 1}</tool_call>').calls[0].name == "search"
    assert parse("glm-4.5", "<tool_call>search\nx</tool_call>").calls[0].name == "search"


def test_a_call_inside_the_reasoning_is_none() -> None:
    reply = parse("qwen3", f"<think>\nMaybe {ONE_CALL['qwen3']}\n</think>\n\nNo.")
    assert reply.calls == [] and reply.message["content"] == "No."
    assert "get_weather" in reply.message["reasoning_content"]


def test_reasoning_cut_off_is_reasoning() -> None:
    reply = parse("qwen3", "<think>\nI was", end=False)
    assert reply.message == {
        "role": "assistant", "content": "", "reasoning_content": "I was", "raw": "<think>\nI was"
    }  # fmt: skip


def test_qwen25_leaves_the_think_tags_of_a_task_in_the_content() -> None:
    assert parse("qwen2.5", "<think>a</think>b").message["content"] == "<think>a</think>b"


def test_arguments_are_cast_by_the_tools_schema_and_strings_stay() -> None:
    text = (
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>10</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>7</arg_value>\n</tool_call>"
    )
    assert called(parse("glm-4.5", text)) == [("get_weather", {"city": "10", "days": 7})]
    assert called(parse("glm-4.5", text, tools=None)) == [("get_weather", {"city": "10", "days": "7"})]
    text = '<tool_call>{"name": "get_weather", "arguments": {"city": "10", "days": "7"}}</tool_call>'
    assert called(parse("qwen3", text)) == [("get_weather", {"city": "10", "days": 7})]


def test_llama_calls_in_all_their_forms() -> None:
    call = ONE_CALL["llama3"]
    assert called(parse("llama3", f"<|python_tag|>{call}")) == [FIRST]
    assert called(parse("llama3", f"Sure.<|python_tag|>{call}")) == [FIRST]
    assert called(parse("llama3", f"{call}; {call}")) == [FIRST, FIRST]
    mixed = parse("llama3", f"{call}; oops")
    assert [c.error is None for c in mixed.calls] == [True, False] and mixed.message["content"] == "oops"
    answer = parse("llama3", '{"name": "Bob", "age": 3}')  # JSON that is an answer
    assert answer.calls == [] and answer.message["content"] == '{"name": "Bob", "age": 3}'


def test_glm4_text_that_looks_like_a_call_of_no_tool_is_text() -> None:
    reply = parse("glm-4", 'Result\n{"a": 1}')
    assert reply.calls == [] and reply.message["content"] == 'Result\n{"a": 1}'


def test_a_tool_that_changes_its_arguments_leaves_the_conversation_alone() -> None:
    reply = parse("qwen3", ONE_CALL["qwen3"])
    reply.calls[0].arguments["city"] = "changed"
    assert reply.message["tool_calls"][0]["function"]["arguments"]["city"] == "Bad {Ems}"


def test_what_the_prompt_wrote_of_the_reply_counts() -> None:
    """A template that opens the reasoning in the prompt: the reply begins inside of it."""
    chat = ChatFormat(with_template("qwen3", QWEN3_THINKING), tools_on=True)
    prompt = chat.render([{"role": "user", "content": "<tool_call> " * 200}], TOOLS)
    assert chat.prefill == "<think>\n" and chat.decode(prompt).endswith("<|im_start|>assistant\n<think>\n")
    reply = chat.parse(prompt, chat.encode(f"Hm.\n</think>\n\n{ONE_CALL['qwen3']}<|im_end|>"), TOOLS)
    assert reply.message["reasoning_content"] == "Hm." and called(reply) == [FIRST]


def test_the_tokenizers_own_response_template_is_used_when_it_has_one() -> None:
    """Also where the family is unknown; its malformed calls are explained like the families'."""
    tokenizer = with_template(
        "qwen3",
        "{%- for m in messages -%}{{- '<|im_start|>' ~ m.role ~ '\\n' ~ m.content -}}"
        "{%- for c in m.tool_calls or [] -%}{{- '[CALL]' ~ (c.function | tojson) ~ '[/CALL]' -}}{%- endfor -%}"
        "{{- '<|im_end|>\\n' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}",
    )
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "tool_calls": {
                "open": "[CALL]",
                "close": "[/CALL]",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close": "<|im_end|>", "content": "text"},
        },
    }
    chat = ChatFormat(tokenizer, tools_on=True)
    assert chat.family is None and not chat.continues
    prompt = chat.render([{"role": "user", "content": "q"}], TOOLS)
    call = json.dumps({"name": FIRST[0], "arguments": FIRST[1]})
    reply = chat.parse(prompt, chat.encode(f"Hi [CALL]{call}[/CALL]<|im_end|>"), TOOLS)
    assert called(reply) == [FIRST] and reply.message["content"] == "Hi"
    bad = chat.parse(prompt, chat.encode("Hi [CALL]{oops[/CALL]<|im_end|>"), TOOLS)
    assert "not valid JSON" in (bad.calls[0].error or "") and bad.message["content"] == "Hi [CALL]{oops[/CALL]"
    # a known family's tokenizer with its own response template, too
    ours = with_template("qwen3", CHAT_TEMPLATES["qwen3"])
    ours.response_template = tokenizer.response_template
    own = ChatFormat(ours, tools_on=True)
    assert called(own.parse(prompt, own.encode(f"[CALL]{call}[/CALL]<|im_end|>"), TOOLS)) == [FIRST]
