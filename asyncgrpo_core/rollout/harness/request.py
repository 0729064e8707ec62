"""The body of POST chat/completions, read strictly.

What a request may not change is how tokens are sampled, because the importance ratio is that of the run's settings.
Settings that only tune the sampling are ignored and named in the reply's header `X-AsyncGRPO-Ignored`; those that the
harness's own logic would rely on (n, logprobs, response_format, ...) are refused. Where a reply ends (stop, max_tokens)
changes no token's probability and is followed (cut.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from asyncgrpo_core.server.generation import SamplingSettings

IGNORED_HEADER = "X-AsyncGRPO-Ignored"

Message = dict[str, Any]


class HarnessRequestError(Exception):
    """A request that is answered with an HTTP error.

    Args:
        status: the HTTP status.
        message: what is wrong and what to change, for the harness's log.
        code: OpenAI's error code where it has one that clients look at.
        param: the request's field that is wrong.
    """

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclass
class ChatRequest:
    """A checked request.

    Attributes:
        messages: in the form that chat templates take: text content, arguments as objects, no ids.
        tools: JSON schemas as sent; None when there are none or tool_choice="none".
        stop: strings that end the reply.
        max_tokens: the longest reply; None: the run's max_completion_length, which is the bound in any case.
        ignored: names of the fields that contradict the run's settings and were not followed.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    stream: bool = False
    include_usage: bool = False
    stop: list[str] = field(default_factory=list)
    max_tokens: int | None = None
    ignored: list[str] = field(default_factory=list)


def read_request(body: Any, sampling: SamplingSettings, *, tools_on: bool) -> ChatRequest:
    """Check a request's JSON.

    Args:
        sampling: the run's settings.
        tools_on: whether replies can be read for tool calls.

    Raises:
        HarnessRequestError: status 400; the message names the field and what to change.
    """
    if not isinstance(body, dict):
        raise _bad(None, "the body is not a JSON object")
    for name, allowed, why in _REFUSED:
        if not allowed(body.get(name)):
            raise _bad(name, f"{name}={json.dumps(body[name])[:100]} is not served: {why}")
    stream_options = body.get("stream_options") or {}
    return ChatRequest(
        messages=read_messages(body.get("messages")),
        tools=_read_tools(body, tools_on),
        stream=bool(body.get("stream")),
        include_usage=isinstance(stream_options, dict) and bool(stream_options.get("include_usage")),
        stop=_stop_strings(body.get("stop")),
        max_tokens=_max_tokens(body),
        ignored=_ignored(body, sampling),
    )


def _none_or(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value is None or any(value is v or value == v for v in values)


_REFUSED: list[tuple[str, Callable[[Any], bool], str]] = [
    ("n", _none_or(1), "a turn has one reply; send the request again for another"),
    ("logprobs", _none_or(False), "log-probabilities are recorded for training and not sent to the harness"),
    ("top_logprobs", _none_or(0), "log-probabilities are recorded for training and not sent to the harness"),
    ("logit_bias", _none_or({}), "it would change what the policy samples"),
    (
        "response_format",
        lambda value: value is None or (isinstance(value, dict) and value.get("type") == "text"),
        "the policy is not constrained while it samples; ask for the format in the prompt",
    ),
    ("functions", _none_or([]), "send tools instead"),
    ("function_call", _none_or("auto", "none"), "send tools instead"),
]


def _ignored(body: dict[str, Any], sampling: SamplingSettings) -> list[str]:
    """Fields that the run's settings overrule."""
    own = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p or 0.0,
        "repetition_penalty": sampling.repetition_penalty,
        "frequency_penalty": 0,
        "presence_penalty": 0,
        "parallel_tool_calls": True,
    }
    names = [name for name, value in own.items() if body.get(name) is not None and body[name] != value]
    names += [name for name in ("seed", "reasoning_effort") if body.get(name) is not None]
    # "required" or a named tool: frameworks send it by default, and cope with a reply that calls nothing
    return names if body.get("tool_choice") in (None, "auto", "none") else [*names, "tool_choice"]


def _stop_strings(stop: Any) -> list[str]:
    strings = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(strings, list) or not all(isinstance(s, str) for s in strings):
        raise _bad("stop", "stop is neither a string nor a list of strings")
    return [s for s in strings if s]


def _max_tokens(body: dict[str, Any]) -> int | None:
    bounds = []
    for name in ("max_tokens", "max_completion_tokens"):
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or value < 1:
            raise _bad(name, f"{name}={json.dumps(value)[:100]} is no positive integer")
        bounds.append(value)
    return min(bounds, default=None)


def _read_tools(body: dict[str, Any], tools_on: bool) -> list[dict[str, Any]] | None:
    tools = body.get("tools")
    if not tools:
        return None
    if not isinstance(tools, list):
        raise _bad("tools", "tools is not a list")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _bad(f"tools[{i}]", f"tools[{i}] is no function tool")
    if not tools_on:
        raise _bad("tools", "tools are off for this run; set harness_tools = True on the rollout loop")
    return None if body.get("tool_choice") == "none" else tools


def read_messages(raw: Any) -> list[Message]:
    """Messages as chat templates take them: see `ChatRequest.messages`.

    The tool's name is added to a tool message, from the call that it answers.

    Raises:
        HarnessRequestError: status 400, naming the message.
    """
    if not isinstance(raw, list) or not raw:
        raise _bad("messages", "messages is not a list with at least one message")
    names: dict[str, str] = {}  # tool call id -> tool
    messages = []
    for i, message in enumerate(raw):
        where = f"messages[{i}]"
        if not isinstance(message, dict):
            raise _bad(where, f"{where} is not an object")
        role = message.get("role")
        content = _text(message.get("content"), where)
        if role in ("system", "developer", "user"):
            messages.append({"role": "user" if role == "user" else "system", "content": content})
        elif role == "assistant":
            messages.append(_assistant(message, content, where, names))
        elif role == "tool":
            name = names.get(message.get("tool_call_id", ""), message.get("name"))
            named = {"name": name} if isinstance(name, str) else {}
            messages.append({"role": "tool", **named, "content": content})
        else:
            raise _bad(where, f"{where} has the role {role!r}; known are system, developer, user, assistant and tool")
    return messages


def _assistant(message: Message, content: str, where: str, names: dict[str, str]) -> Message:
    read: Message = {"role": "assistant", "content": content}
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str):
        read["reasoning_content"] = reasoning
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise _bad(where, f"{where}.tool_calls is not a list")
    read_calls = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _bad(where, f"{where}.tool_calls holds something that is no function call")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except ValueError:
                raise _bad(where, f"{where}: the arguments of {function['name']!r} are not valid JSON") from None
        if not isinstance(arguments, dict):
            raise _bad(where, f"{where}: the arguments of {function['name']!r} are not a JSON object")
        if isinstance(call.get("id"), str):
            names[call["id"]] = function["name"]
        read_calls.append({"type": "function", "function": {"name": function["name"], "arguments": arguments}})
    if read_calls:
        read["tool_calls"] = read_calls
    return read


def _text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise _bad(where, f"{where}.content is neither text nor a list of parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "refusal") or not isinstance(part.get(kind), str):
            raise _bad(where, f"{where}.content holds a part of type {kind!r}; the policy reads text only")
        texts.append(part[kind])
    return "\n".join(texts)


def _bad(param: str | None, message: str) -> HarnessRequestError:
    return HarnessRequestError(400, f"{message}.", param=param)
