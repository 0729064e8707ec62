"""Chat formats: prompts, replies and tool calls of the model families.

format.py     ChatFormat: messages -> prompt tokens, sampled tokens -> messages
parsing.py    reading replies, malformed calls included
families.py   what is known of Qwen, Llama 3, DeepSeek-V3 and GLM-4
forks.py      trial conversations: which turns go on from the tokens before
templates/    what follows the first reply, per family
"""

from asyncgrpo_core.rollout.chat.forks import ForkReport, fork_report
from asyncgrpo_core.rollout.chat.format import ChatFormat
from asyncgrpo_core.rollout.chat.parsing import ParsedReply, ToolCall

__all__ = ["ChatFormat", "ForkReport", "ParsedReply", "ToolCall", "fork_report"]
