"""The quickstart's task: add two numbers below 100 and say only the result.

A row is conversational, with the right answer beside it:

    {"prompt": [{"role": "user", "content": "What is 37 plus 85?"}], "answer": "122"}

Held-out and training prompts never share a pair of numbers, in either order: when "37 plus 85" is held out,
so is "85 plus 37". The split is fixed (it does not depend on the seeds below), and the shipped start policy
was trained on the training side of it alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from asyncgrpo_core.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

OPERANDS = 100  # both numbers are in 0..99
HELDOUT_PAIRS = 300  # unordered pairs kept away from training, of 5,050
SPLIT_SEED = 20261
Row = dict[str, Any]


def prompt_text(a: int, b: int) -> str:
    """The user's message. Example: `prompt_text(37, 85)` -> "What is 37 plus 85?"."""
    return f"What is {a} plus {b}?"


@cache
def _split() -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
    """(training pairs, held-out pairs), ordered pairs, the same in every process."""
    unordered = [(a, b) for a in range(OPERANDS) for b in range(a, OPERANDS)]
    random.Random(SPLIT_SEED).shuffle(unordered)

    def both_orders(pairs: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        return tuple(sorted({*pairs, *((b, a) for a, b in pairs)}))

    return both_orders(unordered[HELDOUT_PAIRS:]), both_orders(unordered[:HELDOUT_PAIRS])


def training_pairs() -> tuple[tuple[int, int], ...]:
    """Every (a, b) that training may see."""
    return _split()[0]


def heldout_pairs() -> tuple[tuple[int, int], ...]:
    """Every (a, b) that only evaluation sees."""
    return _split()[1]


def train_rows(n: int | None = None, seed: int = 0) -> list[Row]:
    """`n` training rows drawn without repetition (None: all of them), in an order given by `seed`.

    Raises:
        DataError: `n` is not in 1..number of training pairs.
    """
    return _rows(training_pairs(), n, seed, "train_rows")


def heldout_rows(n: int | None = 256, seed: int = 0) -> list[Row]:
    """`n` held-out rows drawn without repetition (None: all of them), in an order given by `seed`.

    Raises:
        DataError: `n` is not in 1..number of held-out pairs.
    """
    return _rows(heldout_pairs(), n, seed, "heldout_rows")


def train_dataset(n: int | None = None, seed: int = 0) -> Dataset:
    """`train_rows` as the `datasets.Dataset` that a trainer takes."""
    from datasets import Dataset  # slow to import, and not needed for the rows themselves

    return Dataset.from_list(train_rows(n, seed))


def heldout_dataset(n: int | None = 256, seed: int = 0) -> Dataset:
    """`heldout_rows` as a `datasets.Dataset`."""
    from datasets import Dataset

    return Dataset.from_list(heldout_rows(n, seed))


def exact_answer_reward(
    completions: list[list[dict[str, Any]]],
    answer: list[str],
    completion_ids: list[list[int]] | None = None,
    **kwargs: Any,
) -> list[float]:
    """1.0 when the completion is the answer, the whole answer and nothing but the answer; else 0.0.

    No stripping and no searching: an answer inside a longer text, with spaces, or with zeros before it is wrong.
    A completion of more tokens than the answer has characters, plus one that ends it, is wrong as well, so that
    tokens which do not show in the decoded text (special tokens) earn nothing.

    Args:
        completions: one conversation per rollout; the last message's content is judged.
        answer: the right answer of each rollout's row.
        completion_ids: the tokens of each completion, where the caller has them.
    """
    lengths = [len(ids) for ids in completion_ids] if completion_ids is not None else [0] * len(completions)
    return [
        float(bool(messages) and messages[-1].get("content") == right and length <= len(right) + 1)
        for messages, right, length in zip(completions, answer, lengths, strict=True)
    ]


def _rows(pairs: tuple[tuple[int, int], ...], n: int | None, seed: int, caller: str) -> list[Row]:
    n = len(pairs) if n is None else n
    if not 1 <= n <= len(pairs):
        raise DataError(f"{caller}(n={n}): there are {len(pairs)} rows.", f"Set n to 1..{len(pairs)}.")
    return [
        {"prompt": [{"role": "user", "content": prompt_text(a, b)}], "answer": str(a + b)}
        for a, b in random.Random(seed).sample(pairs, n)
    ]
