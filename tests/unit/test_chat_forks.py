"""The trial before a run: which conversations fork, and why."""

from __future__ import annotations

import pytest

from asyncgrpo_core.rollout.chat import ChatFormat, fork_report
from tests.unit.chat_tokenizers import CHAT_TEMPLATES, tokenizer_of, with_template
from tests.unit.test_chat_parsing import TOOLS


def _with_own_template(family: str, template: str | None = None, **kwargs: bool) -> ChatFormat:
    """The state of a family whose dialect cannot be replaced: the tokenizer's own template, forks and all."""
    tokenizer = tokenizer_of(family) if template is None else with_template(family, template)
    chat = ChatFormat(tokenizer, tools_on=True, template_kwargs=kwargs)
    chat.continues = False
    return chat


@pytest.mark.parametrize("family", list(CHAT_TEMPLATES))
@pytest.mark.parametrize("turn_prompts", ["render", "append"])
def test_f173_the_template_in_use_never_forks(family: str, turn_prompts: str) -> None:
    report = fork_report(ChatFormat(tokenizer_of(family), tools_on=True, turn_prompts=turn_prompts), TOOLS)
    assert report.keeps_prefix and len(report.transitions) > 8
    assert "make one sample" in report.text and "\n" not in report.text


def test_f173_reasoning_that_is_dropped_is_reported() -> None:
    report = fork_report(_with_own_template("qwen3"), TOOLS)
    forks = {t.conversation: t.reason for t in report.transitions if not t.keeps_prefix}
    assert not report.keeps_prefix
    assert forks == {
        "reasoning": "reasoning of earlier turns is dropped",
        "reasoning and calls": "reasoning of earlier turns is dropped",
        "white space around replies": "white space of replies is changed",
        "JSON without spaces": "tool arguments are re-serialised",
    }
    assert "The tokenizer's own chat template" in report.text
    assert "reasoning of earlier turns is dropped (in: reasoning, reasoning and calls)" in report.text
    # a tool result does not end the reasoning there, the next user message does
    kept = [(t.appended, t.keeps_prefix) for t in report.transitions if t.conversation == "reasoning and calls"]
    assert kept == [("a tool result", True), ("a user message", False), ("a user message", False)]


def test_f173_other_reasons() -> None:
    def reasons(chat: ChatFormat) -> set[str]:
        return {t.reason for t in fork_report(chat, TOOLS).transitions if not t.keeps_prefix}

    assert reasons(_with_own_template("qwen3", enable_thinking=False)) == {
        "an empty reasoning block is taken out of replies"
    }
    assert any("refuses the conversation: only single tool-calls" in r for r in reasons(_with_own_template("llama3")))
    # a system message that counts the messages; a reply's end that changes once it is not the last
    counting = CHAT_TEMPLATES["qwen2.5"].replace("'You are Qwen.'", "('You see ' ~ messages | length)")
    assert "the system message changes" in reasons(_with_own_template("qwen2.5", counting))
    ending = CHAT_TEMPLATES["qwen2.5"].replace("{{- '<|im_end|>\\n' -}}\n{%- elif", "{{- '\\n\\n' -}}\n{%- elif", 1)
    assert ending != CHAT_TEMPLATES["qwen2.5"]
    assert "the end of a reply is rendered differently" in reasons(_with_own_template("qwen2.5", ending))


def test_a_template_that_leaves_calls_out_is_replaced() -> None:
    """DeepSeek-V3's own shows a call only when there is no content at all: the result would answer nothing."""
    template = CHAT_TEMPLATES["deepseek-v3"].replace("{%- if message.tool_calls -%}", "{%- if false -%}")
    own = _with_own_template("deepseek-v3", template)
    assert "tool calls are rendered otherwise than the model writes them" in fork_report(own, TOOLS).text
    chat = ChatFormat(with_template("deepseek-v3", template), tools_on=True)
    assert chat.continues and fork_report(chat, TOOLS).keeps_prefix


def test_a_template_that_does_not_show_the_tools_is_reported() -> None:
    assert fork_report(ChatFormat(tokenizer_of("qwen3"), tools_on=True), TOOLS).shows_tools
    report = fork_report(ChatFormat(tokenizer_of("deepseek-v3.1"), tools_on=True), TOOLS)
    assert not report.shows_tools and "describe them in a system message" in report.text


def test_an_unknown_family_is_tried_with_the_replies_that_its_own_template_writes() -> None:
    tokenizer = with_template(
        "qwen3",
        "{%- for m in messages -%}{{- '<|im_start|>' ~ m.role ~ '\\n' ~ (m.content | trim) -}}"
        "{%- for c in m.tool_calls or [] -%}{{- '[CALL]' ~ (c.function | tojson) ~ '[/CALL]' -}}{%- endfor -%}"
        "{{- '<|im_end|>\\n' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}",
    )
    call = {"open": "[CALL]", "close": "[/CALL]", "repeats": True, "content": "json"}
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "tool_calls": {**call, "transform": {"type": "function", "function": "{content}"}},
            "content": {"content": "text"},
        },
    }
    report = fork_report(ChatFormat(tokenizer, tools_on=True), TOOLS)
    forks = {t.conversation: t.reason for t in report.transitions if not t.keeps_prefix}
    assert forks == {
        "white space around replies": "white space of replies is changed",
        "JSON without spaces": "tool arguments are re-serialised",
    }
    assert {t.conversation for t in report.transitions} >= {"two calls", "calls in a row"}


def test_append_does_not_fork_where_rendering_does() -> None:
    chat = _with_own_template("qwen3")
    chat.turn_prompts = "append"
    chat._text_replies = False
    assert fork_report(chat, TOOLS).keeps_prefix


def test_without_tools_there_is_nothing_to_try() -> None:
    report = fork_report(ChatFormat(tokenizer_of("qwen3")), None)
    assert report.transitions == () and "nothing is known" in report.text
