"""The default `generate_one`: sample a reply, run its tool calls, put the results into the conversation, sample again.

    prompt -> turn -> [ calls -> results -> next prompt -> turn ]* -> rollout

It ends with a reply that calls no tool, a reply cut off by max_completion_length, or the limit of
max_tool_calling_iterations. The reference's rule holds: within one reply calls run in the order they were written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from asyncgrpo_core.rollout.context import RolloutContext, current_rollout
from asyncgrpo_core.rollout.sampling import ConversationTooLongError
from asyncgrpo_core.rollout.tools import CallOutcome, tool_name, tool_schema
from asyncgrpo_core.types import Rollout, TurnRecord

if TYPE_CHECKING:
    from asyncgrpo_core.rollout.loop import AsyncRolloutLoop


async def converse(loop: AsyncRolloutLoop, prompt: list[dict[str, Any]], tools: list[Callable[..., Any]]) -> Rollout:
    """One rollout with the loop's `generate_one_turn`, tool box and chat format.

    Raises:
        RequestRejectedError, ServerError: a turn could not be sampled.
        ToolsDownError: a tool fails on nearly every call.
    """
    context = current_rollout.get()
    by_name = {tool_name(tool): tool for tool in tools}
    schemas = [tool_schema(tool) for tool in tools] or None
    messages = list(prompt)
    turns: list[TurnRecord] = []
    prompt_ids = _first_prompt_ids(loop, context, prompt, schemas, list(by_name))
    while True:
        try:
            turn = await loop.generate_one_turn(prompt_ids)
        except ConversationTooLongError as error:
            if not turns:
                raise
            if loop.config.long_conversation == "end":
                context.context_full = True
                break
            raise _grown_too_long(error, len(turns), context.calls) from error
        turns.append(turn)
        outcomes = await _answer(loop, context, turn, messages, schemas, by_name)
        if not outcomes:
            break
        reply_index = len(messages) - 1 - len(outcomes)
        prompt_ids = loop.chat.next_prompt(messages, schemas, prompt_ids, turn.output_ids, reply_index)
    return Rollout(
        completion=messages[len(prompt) :],
        completion_ids=[token for turn in turns for token in turn.output_ids],
        turns=turns,
        tool_call_count=len(context.calls),
        tool_failure_count=sum(call.failed for call in context.calls),
    )


async def _answer(
    loop: AsyncRolloutLoop,
    context: RolloutContext,
    turn: TurnRecord,
    messages: list[dict[str, Any]],
    schemas: list[dict[str, Any]] | None,
    tools: dict[str, Callable[..., Any]],
) -> list[CallOutcome]:
    """Append the reply and the results of its calls to `messages`; no outcome means that the rollout has ended."""
    if not loop.tools_on:
        messages.append({"role": "assistant", "content": loop.chat.plain_text(turn.output_ids)})
        return []
    reply = loop.chat.parse(turn.prompt_ids, turn.output_ids, schemas)
    messages.append(reply.message)
    # a reply that was cut off has no end that results could follow
    if not reply.calls or turn.finish_reason == "length":
        return []
    limit = loop.config.max_tool_calling_iterations
    if limit is not None and len(context.calls_per_message) >= limit:
        context.exhausted = True
        return []
    context.calls_per_message.append(len(reply.calls))
    outcomes = []
    for call in reply.calls:
        outcome = await loop.toolbox.call(tools, call)
        outcomes.append(outcome)
        context.calls.append(outcome)
        messages.append({"role": "tool", "name": outcome.name, "content": outcome.text})
    return outcomes


def _first_prompt_ids(
    loop: AsyncRolloutLoop,
    context: RolloutContext,
    prompt: list[dict[str, Any]],
    schemas: list[dict[str, Any]] | None,
    tool_names: list[str],
) -> list[int]:
    """The first turn's prompt, rendered once for the rollouts of a group that share it."""
    shared = context.first_prompt
    if shared.ids is not None and shared.messages == prompt and shared.tool_names == tool_names:
        return shared.ids
    ids = loop.chat.render(prompt, schemas)
    if shared.ids is None:
        shared.messages, shared.tool_names, shared.ids = list(prompt), tool_names, ids
    return ids


def _grown_too_long(
    error: ConversationTooLongError, turn_index: int, calls: list[CallOutcome]
) -> ConversationTooLongError:
    longest = max(calls, key=lambda call: len(call.text))
    return ConversationTooLongError(
        f"{error.message} It is turn {turn_index + 1} of a rollout with {len(calls)} tool calls, whose longest result "
        f"is {len(longest.text)} characters of {longest.name!r}.",
        'Restart the server with a larger --max-model-len, lower max_tool_result_chars, or set long_conversation="end" '
        "to end such rollouts instead of the run.",
    )
