"""Rewards for the form of a completion (DeepSeek-R1's format reward and the think-block variant)."""

from __future__ import annotations

import re
from typing import Any

from asyncgrpo_core.rewards.text import completion_text

_THINK = re.compile(r"^<think>(?!.*<think>)(.*?)</think>.*$", re.DOTALL)
_THINK_ANSWER = re.compile(r"^\s*<think>.*?</think>\s*<answer>.*?</answer>\s*$", re.DOTALL)


def think_format_reward(completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
    """1.0 where the completion begins with exactly one <think>...</think> block, else 0.0."""
    return [1.0 if _THINK.match(completion_text(completion)) else 0.0 for completion in completions]


def format_reward(completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
    """1.0 where the whole completion is <think>...</think> followed by <answer>...</answer>, else 0.0."""
    return [1.0 if _THINK_ANSWER.match(completion_text(completion)) else 0.0 for completion in completions]
