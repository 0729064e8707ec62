"""Which slot is generated next: what the trainer wants again, then the prompt stream, filtered."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from asyncgrpo_core.errors import DataError, RolloutError
from asyncgrpo_core.rollout.prompts import IndexedPrompts, StreamedPrompts, check_no_images, check_prompt
from asyncgrpo_core.types import Slot

_REGENERATIONS_EVERY_S = 0.25


class Picked(NamedTuple):
    slot: Slot
    generation: int
    row: dict[str, Any]


class PromptPicker:
    """Hands out the slots to generate.

    Args:
        prompts: the prompt stream.
        take_regenerations: the (slot, generation) pairs that the trainer asked for since the last call.
        admits: the filter hook, called once per prompt and never for a regeneration.
        needs_prompt: False when an environment may make the prompt.
    """

    def __init__(
        self,
        prompts: IndexedPrompts | StreamedPrompts,
        take_regenerations: Callable[[], list[tuple[Slot, int]]],
        admits: Callable[[int, dict[str, Any], int], bool],
        *,
        needs_prompt: bool = True,
    ) -> None:
        self._prompts = prompts
        self._take_regenerations = take_regenerations
        self._admits = admits
        self._needs_prompt = needs_prompt
        self._regenerations: deque[tuple[Slot, int]] = deque()
        self._read_at = 0.0
        self._rejected_in_a_row = 0

    def pick(self) -> tuple[Picked | None, Slot | None]:
        """(what to generate, None) or (None, the slot that the filter rejected).

        Raises:
            DataError: the row has no conversational prompt.
            RolloutError: the filter has rejected every prompt of an epoch.
        """
        self._read_regenerations()
        if self._regenerations:
            slot, generation = self._regenerations.popleft()
            return self._checked(slot, generation, self._prompts.row(slot)), None
        slot, row = next(self._prompts)
        picked = self._checked(slot, 0, row)
        if self._admits(slot.row, row, slot.epoch):
            self._rejected_in_a_row = 0
            return picked, None
        self._rejected_in_a_row += 1
        return None, slot

    def check_rejections(self) -> None:
        """Raise RolloutError when the filter has rejected a whole epoch's worth of prompts in a row."""
        per_epoch = self._prompts.prompts_per_epoch
        if per_epoch is not None and self._rejected_in_a_row >= per_epoch:
            raise RolloutError(
                f"filter_prompt rejected all {per_epoch} prompts of an epoch in a row; no batch can reach the trainer "
                "after that.",
                "Loosen filter_prompt or end the run earlier (num_train_epochs, max_steps).",
            )

    def _read_regenerations(self) -> None:
        now = time.monotonic()
        if now - self._read_at < _REGENERATIONS_EVERY_S:
            return
        self._read_at = now
        asked = self._take_regenerations()
        if asked:
            # oldest first: a long rollout that went stale must not be put off behind newer ones
            order = sorted([*self._regenerations, *asked], key=lambda item: (item[0].epoch, item[0].position))
            self._regenerations = deque(order)

    def _checked(self, slot: Slot, generation: int, row: Any) -> Picked:
        if not isinstance(row, dict) or (self._needs_prompt and "prompt" not in row):
            columns = sorted(row) if isinstance(row, dict) else type(row).__name__
            raise DataError(
                f'Dataset row {slot.row} has no "prompt" (it has {columns}).', 'Give the dataset a "prompt" column.'
            )
        if row.get("prompt") is not None or self._needs_prompt:
            check_prompt(row["prompt"], f"dataset row {slot.row}")
        check_no_images(row, f"dataset row {slot.row}")
        return Picked(slot, generation, row)
