"""Ready-made reward functions, with the names and signatures of `trl.rewards`.

Each takes `completions` in conversational form (a list of message lists) plus the dataset's columns as keyword
arguments and returns one float, or None where it does not apply, per completion. The text that is scored is the
content of the completion's first message. Sources: TRL's documentation of `trl.rewards`; DeepSeek-R1 (format reward);
DAPO, arXiv 2503.14476, equation 13 (soft overlong punishment).
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable
from typing import Any

from asyncgrpo_core.errors import ConfigError

__all__ = [
    "accuracy_reward",
    "format_reward",
    "get_soft_overlong_punishment",
    "reasoning_accuracy_reward",
    "think_format_reward",
]

_THINK = re.compile(r"^<think>(?!.*<think>)(.*?)</think>.*$", re.DOTALL)
_THINK_ANSWER = re.compile(r"^\s*<think>.*?</think>\s*<answer>.*?</answer>\s*$", re.DOTALL)


def accuracy_reward(completions: list[list[dict[str, str]]], solution: list[str], **kwargs: Any) -> list[float | None]:
    """1.0 where the completion's mathematical answer equals `solution` (math-verify), else 0.0.

    The answer must be LaTeX: \\boxed{...} first, else an expression that the text introduces as the answer.

    Args:
        completions: conversational completions.
        solution: the dataset column of that name: the right answer as text or LaTeX.

    Returns:
        One value per completion; None where no answer can be parsed from `solution`.
    """
    contents = [completion[0]["content"] for completion in completions]
    return [_verify(content, sol) for content, sol in zip(contents, solution, strict=True)]


def reasoning_accuracy_reward(
    completions: list[list[dict[str, str]]],
    solution: list[str],
    reasoning_delimiters: list[str] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """`accuracy_reward` on the text after the reasoning.

    Args:
        completions: conversational completions.
        solution: the right answers.
        reasoning_delimiters: strings that end the reasoning, tried in order; default ["</think>"].

    Returns:
        One value per completion; 0.0 where no delimiter is found, None where `solution` cannot be parsed.
    """
    delimiters = ["</think>"] if reasoning_delimiters is None else reasoning_delimiters
    rewards: list[float | None] = []
    for completion, sol in zip(completions, solution, strict=True):
        content = completion[0]["content"]
        found = next((delimiter for delimiter in delimiters if delimiter in content), None)
        rewards.append(0.0 if found is None else _verify(content.split(found)[-1], sol))
    return rewards


def think_format_reward(completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
    """1.0 where the completion begins with exactly one <think>...</think> block, else 0.0."""
    return [1.0 if _THINK.match(completion[0]["content"]) else 0.0 for completion in completions]


def format_reward(completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
    """1.0 where the whole completion is <think>...</think> followed by <answer>...</answer>, else 0.0."""
    return [1.0 if _THINK_ANSWER.match(completion[0]["content"]) else 0.0 for completion in completions]


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> Callable[..., list[float]]:
    """A reward function that punishes long completions softly (DAPO, equation 13). The result can be pickled.

    0 up to max_completion_len - soft_punish_cache tokens, then falling linearly to -1 at max_completion_len, -1 above.
    """
    if not 0 < soft_punish_cache <= max_completion_len:
        raise ConfigError(
            f"soft_punish_cache is {soft_punish_cache} and max_completion_len {max_completion_len}.",
            "Choose 0 < soft_punish_cache <= max_completion_len.",
        )
    return functools.partial(
        soft_overlong_punishment, max_completion_len=max_completion_len, soft_punish_cache=soft_punish_cache
    )


def soft_overlong_punishment(
    completion_ids: list[list[int]], *, max_completion_len: int, soft_punish_cache: int, **kwargs: Any
) -> list[float]:
    """See `get_soft_overlong_punishment`."""
    free = max_completion_len - soft_punish_cache
    return [max(-1.0, min(0.0, (free - len(ids)) / soft_punish_cache)) for ids in completion_ids]


def _verify(content: str, solution: str) -> float | None:
    math_verify, gold_config, answer_config = _math_verify()
    # math-verify's own time limits use signals, which only work in a main thread; rewards run in threads
    gold = math_verify.parse(solution, extraction_config=gold_config, parsing_timeout=None)
    if not gold:
        return None
    answer = math_verify.parse(
        content, extraction_config=answer_config, extraction_mode="first_match", parsing_timeout=None
    )
    return float(math_verify.verify(gold, answer, timeout_seconds=None))


@functools.cache
def _math_verify() -> tuple[Any, list[Any], list[Any]]:
    try:
        import math_verify
        from latex2sympy2_extended import NormalizationConfig
    except ImportError as error:
        raise ConfigError(
            f"accuracy_reward needs math-verify, which cannot be imported: {error}.", "pip install math-verify."
        ) from error
    # every call says that its time limit is off, which is meant
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
    gold = [math_verify.LatexExtractionConfig(), math_verify.ExprExtractionConfig()]
    answer = [
        math_verify.LatexExtractionConfig(
            normalization_config=NormalizationConfig(units=True),
            # a \\boxed answer comes first; other LaTeX only counts when it is written as the answer
            boxed_match_priority=0,
            try_extract_without_anchor=False,
        )
    ]
    return math_verify, gold, answer
