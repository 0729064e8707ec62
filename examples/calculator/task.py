"""The calculator example's task: multiply two numbers of three digits (320 to 999), with a tool that can.

A row is conversational, with the right answer beside it:

    {"prompt": [{"role": "user", "content": "What is 417 times 663?"}], "answer": "276471"}

The start policy has never been shown a product it could learn multiplication from (its guesses are random numbers of
a likely length), so the way to a reward is to call `calculate` and to repeat its result. Held-out and training
prompts never share a pair of numbers, in either order. The split is fixed, and the shipped start policy was trained
on the training side of it alone.
"""

from __future__ import annotations

import ast
import operator
import random
from collections.abc import Callable
from functools import cache
from typing import Any

from asyncgrpo_core.errors import DataError

LOWEST, HIGHEST = 320, 999  # both numbers of a question; every product has six digits
HELDOUT_PAIRS = 600  # unordered pairs kept away from training, of 231,540
SPLIT_SEED = 20262
LONGEST_EXPRESSION = 100  # characters; bounds the size of a result and the depth of the parse tree

Row = dict[str, Any]
Pair = tuple[int, int]

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_SIGNS: dict[type[ast.unaryop], Callable[[int], int]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


# -- the tool --------------------------------------------------------------------------------------------------


def calculate(expression: str) -> str:
    """Work out an arithmetic expression of integers.

    Args:
        expression: Integers with + - * // % and parentheses.

    Returns:
        The result, an integer in digits.

    Raises:
        ValueError: the text is no such expression; says what is wrong with it.
    """
    if len(expression) > LONGEST_EXPRESSION:
        raise ValueError(f"The expression is longer than {LONGEST_EXPRESSION} characters.")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"{expression!r} is not an arithmetic expression.") from None
    try:
        return str(_value(tree.body))
    except ZeroDivisionError:
        raise ValueError(f"{expression!r} divides by zero.") from None


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:  # a bool is an int too, and no number here
        return node.value
    if isinstance(node, ast.BinOp) and (binary := _OPERATORS.get(type(node.op))):
        return binary(_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and (unary := _SIGNS.get(type(node.op))):
        return unary(_value(node.operand))
    raise ValueError(f"{ast.unparse(node)!r} is not allowed: only integers with + - * // % and parentheses are.")


# -- rows ------------------------------------------------------------------------------------------------------


def prompt_text(a: int, b: int) -> str:
    """The user's message. Example: `prompt_text(417, 663)` -> "What is 417 times 663?"."""
    return f"What is {a} times {b}?"


@cache
def heldout_pairs() -> tuple[Pair, ...]:
    """Every (a, b) that only evaluation sees, in both orders; the same in every process."""
    rng = random.Random(SPLIT_SEED)
    unordered: set[Pair] = set()
    while len(unordered) < HELDOUT_PAIRS:
        a, b = _any_pair(rng)
        unordered.add((min(a, b), max(a, b)))
    return tuple(sorted({*unordered, *((b, a) for a, b in unordered)}))


@cache
def _heldout_set() -> frozenset[Pair]:
    return frozenset(heldout_pairs())


def draw_training_pair(rng: random.Random) -> Pair:
    """A random (a, b) that training may see."""
    while (pair := _any_pair(rng)) in _heldout_set():
        pass
    return pair


def train_rows(n: int = 8192, seed: int = 0) -> list[Row]:
    """`n` different training rows, in an order given by `seed`.

    Raises:
        DataError: `n` is not in 1..100,000.
    """
    if not 1 <= n <= 100_000:
        raise DataError(f"train_rows(n={n}) makes no list of rows.", "Set n to 1..100000.")
    rng = random.Random(seed)
    pairs: dict[Pair, None] = {}  # a set that keeps the order
    while len(pairs) < n:
        pairs[draw_training_pair(rng)] = None
    return [_row(*pair) for pair in pairs]


def heldout_rows(n: int = 256, seed: int = 0) -> list[Row]:
    """`n` different held-out rows, in an order given by `seed`.

    Raises:
        DataError: `n` is not in 1..number of held-out pairs.
    """
    pairs = heldout_pairs()
    if not 1 <= n <= len(pairs):
        raise DataError(f"heldout_rows(n={n}): there are {len(pairs)} rows.", f"Set n to 1..{len(pairs)}.")
    return [_row(*pair) for pair in random.Random(seed).sample(pairs, n)]


def _any_pair(rng: random.Random) -> Pair:
    return rng.randint(LOWEST, HIGHEST), rng.randint(LOWEST, HIGHEST)


def _row(a: int, b: int) -> Row:
    return {"prompt": [{"role": "user", "content": prompt_text(a, b)}], "answer": str(a * b)}


# -- the reward ------------------------------------------------------------------------------------------------


def tool_answer_reward(completions: list[list[dict[str, Any]]], answer: list[str], **kwargs: Any) -> list[float]:
    """1.0 when a tool has answered and the last message is the right answer and nothing but it; else 0.0.

    No stripping and no searching: an answer inside a longer text, with spaces, or with zeros before it is wrong.
    A right number without a tool's answer before it was guessed, and earns nothing.

    Args:
        completions: one conversation per rollout: assistant messages with their calls, tool messages, and last the
            assistant's answer.
        answer: the right answer of each rollout's row.
    """
    return [float(_is_right(messages, right)) for messages, right in zip(completions, answer, strict=True)]


def _is_right(messages: list[dict[str, Any]], right: str) -> bool:
    if not any(message.get("role") == "tool" for message in messages):
        return False
    last = messages[-1]
    return last.get("role") == "assistant" and not last.get("tool_calls") and last.get("content") == right
