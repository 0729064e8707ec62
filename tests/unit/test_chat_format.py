"""Prompts: first turns as the tokenizer's own template renders them, later turns that go on from the tokens before."""

from __future__ import annotations

import pickle
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from asyncgrpo_core.errors import ConfigError
from asyncgrpo_core.rollout.chat import ChatFormat
from asyncgrpo_core.rollout.chat.families import FAMILIES, Calls
from tests.tiny_model import write_tokenizer
from tests.unit.chat_tokenizers import CHAT_TEMPLATES, QWEN3_THINKING, tokenizer_of, with_template
from tests.unit.fakes import EOS_ID, FakeTokenizer
from tests.unit.test_chat_parsing import FIRST, SECOND, TOOLS

# every family, and the settings that change what the prompt writes of the reply
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in CHAT_TEMPLATES),
    ("qwen3", {"enable_thinking": False}),
    ("glm-4.5", {"enable_thinking": False}),
    ("deepseek-v3.1", {"thinking": True}),
    ("qwen3-thinking", {}),
]
IDS = [f"{family}{'-' + next(iter(kwargs)) if kwargs else ''}" for family, kwargs in SETTINGS]


@cache
def _tokenizer(name: str) -> Any:
    return with_template("qwen3", QWEN3_THINKING) if name == "qwen3-thinking" else tokenizer_of(name)


@cache
def _chat(index: int, turn_prompts: str = "render") -> ChatFormat:
    name, kwargs = SETTINGS[index]
    return ChatFormat(_tokenizer(name), tools_on=True, template_kwargs=kwargs, turn_prompts=turn_prompts)


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _end(chat: ChatFormat, before_tool: bool) -> str:
    known = FAMILIES[chat.family or ""]
    return known.next_headers[0 if before_tool else 1] if known.next_headers else known.turn_ends[0]


@pytest.mark.parametrize("index", range(len(SETTINGS)), ids=IDS)
def test_f173_the_first_prompt_is_the_tokenizers_own(index: int) -> None:
    """With few-shot replies in it, with and without a system message."""
    chat = _chat(index)
    shots = [_user("a"), {"role": "assistant", "content": "b"}, _user("c")]
    for messages in ([_user("a")], [{"role": "system", "content": "Be brief."}, _user("a")], shots):
        own = chat.tokenizer.apply_chat_template(
            messages, tools=TOOLS, add_generation_prompt=True, return_dict=False, **chat.template_kwargs
        )
        assert chat.render(messages, TOOLS) == own


# later turns in the families' documented format, written out by hand; @ is the reply
AFTER_A_CALL = {
    "qwen3": "@<|im_end|>\n<|im_start|>user\n<tool_response>\nr1\n</tool_response>\n<tool_response>\nr2\n"
    "</tool_response><|im_end|>\n<|im_start|>assistant\n",
    "llama3": '@<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n"r1"<|eot_id|>'
    '<|start_header_id|>ipython<|end_header_id|>\n\n"r2"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n',
    "deepseek-v3": "@<｜end▁of▁sentence｜><｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>r1<｜tool▁output▁end｜>\n"
    "<｜tool▁output▁begin｜>r2<｜tool▁output▁end｜><｜tool▁outputs▁end｜>",
    "deepseek-v3.1": "@<｜end▁of▁sentence｜><｜tool▁output▁begin｜>r1<｜tool▁output▁end｜>"
    "<｜tool▁output▁begin｜>r2<｜tool▁output▁end｜>",
    "glm-4.5": "@<|observation|>\n<tool_response>\nr1\n</tool_response>\n<tool_response>\nr2\n</tool_response>"
    "<|assistant|>",
    "glm-4": "@<|observation|>\nr1<|observation|>\nr2<|assistant|>",
}
AFTER_AN_ANSWER = {
    "qwen3": "@<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n",
    "llama3": "@<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nand?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "deepseek-v3": "@<｜end▁of▁sentence｜><｜User｜>and?<｜Assistant｜>",
    "deepseek-v3.1": "@<｜end▁of▁sentence｜><｜User｜>and?<｜Assistant｜></think>",
    "glm-4.5": "@<|user|>\nand?<|assistant|>",
    "glm-4": "@<|user|>\nand?<|assistant|>",
}
AFTER_A_CALL["qwen2.5"], AFTER_AN_ANSWER["qwen2.5"] = AFTER_A_CALL["qwen3"], AFTER_AN_ANSWER["qwen3"]


@pytest.mark.parametrize("turn_prompts", ["render", "append"])
@pytest.mark.parametrize("family", list(CHAT_TEMPLATES))
def test_f184_later_prompts_have_the_families_format(family: str, turn_prompts: str) -> None:
    chat = ChatFormat(tokenizer_of(family), tools_on=True, turn_prompts=turn_prompts)
    calls = [FIRST] if FAMILIES[family].one_call else [FIRST, SECOND]
    results = [{"role": "tool", "name": "x", "content": c} for c in ("r1", "r2")]
    cases: list[tuple[str, list[dict[str, Any]], str]] = [
        (FAMILIES[family].write("", "", calls), results, AFTER_A_CALL[family]),
        ("Odd  spacing {\n ", [_user("and?")], AFTER_AN_ANSWER[family]),
    ]
    for text, following, expected in cases:
        messages = [_user("q")]
        prompt = chat.render(messages, TOOLS)
        output = chat.encode(text + _end(chat, following[0]["role"] == "tool"))
        messages += [chat.parse(prompt, output, TOOLS).message, *following]
        new = chat.next_prompt(messages, TOOLS, prompt, output, 1)
        assert new[: len(prompt) + len(output)] == prompt + output
        assert chat.decode(new) == chat.decode(prompt) + expected.replace("@", text)


