"""The model families whose tool calls are known: how a reply is read, written and continued.

A family is recognised by marks in the tokenizer's chat template, never by a model's name. Its response template is in
transformers' own format (`tokenizer.parse_response`); its continuation template renders what follows the first reply.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

Calls = list[tuple[str, dict[str, Any]]]  # (name, arguments) in emitted order


@dataclass(frozen=True)
class Family:
    """What is fixed by a model family.

    Attributes:
        name: how reports and errors call it.
        response_template: in transformers' format; field "tool_calls" opens at every attempt at a call.
        write_calls: the family's canonical text of calls.
        call_form: the form of a call, for the model to read when it got it wrong.
        template: file name of the continuation template.
        turn_ends: tokens that end a reply, the usual one first.
        next_headers: headers of other roles that end a reply (the next message begins with them).
        thinks: whether replies may hold a <think> block.
        think_form: the reasoning's place, as a format string.
        plain_start: what a reply begins with when it has no reasoning.
        bare_calls: calls have no opening mark; text is a call only when it names a known tool.
        one_call: a reply holds at most one call.
        call_separator: what stands between text and the first call.
    """

    name: str
    response_template: dict[str, Any]
    write_calls: Callable[[Calls], str]
    call_form: str
    template: str
    turn_ends: tuple[str, ...]
    next_headers: tuple[str, ...] = ()
    thinks: bool = False
    think_form: str = "<think>\n{}\n</think>\n\n"
    plain_start: str = ""
    bare_calls: bool = False
    one_call: bool = False
    call_separator: str = "\n"

    def write(self, content: str, reasoning: str = "", calls: Calls | None = None) -> str:
        """The text of a reply, as the family's models write it, without its end."""
        text = self.think_form.format(reasoning) if reasoning and self.thinks else self.plain_start
        text += content
        if calls:
            text += (self.call_separator if content else "") + self.write_calls(calls)
        return text

    def continuation(self) -> str:
        """Source of the Jinja template of what follows the first reply."""
        return _template_source(self.template)


