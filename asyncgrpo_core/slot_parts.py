"""The parts that SlotBook is made of: open slots, ended positions, rows for the ledger."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from asyncgrpo_core.ledger_schema import LedgerRow, SampleRow, SlotRow
from asyncgrpo_core.types import GroupRecord, Slot, TrainingSample


@dataclass
class OpenSlot:
    """A slot that has not ended. `samples`: id -> None while waiting, "trained", or why it was dropped."""

    slot: Slot
    generation: int
    state: str  # one of ledger_schema.OPEN_STATES
    samples: dict[str, str | None] = field(default_factory=dict)
    record: int = 0  # seq of the "scored" row that brought the samples
    last_step: int | None = None
    facts: dict[str, Any] = field(default_factory=dict)  # of the present group, repeated in each of its ledger rows

    @property
    def has_trained(self) -> bool:
        return "trained" in self.samples.values()

    @property
    def is_waiting(self) -> bool:
        """Whether a sample of it has not ended."""
        return None in self.samples.values()

    def state_dict(self) -> dict[str, Any]:
        return {**vars(self), "slot": list(self.slot), "samples": dict(self.samples)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> OpenSlot:
        return cls(**{**state, "slot": Slot(*state["slot"]), "samples": dict(state["samples"])})


@dataclass
class _Epoch:
    """Ended positions of one epoch: all below `cursor`, and those in `beyond`."""

    cursor: int = 0
    beyond: set[int] = field(default_factory=set)

    def __contains__(self, position: int) -> bool:
        return position < self.cursor or position in self.beyond

    def __len__(self) -> int:
        return self.cursor + len(self.beyond)

    def add(self, position: int) -> None:
        self.beyond.add(position)
        while self.cursor in self.beyond:
            self.beyond.remove(self.cursor)
            self.cursor += 1


class EndedSlots:
    """Which positions have ended, as one cursor per epoch plus exceptions: small, and exact.

    A cursor alone would be pinned by one stale group, or skip it.
    """

    def __init__(self) -> None:
        self._epochs: dict[int, _Epoch] = {}

    def add(self, slot: Slot) -> None:
        self._epochs.setdefault(slot.epoch, _Epoch()).add(slot.position)

    def __contains__(self, key: tuple[int, int]) -> bool:
        epoch, position = key
        return epoch in self._epochs and position in self._epochs[epoch]

    def per_epoch(self) -> dict[int, int]:
        """Epoch -> number of ended positions."""
        return {epoch: len(ended) for epoch, ended in sorted(self._epochs.items())}

    def cover(self, num_epochs: float, num_rows: int) -> bool:
        """Whether all of the first `num_epochs` passes have ended; a fraction means the first positions of the last."""
        whole = math.floor(num_epochs)
        counts = self.per_epoch()
        if any(counts.get(epoch, 0) < num_rows for epoch in range(whole)):
            return False
        part = math.ceil((num_epochs - whole) * num_rows - 1e-9)
        return all((whole, position) in self for position in range(part))

    def after(self, epoch: int, position: int) -> Iterator[tuple[int, int]]:
        """Ended (epoch, position) pairs that come after the given one."""
        for number, ended in self._epochs.items():
            if number >= epoch:
                first = position + 1 if number == epoch else 0
                yield from ((number, p) for p in range(first, ended.cursor))
                yield from ((number, p) for p in ended.beyond if p >= first)

    def state_dict(self) -> dict[str, Any]:
        return {
            str(epoch): {"cursor": ended.cursor, "ended_beyond": sorted(ended.beyond)}
            for epoch, ended in sorted(self._epochs.items())
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._epochs = {
            int(epoch): _Epoch(ended["cursor"], set(ended["ended_beyond"])) for epoch, ended in state.items()
        }


class RowLog:
    """Ledger rows in the making: numbers them and holds them until they are drained."""

    def __init__(self) -> None:
        self.seq = 0
        self.worker = 0
        self._rows: list[LedgerRow] = []

    def drain(self) -> list[LedgerRow]:
        rows, self._rows = self._rows, []
        return rows

    def slot(self, entry: OpenSlot, state: str, **details: Any) -> int:
        """Something happened to a slot; returns the row's number."""
        self.seq += 1
        slot, facts = entry.slot, {**entry.facts, **details}
        self._rows.append(
            SlotRow(self.seq, self.worker, slot.epoch, slot.row, slot.position, entry.generation, state, **facts)
        )
        return self.seq

    def sample(
        self, slot: Slot, generation: int, sample_id: str, event: str, entry: OpenSlot | None, **details: Any
    ) -> None:
        """Something happened to a sample of `slot`."""
        self.seq += 1
        record = entry.record if entry is not None else 0
        self._rows.append(SampleRow(self.seq, sample_id, slot.epoch, slot.row, generation, record, event, **details))

    def generated(self, sample: TrainingSample, entry: OpenSlot) -> None:
        """A sample came out of the rollout worker, with what is known of it."""
        sequence = sample.sequence
        versions = sequence.versions if len(sequence.versions) else np.array([sample.model_version])
        self.sample(
            sample.slot,
            sample.generation,
            sample.sample_id,
            "generated",
            entry,
            version_first=int(versions.min()),
            version_last=int(versions.max()),
            forwarded_tokens=sequence.num_tokens,
            trained_tokens=sequence.num_trained,
            reward=float(sample.reward),
            advantage=float(sample.advantage),
            rollout_id=sample.rollout_id,
        )


def facts_of(record: GroupRecord) -> dict[str, Any]:
    """What a ledger row says about a group, whatever became of it."""
    return {
        "group_id": record.group_id,
        "model_version": record.model_version,
        "reward": record.reward,
        "num_samples": len(record.samples),
        "error": record.error,
    }


def start_state(
    open_slots: Mapping[tuple[int, int], OpenSlot], ended: EndedSlots, num_rows: int | None
) -> dict[str, Any]:
    """Where a new rollout worker starts and what it leaves out: what has ended, is kept or asked for by itself."""
    if num_rows is None:
        seen = [*ended.per_epoch(), *(epoch for epoch, _ in open_slots)]
        return {"epoch": max(seen, default=-1) + 1, "position": 0, "skip": []}
    taken = {key for key, entry in open_slots.items() if entry.state != "requeued"}
    epoch, position = 0, 0
    while (epoch, position) in taken or (epoch, position) in ended:
        position += 1
        if position >= num_rows:
            epoch, position = epoch + 1, 0
    skip = {key for key in taken if key > (epoch, position)}
    skip.update(ended.after(epoch, position))
    return {"epoch": epoch, "position": position, "skip": [list(key) for key in sorted(skip)]}
