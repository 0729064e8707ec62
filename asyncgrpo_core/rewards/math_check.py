"""Compares a mathematical answer with the solution, by math-verify. Runs inside a verifier process (verifiers.py)."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

# math-verify's own time limits use signals that run Python code, which a long operation on huge integers never
# reaches; the owner's deadline does the work, and every call would log that its limit is off.
for _name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_name).setLevel(logging.ERROR)


def check(request: list[str], stage: Callable[[str], None]) -> float | None:
    """Score [completion text, solution] -> 1.0 equal, 0.0 not, None when no answer can be parsed from the solution.

    Stages: "answer" once the solution is parsed.
    """
    content, solution = request
    gold = _gold(solution)
    stage("answer")
    if not gold:
        return None
    math_verify, _, answer_config = _math_verify()
    answer = math_verify.parse(
        content, extraction_config=answer_config, extraction_mode="first_match", parsing_timeout=None
    )
    return float(math_verify.verify(list(gold), answer, timeout_seconds=None))


@functools.lru_cache(maxsize=256)
def _gold(solution: str) -> tuple[Any, ...]:
    """A group has one solution for all of its completions."""
    math_verify, gold_config, _ = _math_verify()
    return tuple(math_verify.parse(solution, extraction_config=gold_config, parsing_timeout=None))


@functools.cache
def _math_verify() -> tuple[Any, list[Any], list[Any]]:
    import math_verify
    from latex2sympy2_extended import NormalizationConfig

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


def load() -> None:
    """Import what `check` needs and warm its caches.

    Raises:
        ImportError: math-verify is not installed.
    """
    math_verify, gold, answer = _math_verify()
    math_verify.verify(
        math_verify.parse("$1$", extraction_config=gold, parsing_timeout=None),
        math_verify.parse(r"\boxed{\frac{1}{2}}", extraction_config=answer, parsing_timeout=None),
        timeout_seconds=None,
    )