@cache
def _template_source(name: str) -> str:
    return resources.files(__package__).joinpath("templates", name).read_text(encoding="utf-8")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _tagged_json(calls: Calls) -> str:
    return "\n".join(f"<tool_call>\n{_json({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls)


def _bare_json(calls: Calls) -> str:
    return "; ".join(_json({"name": n, "parameters": a}) for n, a in calls)


def _deepseek_v3(calls: Calls) -> str:
    each = (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{_json(a)}\n```<｜tool▁call▁end｜>" for n, a in calls
    )
    return "<｜tool▁calls▁begin｜>" + "\n".join(each) + "<｜tool▁calls▁end｜>"


def _deepseek_v31(calls: Calls) -> str:
    each = (f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{_json(a)}<｜tool▁call▁end｜>" for n, a in calls)
    return "<｜tool▁calls▁begin｜>" + "".join(each) + "<｜tool▁calls▁end｜>"


def _argument_tags(calls: Calls) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        pairs = ((key, value if isinstance(value, str) else _json(value)) for key, value in arguments.items())
        lines = (f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in pairs)
        return f"<tool_call>{name}\n{''.join(lines)}</tool_call>"

    return "\n".join(one(name, arguments) for name, arguments in calls)


def _name_line(calls: Calls) -> str:
    return "\n".join(f"{name}\n{_json(arguments)}" for name, arguments in calls)


def _response(anchor: str | list[str], call: dict[str, Any], thinks: bool, skip: str | None = None) -> dict[str, Any]:
    """A response template: text around calls is joined, not overwritten; `skip` is a pattern left out of the text.

    Patterns must stay linear in the text: a policy in training does write 10,000 blanks or 500 opening tags.
    """
    content: dict[str, Any] = {"content": "text", "content_args": {"strip": False}, "repeats": True, "join": ""}
    if skip is not None:
        content["close_pattern"] = skip
    fields: dict[str, Any] = {"tool_calls": {"repeats": True, **call}, "content": content}
    if thinks:
        reasoning = {"open": "<think>", "close": "</think>", "content": "text", "repeats": True, "join": "\n\n"}
        fields["reasoning_content"] = reasoning
    return {"defaults": {"role": "assistant"}, "start_anchor": anchor, "fields": fields}


def _call(arguments: str, name: str = "{name}") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


_JSON_CALL = {
    "open": "<tool_call>",
    "close": "</tool_call>",
    "content": "json",
    "transform": _call("{content.arguments}", "{content.name}"),
}
_QWEN_ANCHOR = "<|im_start|>assistant\n"
_QWEN_FORM = '<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>'
_QWEN_ENDS = ("<|im_end|>", "<|endoftext|>")
_GLM_HEADERS = ("<|observation|>", "<|user|>")

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            "qwen3",
            _response(_QWEN_ANCHOR, _JSON_CALL, True),
            _tagged_json,
            _QWEN_FORM,
            "qwen.jinja",
            _QWEN_ENDS,
            thinks=True,
        ),
        # no reasoning field: <think> in such a reply is the task's own format, and its reward reads it in the content
        Family(
            "qwen2.5", _response(_QWEN_ANCHOR, _JSON_CALL, False), _tagged_json, _QWEN_FORM, "qwen.jinja", _QWEN_ENDS
        ),
        Family(
            "llama3",
            _response(
                "<|start_header_id|>assistant<|end_header_id|>\n\n",
                {
                    # the whole reply is the call; JSON without these keys is an answer
                    "open_pattern": r"<\|python_tag\|>\s*"
                    r"|\A\s*(?=\{(?=.*\"name\"\s*:).*\"(?:parameters|arguments)\"\s*:)",
                    "content": "json",
                    "transform": _call("{content.parameters}", "{content.name}"),
                },
                False,
            ),
            _bare_json,
            '{"name": ..., "parameters": {...}}',
            "llama3.jinja",
            ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
            call_separator="<|python_tag|>",
        ),
        Family(
            "deepseek-v3",
            _response(
                ["<｜Assistant｜>", "<｜tool▁outputs▁end｜>"],
                {
                    "open_pattern": r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>(?P<name>[^\n<]*)\n```json\s*)?",
                    "close_pattern": r"(?:```)?<｜tool▁call▁end｜>",
                    "content": "json",
                    "transform": _call("{content}"),
                },
                False,
                r"<｜tool▁calls▁begin｜>|<｜tool▁calls▁end｜>",
            ),
            _deepseek_v3,
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n{...}\n```<｜tool▁call▁end｜>",
            "deepseek_v3.jinja",
            ("<｜end▁of▁sentence｜>",),
            call_separator="",
        ),
        Family(
            "deepseek-v3.1",
            _response(
                ["<｜Assistant｜>", "<｜tool▁output▁end｜>"],
                {
                    "open_pattern": r"<｜tool▁call▁begin｜>(?:(?P<name>[^\n<]*)<｜tool▁sep｜>)?",
                    "close": "<｜tool▁call▁end｜>",
                    "content": "json",
                    "transform": _call("{content}"),
                },
                True,
                r"<｜tool▁calls▁begin｜>|<｜tool▁calls▁end｜>|</think>",
            ),
            _deepseek_v31,
            "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>",
            "deepseek_v31.jinja",
            ("<｜end▁of▁sentence｜>",),
            thinks=True,
            think_form="<think>{}</think>",
            call_separator="",
        ),
        Family(
            "glm-4.5",
            _response(
                "<|assistant|>",
                {
                    "open_pattern": r"<tool_call>(?P<name>[^\n<]*)",
                    "close": "</tool_call>",
                    "content": "xml-inline",
                    "content_args": {
                        "tag_pattern": r"<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
                    },
                    "transform": _call("{content}"),
                },
                True,
            ),
            _argument_tags,
            "<tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>",
            "glm45.jinja",
            ("<|endoftext|>",),
            _GLM_HEADERS,
            thinks=True,
            think_form="\n<think>{}</think>\n",
            plain_start="\n<think></think>\n",
        ),
        Family(
            "glm-4",
            _response(
                "<|assistant|>",
                {
                    "open_pattern": r"\A\s*(?P<name>[A-Za-z_][\w.-]*)[ \t]*\n\s*(?=\{)",
                    "content": "json",
                    "transform": _call("{content}"),
                },
                False,
            ),
            _name_line,
            "NAME\n{...}",
            "glm4.jinja",
            ("<|endoftext|>",),
            _GLM_HEADERS,
            bare_calls=True,
            one_call=True,
        ),
    )
}


def recognise(chat_template: str) -> Family | None:
    """The family whose calls this chat template renders, None when it is none that is known."""
    has = chat_template.__contains__
    name = None
    if has("<｜tool▁call▁begin｜>"):
        name = "deepseek-v3" if has("```json") else "deepseek-v3.1"
    elif has("<arg_key>"):
        name = "glm-4.5"
    elif has("<|observation|>"):
        name = "glm-4"
    elif has("<|start_header_id|>") and has("ipython"):
        name = "llama3"
    # Qwen3-Coder and Qwen3.5 write calls as <function=...> in the same tags: another family
    elif has("<tool_call>") and has("<|im_start|>") and not has("<function="):
        name = "qwen3" if has("</think>") else "qwen2.5"
    return FAMILIES[name] if name else None
