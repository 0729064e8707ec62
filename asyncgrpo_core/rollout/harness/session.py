"""One rollout's side of the proxy: requests in, turns recorded, errors remembered.

A harness may swallow an HTTP error and go on, or return a reward as if nothing had happened. So what went wrong on the
engine's side is kept in `error` and raised by the rollout when the harness has ended.
"""

from __future__ import annotations

import asyncio
import contextvars
import hmac
import json
import secrets
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from asyncgrpo_core.rollout.context import RolloutContext
from asyncgrpo_core.rollout.harness.cut import before_stop, cut_turn
from asyncgrpo_core.rollout.harness.memory import GivenReply, Recalled, ReplyMemory
from asyncgrpo_core.rollout.harness.reply import ChatReply, openai_message
from asyncgrpo_core.rollout.harness.request import ChatRequest, HarnessRequestError, Message
from asyncgrpo_core.rollout.sampling import ConversationTooLongError
from asyncgrpo_core.rollout.tools import CallOutcome
from asyncgrpo_core.types import TurnRecord

if TYPE_CHECKING:
    from asyncgrpo_core.rollout.loop import AsyncRolloutLoop


class HarnessSession:
    """What one rollout's harness may ask, and what it was answered.

    Made inside the rollout's task: requests run in a copy of that task's context variables.

    Attributes:
        id, key: its place in the base URL, and its API key.
        turns: one per answered request, in order of completion.
        error: the first error that the rollout must not survive; `failed` is set with it.
        tool_calls: calls in replies, malformed ones included; `tool_failures`: the malformed ones.
        tools: what `generate_one` was given, for the harness's own use.
    """

    def __init__(self, loop: AsyncRolloutLoop, context: RolloutContext, tools: list[Callable[..., Any]]) -> None:
        self.id = uuid.uuid4().hex
        self.key = f"sk-{secrets.token_urlsafe(24)}"
        self.turns: list[TurnRecord] = []
        self.error: BaseException | None = None
        self.failed = asyncio.Event()
        self.closed = False
        self.tool_calls = 0
        self.tool_failures = 0
        self.context = context
        self.tools = tools
        self._loop = loop
        self._memory = ReplyMemory()
        self._longest: list[Message] = []
        self._variables = contextvars.copy_context()
        self._running: set[asyncio.Task[ChatReply]] = set()

    def accepts(self, key: str) -> bool:
        return hmac.compare_digest(key.encode("utf-8", "surrogateescape"), self.key.encode())

    async def answer(self, request: ChatRequest) -> ChatReply:
        """Answer one request. A request whose connection is lost meanwhile is given up and leaves no turn.

        Raises:
            HarnessRequestError: what the harness is told.
        """
        task = asyncio.create_task(self._answer(request), context=self._variables.copy())
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await task
        except asyncio.CancelledError:
            if self.closed:
                raise gone() from None
            raise

    def close(self) -> None:
        """End the session: requests still running are given up."""
        self.closed = True
        for task in self._running:
            task.cancel()

    def completion(self, prompt: list[Message]) -> list[Message]:
        """The longest conversation (the later of equals) from its first reply on.

        A harness may put messages of its own before or after the prompt; what comes before the first assistant
        message after it is not part of the completion.
        """
        longest = self._longest
        start = len(prompt) if [_bare(m) for m in longest[: len(prompt)]] == [_bare(m) for m in prompt] else 0
        while start < len(longest) and longest[start]["role"] != "assistant":
            start += 1
        return longest[start:]

    async def _answer(self, request: ChatRequest) -> ChatReply:
        if self.error is not None:
            raise _engine_error(self.error)
        tools_key = json.dumps(request.tools, sort_keys=True)
        recalled = self._memory.recall(request.messages)
        prompt_ids = self._prompt_ids(request, recalled, tools_key)
        try:
            turn = await self._loop.generate_one_turn(prompt_ids)
        except ConversationTooLongError as error:
            raise self._too_long(error) from error
        except Exception as error:  # a hook may raise anything; the rollout raises it again
            self._fail(error)
            raise _engine_error(error) from error
        return self._record(request, recalled, turn, tools_key)

    def _prompt_ids(self, request: ChatRequest, recalled: Recalled, tools_key: str) -> list[int]:
        chat, latest = self._loop.chat, recalled.latest
        try:
            if latest is None or latest.tools != tools_key:
                return chat.render(recalled.messages, request.tools)
            return chat.next_prompt(
                recalled.messages, request.tools, latest.turn.prompt_ids, latest.turn.output_ids, recalled.latest_index
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise HarnessRequestError(
                400, f"the chat template cannot render these messages: {type(error).__name__}: {error}"
            ) from error

    def _record(self, request: ChatRequest, recalled: Recalled, turn: TurnRecord, tools_key: str) -> ChatReply:
        number = len(self.turns)
        turn = cut_turn(turn, request.stop, request.max_tokens, self._text)
        self.turns.append(turn)
        reply = self._loop.chat.parse(turn.prompt_ids, turn.output_ids, request.tools)
        # a reply that was cut off has no end that results could follow; one that was offered no tools called none
        calls_count = request.tools is not None and turn.finish_reason != "length"
        readable = reply.message
        if not calls_count and reply.calls:
            readable = {"role": "assistant", "content": reply.message.get("raw", reply.message["content"])}
        elif reply.calls:
            self._count(reply.calls)
        shown = openai_message({**readable, "content": before_stop(readable["content"], request.stop)}, number)
        self._memory.remember(recalled.place, shown, GivenReply(reply.message, turn, tools_key))
        conversation = [*recalled.messages, reply.message]
        if len(conversation) >= len(self._longest):
            self._longest = conversation
        reason = "length" if turn.finish_reason == "length" else "tool_calls" if "tool_calls" in shown else "stop"
        return ChatReply(shown, reason, len(turn.prompt_ids), len(turn.output_ids))

    def _text(self, ids: list[int]) -> str:
        return self._loop.tokenizer.decode(ids, skip_special_tokens=True)

    def _count(self, calls: list[Any]) -> None:
        """Account for calls as the tool loop does. How a well-formed one ends is the harness's knowledge."""
        malformed = [CallOutcome(c.name or "", "malformed", c.error) for c in calls if c.error is not None]
        self.tool_calls += len(calls)
        self.tool_failures += len(malformed)
        self.context.calls += malformed
        self.context.calls_per_message.append(len(calls))

    def _too_long(self, error: ConversationTooLongError) -> HarnessRequestError:
        if self._loop.config.long_conversation == "end" and self.turns:
            self.context.context_full = True
        else:
            self._fail(
                ConversationTooLongError(
                    f"{error.message} A harness asked for it after {len(self.turns)} turns of its rollout.",
                    "Restart the server with a larger --max-model-len, lower max_completion_length, let the harness "
                    'shorten its conversation, or set long_conversation="end" to end such rollouts instead of the run.',
                )
            )
        return HarnessRequestError(400, error.message, code="context_length_exceeded", param="messages")

    def _fail(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error
        self.failed.set()


def gone() -> HarnessRequestError:
    return HarnessRequestError(410, "this rollout has ended; its harness may not ask any more.")


def _engine_error(error: BaseException) -> HarnessRequestError:
    return HarnessRequestError(502, f"the policy could not be sampled, this rollout fails: {error}")


def _bare(message: Message) -> tuple[Any, Any]:
    role, content = message.get("role"), message.get("content")
    if isinstance(content, list):
        content = "\n".join(part.get("text", "") for part in content if isinstance(part, dict))
    return ("system" if role == "developer" else role), content or ""
