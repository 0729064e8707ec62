"""Recognises the policy's replies when a harness sends them back, so that the next prompt shows what was sampled.

A harness keeps a conversation in its own form: content null or "", arguments with other spaces, no reasoning, other
ids. Rendered from that, the next prompt would seldom go on where the turn before ended, and every turn would be a
sample of its own. So each assistant message that equals a reply given at that place of the conversation is replaced by
the reply as it was parsed.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from asyncgrpo_core.rollout.harness.request import Message
from asyncgrpo_core.types import TurnRecord


@dataclass
class GivenReply:
    """A reply that the harness was given; `tools` is the key of the tools that it was offered with."""

    message: Message
    turn: TurnRecord
    tools: str


@dataclass
class Recalled:
    """A request's conversation with its replies restored.

    Attributes:
        messages: the conversation.
        place: key of the whole conversation, under which the next reply is remembered.
        latest: the last reply that was recognised; None when there is none.
        latest_index: its index in `messages`.
    """

    messages: list[Message]
    place: str
    latest: GivenReply | None = None
    latest_index: int = -1


class ReplyMemory:
    """The replies of one rollout, by the conversation that they answered.

    The same conversation may have been answered several times (parallel requests, a retry); the newest of equal
    answers is recalled.
    """

    def __init__(self) -> None:
        self._given: dict[tuple[str, str], GivenReply] = {}

    def recall(self, messages: list[Message]) -> Recalled:
        """Restore the replies in `messages`."""
        found = Recalled([], "")
        for message in messages:
            given = self._given.get((found.place, reply_key(message))) if message["role"] == "assistant" else None
            if given is not None:
                message = given.message
                found.latest, found.latest_index = given, len(found.messages)
            found.messages.append(message)
            found.place = _after(found.place, message)
        return found

    def remember(self, place: str, shown: Message, given: GivenReply) -> None:
        """Note that the conversation at `place` was answered; `shown` is the reply as the harness was sent it."""
        self._given[place, reply_key(shown)] = given


def reply_key(message: Message) -> str:
    """What makes two forms of an assistant message the same: its text and its calls, without reasoning and ids."""
    calls = [
        (call["function"]["name"], _object(call["function"]["arguments"])) for call in message.get("tool_calls") or []
    ]
    return json.dumps([(message.get("content") or "").strip(), calls], sort_keys=True)


def _object(arguments: object) -> object:
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def _after(place: str, message: Message) -> str:
    text = place + json.dumps(message, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