def test_f173_only_a_template_that_forks_is_replaced() -> None:
    """Qwen2.5's shows replies as they were written, and stays; the others drop or rewrite something."""
    assert {family for family in CHAT_TEMPLATES if not _chat(list(CHAT_TEMPLATES).index(family)).continues} == {
        "qwen2.5"
    }


def test_a_dialect_of_a_family_keeps_its_own_template() -> None:
    """Tool results are written differently there: a replacement would show the model a format that it does not know."""
    dialect = CHAT_TEMPLATES["qwen3"].replace("<tool_response>", "<result>").replace("</tool_response>", "</result>")
    chat = ChatFormat(with_template("qwen3", dialect), tools_on=True)
    assert chat.family == "qwen3" and not chat.continues


_LETTERS = st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\ue0f0\ue0f1"), max_size=12)
_JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), _LETTERS),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(_LETTERS, inner, max_size=2)),
    max_leaves=4,
)
_CALLS = st.lists(
    st.tuples(st.sampled_from(["get_weather", "search"]), st.dictionaries(_LETTERS, _JSON, max_size=2)), max_size=2
)
_TURN = st.tuples(
    _LETTERS, _LETTERS, _CALLS, st.booleans(), st.lists(st.tuples(st.booleans(), _LETTERS), min_size=1, max_size=2)
)


def _written(chat: ChatFormat, content: str, reasoning: str, calls: Calls) -> str:
    known = FAMILIES[chat.family or ""]
    return known.write(content, reasoning, calls[:1] if known.one_call else calls).removeprefix(chat.prefill)


@given(index=st.integers(0, len(SETTINGS) - 1), turns=st.lists(_TURN, min_size=1, max_size=4))
@settings(max_examples=120, deadline=None)
def test_f173_f184_appending_never_changes_what_was_rendered(index: int, turns: list) -> None:
    """Random conversations with replies of any text: each prompt begins with the one before and the reply's text."""
    chat = _chat(index)
    messages = [_user("q")]
    text = chat.render_text(messages, TOOLS)
    for content, reasoning, calls, cut, following in turns:
        reply = _written(chat, content, reasoning, calls)[: 20 if cut else None]
        tool_first = following[0][0]
        output = chat.encode(reply) if cut else chat.encode(reply + _end(chat, tool_first))
        parsed = chat.parse(chat.encode(text), output, TOOLS)
        tail = [{"role": "tool", "content": c} if tool else _user(c) for tool, c in following]
        messages += [parsed.message, *tail]
        new = chat.render_text(messages, TOOLS)
        assert new.startswith(text + reply)
        text = new


@given(index=st.integers(0, len(SETTINGS) - 1), turns=st.lists(_TURN, min_size=1, max_size=3), seed=st.integers(3, 300))
@settings(max_examples=50, deadline=None)
def test_f184_append_keeps_every_token_and_renders_the_same_text(index: int, turns: list, seed: int) -> None:
    """Also tokens that no tokenizer would make of the text; a reply that was cut off gets its end."""
    chat = _chat(index, "append")
    messages = [_user("q")]
    prompt = chat.render(messages, TOOLS)
    for content, reasoning, calls, cut, following in turns:
        pieces = [chat.encode(c) for c in _written(chat, content, reasoning, calls)]  # one by one: not as encoded whole
        output = [token for piece in pieces for token in piece]
        if not cut:
            output += chat.encode(_end(chat, following[0][0]))
        tail = [{"role": "tool", "content": c} if tool else _user(c) for tool, c in following]
        messages += [chat.parse(prompt, output, TOOLS).message, *tail]
        new = chat.next_prompt(messages, TOOLS, prompt, output, len(messages) - len(tail) - 1)
        assert new[: len(prompt) + len(output)] == prompt + output
        assert chat.decode(new) == chat.render_text(messages, TOOLS)
        prompt = new


def test_append_takes_the_end_mark_that_the_model_chose() -> None:
    chat = ChatFormat(tokenizer_of("llama3"), tools_on=True, turn_prompts="append")
    prompt = chat.render([_user("q")], TOOLS)
    output = chat.encode("Hi<|eom_id|>")
    messages = [_user("q"), chat.parse(prompt, output, TOOLS).message, _user("and?")]
    new = chat.decode(chat.next_prompt(messages, TOOLS, prompt, output, 1))
    assert "Hi<|eom_id|><|start_header_id|>user" in new
    # GLM ends a reply by the next message's header: another one than the model guessed must be written
    chat = ChatFormat(tokenizer_of("glm-4"), tools_on=True, turn_prompts="append")
    prompt = chat.render([_user("q")], TOOLS)
    output = chat.encode("Hi<|user|>")
    messages = [_user("q"), chat.parse(prompt, output, TOOLS).message, {"role": "tool", "content": "r"}]
    assert "Hi<|user|><|observation|>\nr" in chat.decode(chat.next_prompt(messages, TOOLS, prompt, output, 1))


