"""What the transformers loop gets in place of a data loader: rows come from a live rollout worker."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any


class LiveBatches:
    """Stands where the Trainer wants a data loader; rows come through `get_batch_samples`. Has no length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def no_collator(rows: list[Any]) -> dict[str, Any]:
    raise AssertionError("rows are packed by get_batch_samples; nothing is collated")


def initial_training_values(args: Any, num_rows: int | None) -> tuple[int, int, int, int, int, int, int]:
    """The seven numbers of `Trainer.set_initial_training_values`.

    Steps are unknown beforehand: `max_steps` when set, else a ceiling that the stop at the epochs' end never reaches.
    """
    max_steps = args.max_steps
    if max_steps <= 0:
        # Every kept group gives at least one sample and every step trains at least one sample.
        max_steps = int(args.num_train_epochs * (num_rows or 1) + 1) * args.num_generations * 100
    accumulation = args.gradient_accumulation_steps
    examples = max_steps * accumulation
    return sys.maxsize, max_steps, examples, examples, accumulation, examples, max_steps
