"""Which prompt comes next: a seeded order per epoch that needs no saved state, and the rows behind it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from asyncgrpo_core.errors import ConfigError, DataError
from asyncgrpo_core.types import Slot


def check_prompt(prompt: Any, where: str) -> None:
    """Raise DataError unless `prompt` is a non-empty list of text messages with role and content.

    Args:
        where: names the row in the message, for example "row 3 of train_dataset".
    """
    where = f"The prompt in {where}"
    fix = 'Give the "prompt" column rows like [{"role": "user", "content": "What is 2+2?"}].'
    if isinstance(prompt, str):
        raise DataError(f"{where} is plain text ({_short(prompt)}), not a conversation.", fix)
    if not isinstance(prompt, list) or not prompt:
        raise DataError(f"{where} is {_short(prompt)}, not a list of messages (conversational format).", fix)
    for message in prompt:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(f"{where} holds {_short(message)}, not a message with a role.", fix)
        content = message.get("content")
        if isinstance(content, list):
            for part in content:
                if not isinstance(part, Mapping) or part.get("type") != "text":
                    raise DataError(
                        f"{where} holds a content part that is not text: {_short(part)}.",
                        "Images, audio and video are not supported; give text only.",
                    )
        elif content is not None and not isinstance(content, str):
            raise DataError(f"{where} has a message whose content is {_short(content)}, not text.", fix)
        if content is None and not message.get("tool_calls"):
            raise DataError(f"{where} holds a message without content: {_short(message)}.", fix)


def check_no_images(row: Mapping[str, Any], where: str) -> None:
    """Raise DataError when a row carries images beside its prompt (the columns that vision datasets use)."""
    for column in ("image", "images"):
        if row.get(column) is not None and row[column] != []:
            raise DataError(
                f'The column "{column}" holds an image in {where}; images are not supported.',
                f'Remove the column (dataset.remove_columns("{column}")) if the prompts make sense without it.',
            )


class PromptOrder:
    """Row order of every epoch, computed from the seed alone.

    `sampling` "random" gives a permutation seeded with (seed, epoch), "sequential" the dataset's own order.
    """

    def __init__(self, num_rows: int, seed: int, sampling: str = "random") -> None:
        if num_rows < 1:
            raise DataError("The training dataset has no rows.", "Pass a dataset with at least one prompt.")
        if sampling not in ("random", "sequential"):
            raise ConfigError(
                f"train_sampling_strategy is {sampling!r}; the rollout worker knows 'random' and 'sequential'.",
                "Set one of the two.",
            )
        self.num_rows = num_rows
        self.seed = seed
        self.sampling = sampling
        self._epoch = -1
        self._rows: np.ndarray = np.empty(0, dtype=np.int64)

    def row_at(self, epoch: int, position: int) -> int:
        """Dataset row drawn at place `position` (from 0) of epoch `epoch`."""
        if self.sampling == "sequential":
            return position
        if epoch != self._epoch:
            self._rows = np.random.default_rng([self.seed, epoch]).permutation(self.num_rows)
            self._epoch = epoch
        return int(self._rows[position])


class IndexedPrompts:
    """Endless stream of (slot, row) over a dataset with a length.

    Args:
        dataset: has __len__ and __getitem__ returning a dict with a "prompt" (datasets.Dataset or a list of dicts).
        order: the row order per epoch.
        epoch, position: where to start.
        skip: (epoch, position) pairs to leave out, those a resumed run has already ended.
    """

    def __init__(
        self, dataset: Any, order: PromptOrder, epoch: int = 0, position: int = 0, skip: Iterable = ()
    ) -> None:
        self._dataset = dataset
        self._order = order
        self._epoch = epoch + position // order.num_rows
        self._position = position % order.num_rows
        self._skip = {(int(e), int(p)) for e, p in skip}
        self.prompts_per_epoch: int | None = order.num_rows

    def __iter__(self) -> Iterator[tuple[Slot, dict[str, Any]]]:
        return self

    def __next__(self) -> tuple[Slot, dict[str, Any]]:
        while True:
            epoch, position = self._epoch, self._position
            self._position += 1
            if self._position == self._order.num_rows:
                self._epoch, self._position = epoch + 1, 0
            if (epoch, position) in self._skip:
                self._skip.discard((epoch, position))
                continue
            row_index = self._order.row_at(epoch, position)
            return Slot(epoch, row_index, position), self._dataset[row_index]

    def row(self, slot: Slot) -> dict[str, Any]:
        """The dataset row of a slot, for generating it again."""
        return self._dataset[slot.row]


class StreamedPrompts:
    """Endless stream of (slot, row) over an iterable without a length; each epoch iterates it anew.

    It cannot be repositioned: after a restart it begins with the first prompt, as epoch `epoch`. Rows of recent slots
    are kept so that they can be generated again.
    """

    def __init__(self, dataset: Iterable[dict[str, Any]], epoch: int = 0) -> None:
        self._dataset = dataset
        self._epoch = epoch
        self._position = 0
        self._rows: dict[Slot, dict[str, Any]] = {}
        self._iterator = iter(dataset)
        self.prompts_per_epoch: int | None = None

    def __iter__(self) -> Iterator[tuple[Slot, dict[str, Any]]]:
        return self

    def __next__(self) -> tuple[Slot, dict[str, Any]]:
        try:
            row = next(self._iterator)
        except StopIteration:
            if self._position == 0:
                raise DataError(
                    "The training dataset gave no rows.", "Pass a dataset with at least one prompt."
                ) from None
            self.prompts_per_epoch = self._position
            self._epoch, self._position = self._epoch + 1, 0
            self._iterator = iter(self._dataset)
            return next(self)
        slot = Slot(self._epoch, self._position, self._position)
        self._position += 1
        self._rows[slot] = row
        # a slot is generated again within a few steps or never; an endless stream must not grow memory
        while len(self._rows) > 4096:
            self._rows.pop(next(iter(self._rows)))
        return slot, row

    def row(self, slot: Slot) -> dict[str, Any]:
        """The row of a recent slot, for generating it again."""
        try:
            return self._rows[slot]
        except KeyError:
            raise DataError(
                f"Prompt {slot} of the streaming dataset is no longer at hand and cannot be generated again.",
                "Set regenerate_dropped=False or use a dataset with a length.",
            ) from None


class _NoRows:
    """Rows without columns, without end: an environment owns the data."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(dict, None)  # type: ignore[arg-type]


def open_prompts(
    dataset: Any, seed: int, sampling: str, *, start_index: int = 0, resume_state: dict | None = None
) -> IndexedPrompts | StreamedPrompts:
    """The prompt stream of a dataset.

    Args:
        dataset: None when an environment owns the data: then every row is empty and there is no epoch.
        start_index: number of prompts to pass over at the start (reference, `dataset_start_index`).
        resume_state: {"epoch", "position", "skip"}; takes the place of `start_index`.
    """
    if dataset is None:
        dataset = _NoRows()
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        # a resumed stream starts anew, in an epoch of its own: its slots are not those that have ended
        return StreamedPrompts(dataset, 0 if resume_state is None else int(resume_state["epoch"]))
    order = PromptOrder(len(dataset), seed, sampling)
    if resume_state is None:
        return IndexedPrompts(dataset, order, 0, start_index)
    return IndexedPrompts(
        dataset, order, int(resume_state["epoch"]), int(resume_state["position"]), resume_state.get("skip", ())
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
