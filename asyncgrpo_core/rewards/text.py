"""What text of a conversation a reward function looks at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]


def completion_text(completion: Sequence[Message]) -> str:
    """The content of the last assistant message; "" when there is none or it has no text.

    With tools a completion is several messages, and the first, which calls a tool, often has no text: the answer is in
    the last. A message without a role counts as the assistant's.
    """
    for message in reversed(completion):
        if message.get("role", "assistant") == "assistant":
            return message_text(message)
    return ""


def message_text(message: Message) -> str:
    """The text of a message whose content is a string, None, or a list of parts ({"type": "text", "text": ...})."""
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content if isinstance(part, dict))
