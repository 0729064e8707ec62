"""Sampled text -> assistant message and tool calls. Nothing that a model can write makes this raise.

transformers' `parse_response` reads what is well formed, with the arguments cast by the tools' schemas. It raises on a
reply with one malformed call; such a reply is read call by call here, and the malformed ones say what is wrong.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import regex
from transformers.utils.chat_parsing.response_templates import ResponseTemplate, load_response_template

from asyncgrpo_core.rollout.chat.families import Family

CALLS = "tool_calls"


@dataclass(frozen=True)
class ToolCall:
    """One call as the model wrote it. `error`, when set, says what is wrong with it, for the model to read."""

    name: str | None
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass
class ParsedReply:
    """A reply, read.

    `message` has role and content, and where there are any reasoning_content, tool_calls (well-formed calls only, the
    text of malformed ones stays in the content) and `raw`: the exact text, which `ChatFormat.render` prefers to the
    rest, so that the next turn shows what the model wrote. `calls` has all calls in emitted order.
    """

    message: dict[str, Any]
    calls: list[ToolCall] = field(default_factory=list)


@dataclass(frozen=True)
class Region:
    """A stretch of text[start:end] that belongs to a field; its inside is text[body_start:body_end]."""

    field: str
    start: int
    body_start: int
    body_end: int
    end: int
    closed: bool
    name: str | None = None  # of the tool, where the opening mark holds it


class ReplyReader:
    """Reads replies by one response template.

    Args:
        tokenizer: its `parse_response` is used.
        response_template: in transformers' format; the calls are field "tool_calls".
        family: the known family, if it is one.

    Raises:
        ValueError: the response template is malformed (transformers' own message).
    """

    def __init__(self, tokenizer: Any, response_template: dict[str, Any], family: Family | None) -> None:
        self.tokenizer = tokenizer
        self.template: ResponseTemplate = load_response_template(response_template)
        self.family = family
        implicit = self.template.implicit
        self._skipped = self.template.fields[implicit].close_re if implicit is not None else None

    def prefill(self, prompt_text: str) -> str:
        """What the prompt already wrote of the reply; "" when the prompt holds no assistant header."""
        ends = [match.end() for match in self.template.start_anchor_re.finditer(prompt_text)]
        return prompt_text[ends[-1] :] if ends else ""

    def read(self, text: str, prefill: str, tools: list[dict[str, Any]] | None) -> ParsedReply:
        """Read `text`, a reply without its end mark that goes on after `prefill`."""
        full = prefill + text
        attempts = [region for region in self.regions(full) if region.field == CALLS]
        if self.family is not None and self.family.bare_calls:
            names = tool_names(tools)
            attempts = [region for region in attempts if region.name in names]
            if not attempts:
                return ParsedReply({"role": "assistant", "content": text.strip()})
        if all(region.closed for region in attempts):
            parsed = self._parse(text, prefill, tools)
            calls = well_formed(parsed) if parsed is not None else None
            if calls is not None and len(calls) >= len(attempts) and not self._residue(full, attempts):
                return _reply(parsed or {}, calls)
        return self._read_pieces(full, len(prefill), attempts, tools)

    def regions(self, text: str) -> Iterator[Region]:
        """The explicit fields' regions in order, found as transformers finds them; an unclosed one runs to the end."""
        fields = [f for f in self.template.fields.values() if f.open_re is not None]
        position = 0
        while True:
            found = [(m, f) for f in fields if (m := f.open_re.search(text, position)) is not None]
            if not found:
                return
            opening, spec = min(found, key=lambda pair: (pair[0].start(), -len(pair[0].group())))
            name = (opening.groupdict().get("name") or "").strip() or None
            closing = spec.close_re.search(text, opening.end()) if spec.close_re is not None else None
            if spec.close_re is None and spec.name == CALLS and spec.content == "json":
                yield from _json_regions(text, opening.start(), opening.end(), name)
                return
            if closing is None:
                closed = spec.close_re is None
                yield Region(spec.name, opening.start(), opening.end(), len(text), len(text), closed, name)
                return
            yield Region(spec.name, opening.start(), opening.end(), closing.start(), closing.end(), True, name)
            position = max(closing.end(), position + 1)

    def _parse(self, text: str, prefill: str, tools: list[dict[str, Any]] | None) -> dict[str, Any] | None:
        try:
            return self.tokenizer.parse_response(text, self.template, prefix=prefill, tools=tools)
        except Exception:  # whatever it is, the text is the model's: it is read in pieces and the pieces explain it
            return None

    def _residue(self, text: str, attempts: list[Region]) -> bool:
        return any(self._stray(text[r.body_start : r.body_end]) for r in attempts)

    def _stray(self, body: str) -> str:
        """What stands in a call's inside and belongs to no argument (argument tags only)."""
        spec = self.template.fields.get(CALLS)
        if spec is None or spec.content != "xml-inline":
            return ""
        return regex.sub(spec.content_args["tag_pattern"], "", body, flags=regex.DOTALL).strip()

    def _read_pieces(
        self, full: str, start: int, attempts: list[Region], tools: list[dict[str, Any]] | None
    ) -> ParsedReply:
        head_end = attempts[0].start if attempts else len(full)
        head = full[start : max(head_end, start)]
        message = self._parse(head, full[:start], tools) or {"role": "assistant", "content": head}
        message.pop(CALLS, None)
        text = message.get("content") or ""
        if text and not text[-1].isspace():
            text += head[len(head.rstrip()) :]  # templates may strip it; more text may follow here
        content, good, calls = [text], [], []
        position = max(head_end, start)
        unmarked = CALLS in self.template.fields and self.template.fields[CALLS].close_re is None
        for region in attempts:
            if region is attempts[0] or not unmarked:
                content.append(self._plain(full[position : region.start]))
            piece = full[region.start : region.end]
            parsed = self._parse(piece, "", tools) if region.closed else None
            read = well_formed(parsed) if parsed is not None else None
            if read and not self._stray(full[region.body_start : region.body_end]):
                good += read
                calls += [_tool_call(call) for call in read]
            else:
                content.append(piece)
                calls.append(self._malformed(full, region))
            position = max(region.end, position)
        content.append(self._plain(full[position:]))
        message["content"] = "".join(content)
        return _reply({**message, CALLS: good}, good, calls)

    def _plain(self, text: str) -> str:
        return self._skipped.sub("", text) if self._skipped is not None else text

    def _malformed(self, full: str, region: Region) -> ToolCall:
        body = full[region.body_start : region.body_end]
        spec = self.template.fields[CALLS]
        name, why = region.name, None
        if not region.closed:
            why = "it has no end"
        elif spec.content == "json":
            inside = _names_inside(spec.transform)
            why, name = _json_fault(body, inside, region.name)
            if why is None and inside is None and region.name is None:
                why = "the function's name is missing"
        elif self._stray(body):
            why = "there is text in it that belongs to no argument"
        elif region.name is None:
            why = "the function's name is missing"
        form = f" Write a call like this:\n{self.family.call_form}" if self.family is not None else ""
        why = why or "it does not have the form of a call"
        return ToolCall(name, {}, f"This tool call could not be read: {why}.{form}")


def tool_names(tools: list[dict[str, Any]] | None) -> set[str]:
    """Names of the tools, from their JSON schemas."""
    return {name for tool in tools or [] if isinstance(name := (tool.get("function") or tool).get("name"), str)}


def well_formed(parsed: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The calls of a parsed message, flat, names stripped; None when one of them is no call."""
    found = parsed.get(CALLS) or []
    calls: list[dict[str, Any]] = []
    for item in found if isinstance(found, list) else [found]:
        calls += item if isinstance(item, list) else [item]
    result = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            return None
        name, arguments = function.get("name"), function.get("arguments")
        if not isinstance(name, str) or not name.strip() or not isinstance(arguments, dict):
            return None
        if not _encodable([name, arguments]):
            return None
        result.append({**call, "function": {"name": name.strip(), "arguments": arguments}})
    return result


def _reply(parsed: dict[str, Any], good: list[dict[str, Any]], calls: list[ToolCall] | None = None) -> ParsedReply:
    message = {"role": "assistant", "content": "", **parsed}
    message["role"] = "assistant"
    if isinstance(message["content"], str):
        message["content"] = message["content"].strip()
    message.pop(CALLS, None)
    if good:
        message[CALLS] = good
    return ParsedReply(message, [_tool_call(call) for call in good] if calls is None else calls)


def _tool_call(call: dict[str, Any]) -> ToolCall:
    # a copy: a tool that changes its arguments must not change the conversation
    return ToolCall(call["function"]["name"], copy.deepcopy(call["function"]["arguments"]))


def _encodable(value: Any) -> bool:
    """False for text with lone surrogates (a "\\ud800" in JSON) and for nesting too deep to walk."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeEncodeError, ValueError, TypeError, RecursionError):
        return False
    return True


def _json_regions(text: str, start: int, body: int, name: str | None) -> Iterator[Region]:
    """One region per JSON value of an unmarked list of calls, separated by ";", "," or nothing; the rest is one too."""
    decoder = json.JSONDecoder()
    while True:
        try:
            value, end = decoder.raw_decode(text, body)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            yield Region(CALLS, start, body, len(text), len(text), True, name)
            return
        yield Region(CALLS, start, body, end, end, True, name)
        rest = regex.match(r"[\s;,]*(?:<\|python_tag\|>)?\s*", text, pos=end)
        if rest is None or rest.end() >= len(text):
            return
        start = body = rest.end()


def _names_inside(transform: Any) -> tuple[str, str] | None:
    """Keys of (name, arguments) inside a call's JSON, None when the opening mark holds the name."""
    function = transform.get("function") if isinstance(transform, dict) else None
    if function == "{content}":
        return ("name", "arguments")
    if not isinstance(function, dict):
        return None
    keys = []
    for key in ("name", "arguments"):
        placeholder = str(function.get(key, ""))
        if not placeholder.startswith("{content."):
            return None
        keys.append(placeholder[len("{content.") : -1])
    return (keys[0], keys[1])


def _json_fault(body: str, inside: tuple[str, str] | None, name: str | None) -> tuple[str | None, str | None]:
    """(what is wrong, the tool's name as far as it is known) for the inside of a call in JSON."""
    try:
        value = json.loads(body)
    except json.JSONDecodeError as error:
        return f"it is not valid JSON ({error.msg} at character {error.pos})", name
    except (ValueError, RecursionError):
        return "it is not JSON that can be read (a number too long or nesting too deep)", name
    if not isinstance(value, dict):
        return "it is not a JSON object" if inside is not None else "the arguments are not a JSON object", name
    arguments = value
    if inside is not None:
        name_key, arguments_key = inside
        found = value.get(name_key)
        if not isinstance(found, str) or not found.strip():
            return f'"{name_key}" is missing or is not a string', None
        name = found.strip() if _encodable(found) else None
        if arguments_key not in value:
            return f'"{arguments_key}" is missing', name
        arguments = value[arguments_key]
        if not isinstance(arguments, dict):
            return f'"{arguments_key}" is not a JSON object', name
    if not _encodable([name, arguments]) or (name is None and inside is not None):
        return "it holds text that is not valid Unicode", name
    return None, name