def test_messages_that_were_not_sampled_are_written_in_the_familys_form() -> None:
    """An assistant message without `raw` after the first reply, as a loop of one's own may add."""
    chat = ChatFormat(tokenizer_of("qwen3"), tools_on=True)
    call = {"type": "function", "function": {"name": FIRST[0], "arguments": FIRST[1]}}
    made = {"role": "assistant", "content": "Hm", "reasoning_content": "why", "tool_calls": [call]}
    text = chat.render_text(
        [_user("q"), {"role": "assistant", "content": "", "raw": "A"}, _user("b"), made], TOOLS, False
    )
    assert text.endswith(
        "<|im_start|>assistant\nA<|im_end|>\n<|im_start|>user\nb<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nwhy\n</think>\n\n"
        'Hm\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bad {Ems}", "days": 2}}\n</tool_call>'
        "<|im_end|>\n"
    )


@pytest.mark.parametrize("tools_on", [True, False])
def test_f183_template_kwargs_reach_the_template(tools_on: bool) -> None:
    def last(kwargs: dict[str, Any] | None) -> str:
        chat = ChatFormat(tokenizer_of("qwen3"), tools_on=tools_on, template_kwargs=kwargs)
        return chat.decode(chat.render([_user("q")]))

    assert last({"enable_thinking": False}).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert last(None).endswith("<|im_start|>assistant\n")


def test_f183_template_kwargs_reach_later_prompts() -> None:
    chat = ChatFormat(tokenizer_of("glm-4.5"), tools_on=True, template_kwargs={"enable_thinking": False})
    reply = {"role": "assistant", "content": "", "raw": "\nHi"}
    text = chat.render_text([_user("q"), reply, _user("and?")], TOOLS)
    assert text.endswith("<|assistant|>\n<think></think>\nHi<|user|>\nand?/nothink<|assistant|>\n<think></think>")


def test_without_tools_any_tokenizer_will_do() -> None:
    """Nothing but apply_chat_template and decode is called; the reply is the text without special tokens."""
    chat = ChatFormat(FakeTokenizer(), template_kwargs={"enable_thinking": False})
    prompt = chat.render([_user("hi")])
    assert prompt == FakeTokenizer().apply_chat_template(
        [_user("hi")], add_generation_prompt=True, tokenize=True, return_dict=False, enable_thinking=False
    )
    reply = chat.parse(prompt, [5, 6, EOS_ID])
    assert reply.message == {"role": "assistant", "content": "5 6"} and reply.calls == []
    messages = [_user("hi"), reply.message, _user("and?")]
    assert chat.next_prompt(messages, None, prompt, [5, 6, EOS_ID], 1) == chat.render(messages)


def test_without_tools_append_works_with_a_real_tokenizer() -> None:
    chat = ChatFormat(tokenizer_of("qwen3"), turn_prompts="append")
    prompt, output = chat.render([_user("a")]), chat.encode("b<|im_end|>")
    messages = [_user("a"), chat.parse(prompt, output).message, _user("c")]
    new = chat.next_prompt(messages, None, prompt, output, 1)
    assert chat.decode(new[len(prompt) :]) == "b<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"


def test_no_chat_template_is_refused() -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        ChatFormat(with_template("qwen3", None), tools_on=True)
    with pytest.raises(ConfigError, match="no chat template"):
        ChatFormat(FakeTokenizer(), tools_on=True)


def test_f173_a_family_that_is_not_known_needs_a_response_template(tmp_path: Any) -> None:
    write_tokenizer(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert ChatFormat(tokenizer).family is None  # without tools it is fine
    with pytest.raises(ConfigError, match="response_template") as caught:
        ChatFormat(tokenizer, tools_on=True)
    assert str(tmp_path) in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    tokenizer.response_template = {"fields": {}}
    with pytest.raises(ConfigError, match="malformed"):
        ChatFormat(tokenizer, tools_on=True)


def test_a_template_that_cannot_be_rendered_is_refused() -> None:
    broken = CHAT_TEMPLATES["qwen3"] + "{{- raise_exception('no, thanks') -}}"
    with pytest.raises(ConfigError, match="no, thanks"):
        ChatFormat(with_template("qwen3", broken), tools_on=True)


def test_a_lone_surrogate_of_a_tool_result_is_rendered() -> None:
    chat = ChatFormat(tokenizer_of("qwen3"), tools_on=True)
    assert "caf\u00e9 ?!" in chat.decode(chat.render([_user("caf\u00e9 \ud800!")], TOOLS))


def test_unknown_turn_prompts_are_refused() -> None:
    with pytest.raises(ConfigError, match="turn_prompts"):
        ChatFormat(FakeTokenizer(), turn_prompts="both")
