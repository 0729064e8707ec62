"""SlotBook: which prompt slots are over, which are not, and why. A pure state machine: no files, no clock, no threads.

    worker announces            ─► dispatched ─► scored ─► trained | dropped          (record with samples)
                                            └──────────► dropped | filtered           (zero_std, no_reward, filtered)
    all samples stale, or failed ─► regenerate ─► dispatched ─► ...                   (at most twice, then dropped)
    worker replaced or resumed   ─► kept | requeued | regenerate                      (plan_worker, worker_resume_state)

A slot ends exactly once. The unit inside it is the sample: a group's samples may be trained in different steps, so each
sample ends once, as trained or dropped, and the slot is trained when all have ended and at least one was trained.
Every transition leaves rows for the ledger (`drain_rows`). Source: design.md, 'The ledger: exactly once'.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from asyncgrpo_core.errors import CheckpointError, LedgerError
from asyncgrpo_core.ledger_schema import DROP_REASONS, LedgerRow, SampleRow, SlotRow
from asyncgrpo_core.types import GroupRecord, Slot, TrainingSample

MAX_REGENERATIONS = 2
STATE_VERSION = 1

Regeneration = tuple[Slot, int]  # the slot and the generation number that it is to be generated as

_GONE = "missing"  # a sample that was to be kept over a restart and is not there any more
_RETRIED = {"stale", _GONE}  # samples that ended like this say nothing about the prompt: try again


class Applied(NamedTuple):
    """What `SlotBook.apply` made of a record.

    Attributes:
        samples: the samples to train on. Empty for a record that must not be trained again (already seen, out of date).
        regenerate: what to ask the worker to generate again, or None.
    """

    samples: list[TrainingSample]
    regenerate: Regeneration | None


@dataclass
class _Open:
    """A slot that has not ended. `samples`: id -> None while waiting, "trained", or why it was dropped."""

    slot: Slot
    generation: int
    state: str
    samples: dict[str, str | None] = field(default_factory=dict)
    record: int = 0  # seq of the "scored" row that brought the samples
    last_step: int | None = None

    @property
    def trained(self) -> bool:
        return "trained" in self.samples.values()


@dataclass
class _Epoch:
    """Ended positions of one epoch: all below `cursor`, and those in `beyond`."""

    cursor: int = 0
    beyond: set[int] = field(default_factory=set)

    def __contains__(self, position: int) -> bool:
        return position < self.cursor or position in self.beyond

    def add(self, position: int) -> None:
        self.beyond.add(position)
        while self.cursor in self.beyond:
            self.beyond.remove(self.cursor)
            self.cursor += 1

    def __len__(self) -> int:
        return self.cursor + len(self.beyond)


class SlotBook:
    """The trainer's account of every prompt slot.

    Args:
        num_rows: length of the training dataset, None when it is not known (a stream: no epoch stop, and a resume
            starts again at the first prompt, as a new epoch).
        regenerate: generate stale and failed groups again, at most twice, before they are dropped. False = the
            reference's behaviour, dropped at once.

    Example: a group of two samples whose first is trained in step 7 and whose second is too old.

        book.apply(record).samples          -> [a, b]
        book.sample_trained(a, step=7)
        book.sample_dropped(b, "stale")     -> None, the slot has ended as trained
        ledger.write(book.drain_rows())
    """

    def __init__(self, num_rows: int | None, *, regenerate: bool = True) -> None:
        if num_rows is not None and num_rows < 1:
            raise ValueError(f"num_rows must be at least 1 or None, got {num_rows}")
        self.num_rows = num_rows
        self.regenerate = regenerate
        self._epochs: dict[int, _Epoch] = {}
        self._open: dict[tuple[int, int], _Open] = {}  # (epoch, position) -> slot that has not ended
        self._seq = 0
        self._worker = 0
        self._rows: list[LedgerRow] = []
        self.counters: dict[str, int] = dict.fromkeys(
            ("trained", "filtered", "regenerated", "samples_trained", "samples_dropped", "refused_records"), 0
        )
        self.counters.update({f"dropped_{reason}": 0 for reason in DROP_REASONS})

    # -- events ---------------------------------------------------------------------------------------------------

    def apply(self, record: GroupRecord) -> Applied:
        """Take in one record of the worker: announcements first, then the group's outcome."""
        if not self._is_from_replaced_worker(record):
            for slot, generation in record.dispatched:
                self._announce(slot, generation)
        if record.slot is None or record.outcome == "report":
            return Applied([], None)
        entry = self._announce(record.slot, record.generation)
        if entry is None or entry.state == "scored":
            self.counters["refused_records"] += 1
            return Applied([], None)
        if entry.state == "kept" and entry.samples:
            return Applied(self._take_back(entry, record), None)
        if record.outcome == "scored" and record.samples:
            self._score(entry, record)
            return Applied(list(record.samples), None)
        details = {
            "group_id": record.group_id,
            "model_version": record.model_version,
            "reward": record.reward,
            "error": record.error,
        }
        if record.outcome == "filtered":
            self._end(entry, "filtered", None, details)
            return Applied([], None)
        if record.outcome in ("failed", "scored"):  # "scored" without samples: nothing in it can be trained
            return Applied([], self._again_or_drop(entry, "failed", details))
        self._end(entry, "dropped", record.outcome, details)
        return Applied([], None)

    def sample_trained(self, sample: TrainingSample, step: int) -> None:
        """The optimizer step `step` used this sample.

        Raises:
            LedgerError: the sample has already ended or was never handed out; its training is on record all the same.
        """
        self._sample_event(sample, "trained", step=step)
        entry = self._end_sample(sample, "trained")
        entry.last_step = step
        self.counters["samples_trained"] += 1
        self._settle(entry)

    def sample_dropped(self, sample: TrainingSample, reason: str) -> Regeneration | None:
        """The trainer gave this sample up: "stale" (too many weight syncs old) or "oversize" (longer than a row).

        Returns:
            What to ask the worker to generate again: when every sample of the group ended stale.

        Raises:
            LedgerError: the sample has already ended or was never handed out.
        """
        if reason not in ("stale", "oversize"):
            raise ValueError(f"a sample is dropped as 'stale' or 'oversize', got {reason!r}")
        entry = self._end_sample(sample, reason)
        self._sample_event(sample, "dropped", reason=reason)
        self.counters["samples_dropped"] += 1
        return self._settle(entry)

    def drain_rows(self) -> list[LedgerRow]:
        """The ledger rows since the previous call, in order; hand them to `LedgerWriter.write`."""
        rows, self._rows = self._rows, []
        return rows

    # -- questions ------------------------------------------------------------------------------------------------

    @property
    def ledger_seq(self) -> int:
        """Sequence number of the newest row; a checkpoint's rows are those up to here."""
        return self._seq

    def is_waiting(self, sample: TrainingSample) -> bool:
        """Whether this sample was handed out and has neither been trained nor dropped."""
        entry = self._open.get((sample.slot.epoch, sample.slot.position))
        return entry is not None and entry.samples.get(sample.sample_id, "absent") is None

    def unfinished(self) -> list[Slot]:
        """Slots that were given out and have not ended, in prompt order."""
        return [self._open[key].slot for key in sorted(self._open)]

    def epoch_progress(self) -> dict[int, int]:
        """Epoch -> number of slots that have ended in it; trained, dropped and filtered all count."""
        return {epoch: len(ended) for epoch, ended in sorted(self._epochs.items())}

    def passes(self) -> float:
        """Passes over the dataset: ended slots / rows. 0.0 when the number of rows is not known."""
        return sum(self.epoch_progress().values()) / self.num_rows if self.num_rows else 0.0

    def passes_done(self, num_epochs: float) -> bool:
        """Whether the first `num_epochs` passes are over: every slot in them has ended.

        A fraction means the first positions of the last pass: 1.5 epochs over 10 rows = epoch 0 and 0-4 of epoch 1.
        False while the number of rows is not known.
        """
        if self.num_rows is None:
            return False
        whole = math.floor(num_epochs)
        if any(len(self._epochs.get(epoch, _Epoch())) < self.num_rows for epoch in range(whole)):
            return False
        part = math.ceil((num_epochs - whole) * self.num_rows - 1e-9)
        last = self._epochs.get(whole, _Epoch())
        return all(position in last for position in range(part))

    # -- restart of the worker, checkpoint and resume -------------------------------------------------------------

    def worker_resume_state(
        self, buffered_slots: Iterable[Slot], *, buffered_samples: Collection[str] | None = None
    ) -> dict[str, Any]:
        """Plan what a new rollout worker generates: nothing that has ended or is buffered, everything else.

        Call it once for every worker that replaces another (after a resume, or when a worker died), after the old one
        is gone. Then ask for `pending_regenerations()` through the buffer.

        Args:
            buffered_slots: slots whose record is at hand: still in the buffer, or taken from it with samples not yet
                trained. Records may be given to `apply` again afterwards: it hands out what has not ended.
            buffered_samples: ids of the samples at hand. With it, waiting samples that are not in it are given up
                (reason "missing") so that their slots can end. None = every waiting sample of those slots is at hand.

        Returns:
            {"epoch", "position", "skip"}: start there and leave out the [epoch, position] pairs in `skip`.
        """
        self._worker += 1
        kept = {(slot.epoch, slot.position): slot for slot in buffered_slots}
        for key, slot in sorted(kept.items()):
            if key not in self._open and not self._has_ended(slot):
                self._open[key] = _Open(slot, 0, "kept")
        for key in sorted(self._open):
            self._replan(self._open[key], key in kept, buffered_samples)
        return self._start_state()

    def pending_regenerations(self) -> list[Regeneration]:
        """What has been asked to be generated again and not been announced by the worker, oldest first."""
        return [
            (entry.slot, entry.generation) for _, entry in sorted(self._open.items()) if entry.state == "regenerate"
        ]

    def continue_after(self, seq: int) -> None:
        """Give the next ledger row the number `seq` + 1 (LedgerWriter.last_seq, after a resume)."""
        self._seq = max(self._seq, seq)

    def state_dict(self) -> dict[str, Any]:
        """The content of rollout_state.json (JSON types only). Rows up to `ledger_seq` belong to this state."""
        return {
            "version": STATE_VERSION,
            "num_rows": self.num_rows,
            "ledger_seq": self._seq,
            "worker": self._worker,
            "counters": dict(self.counters),
            "epochs": {
                str(epoch): {"cursor": ended.cursor, "ended_beyond": sorted(ended.beyond)}
                for epoch, ended in sorted(self._epochs.items())
            },
            "unfinished": [
                {
                    "slot": list(entry.slot),
                    "generation": entry.generation,
                    "state": entry.state,
                    "record": entry.record,
                    "last_step": entry.last_step,
                    "samples": dict(entry.samples),
                }
                for _, entry in sorted(self._open.items())
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint's `state_dict`; call `worker_resume_state` next.

        Raises:
            CheckpointError: written by another version, or for a dataset of another length.
        """
        if state.get("version") != STATE_VERSION:
            raise CheckpointError(
                f"rollout_state.json has version {state.get('version')!r}, this program reads {STATE_VERSION}.",
                "Resume with the version of asyncgrpo that wrote the checkpoint.",
            )
        if state["num_rows"] != self.num_rows:
            raise CheckpointError(
                f"The checkpoint was written for a dataset of {state['num_rows']} rows, this one has {self.num_rows}.",
                "Resume with the dataset of the run, or start a new run.",
            )
        self._seq, self._worker = state["ledger_seq"], state["worker"]
        self.counters.update(state["counters"])
        self._epochs = {
            int(epoch): _Epoch(ended["cursor"], set(ended["ended_beyond"])) for epoch, ended in state["epochs"].items()
        }
        self._open = {}
        for item in state["unfinished"]:
            slot = Slot(*item["slot"])
            self._open[slot.epoch, slot.position] = _Open(
                slot, item["generation"], item["state"], dict(item["samples"]), item["record"], item["last_step"]
            )

    # -- transitions ----------------------------------------------------------------------------------------------

    def _has_ended(self, slot: Slot) -> bool:
        return slot.epoch in self._epochs and slot.position in self._epochs[slot.epoch]

    def _is_from_replaced_worker(self, record: GroupRecord) -> bool:
        """Then what it announced besides its own group died with that worker."""
        if record.slot is None:
            return False
        entry = self._open.get((record.slot.epoch, record.slot.position))
        return entry is not None and entry.state == "kept"

    def _announce(self, slot: Slot, generation: int) -> _Open | None:
        """The open entry that this (slot, generation) belongs to; None when it is not wanted (over, or out of date)."""
        slot = Slot(*slot)
        entry = self._open.get((slot.epoch, slot.position))
        if entry is None:
            if self._has_ended(slot):
                return None
            entry = self._open[slot.epoch, slot.position] = _Open(slot, generation, "dispatched")
            self._slot_event(entry, "dispatched")
        elif entry.generation != generation:
            if entry.state != "kept" or entry.samples:
                return None
            entry.generation = generation  # kept, but its record is only read now
        elif entry.state in ("requeued", "regenerate"):
            entry.state = "dispatched"
            self._slot_event(entry, "dispatched")
        return entry

    def _score(self, entry: _Open, record: GroupRecord) -> None:
        entry.state = "scored"
        entry.samples = {sample.sample_id: None for sample in record.samples}
        if len(entry.samples) != len(record.samples):
            raise LedgerError(f"Group {record.group_id} of slot {entry.slot} has two samples with the same sample_id.")
        entry.record = self._slot_event(
            entry,
            "scored",
            group_id=record.group_id,
            model_version=record.model_version,
            reward=record.reward,
            num_samples=len(record.samples),
        )
        for sample in record.samples:
            sequence = sample.sequence
            versions = sequence.versions
            self._sample_event(
                sample,
                "generated",
                version_first=int(versions.min()) if len(versions) else sample.model_version,
                version_last=int(versions.max()) if len(versions) else sample.model_version,
                forwarded_tokens=sequence.num_tokens,
                trained_tokens=sequence.num_trained,
                reward=float(sample.reward),
                advantage=float(sample.advantage),
                rollout_id=sample.rollout_id,
            )

    def _take_back(self, entry: _Open, record: GroupRecord) -> list[TrainingSample]:
        """A group that was already known when the worker was replaced: hand out what has not ended."""
        if record.generation != entry.generation:
            self.counters["refused_records"] += 1
            return []
        entry.state = "scored"
        return [sample for sample in record.samples if entry.samples.get(sample.sample_id, "absent") is None]

    def _end_sample(self, sample: TrainingSample, how: str) -> _Open:
        if not self.is_waiting(sample):
            raise LedgerError(
                f"Sample {sample.sample_id} of {sample.slot} (generation {sample.generation}) was reported as {how} "
                "but is not waiting: it was trained or dropped before, or its record was refused.",
                "This is a bug in the trainer or the loop; train only what SlotBook.apply returned, each sample once.",
            )
        entry = self._open[sample.slot.epoch, sample.slot.position]
        entry.samples[sample.sample_id] = how
        return entry

    def _settle(self, entry: _Open) -> Regeneration | None:
        """End the slot if all its samples have."""
        if None in entry.samples.values():
            return None
        if entry.trained:
            self._end(entry, "trained", None, {"step": entry.last_step})
            return None
        if set(entry.samples.values()) <= _RETRIED:
            return self._again_or_drop(entry, "stale", {})
        self._end(entry, "dropped", "oversize", {})
        return None

    def _again_or_drop(self, entry: _Open, reason: str, details: dict[str, Any]) -> Regeneration | None:
        if not self.regenerate or entry.generation >= MAX_REGENERATIONS:
            self._end(entry, "dropped", reason, details)
            return None
        entry.generation += 1
        entry.state = "regenerate"
        entry.samples = {}
        self.counters["regenerated"] += 1
        self._slot_event(entry, "regenerate", reason=reason, **details)
        return entry.slot, entry.generation

    def _end(self, entry: _Open, state: str, reason: str | None, details: dict[str, Any]) -> None:
        slot = entry.slot
        del self._open[slot.epoch, slot.position]
        self._epochs.setdefault(slot.epoch, _Epoch()).add(slot.position)
        self.counters[state if reason is None else f"{state}_{reason}"] += 1
        self._slot_event(entry, state, reason=reason, **details)

    def _replan(self, entry: _Open, is_kept: bool, buffered_samples: Collection[str] | None) -> None:
        """Decide what a replaced worker means for one open slot."""
        gone = [
            sample_id
            for sample_id, how in entry.samples.items()
            if how is None and (not is_kept or (buffered_samples is not None and sample_id not in buffered_samples))
        ]
        for sample_id in gone:
            entry.samples[sample_id] = _GONE
            self._missing_event(entry, sample_id)
        if entry.samples and None not in entry.samples.values() and entry.trained:
            self._settle(entry)
        elif is_kept and (not entry.samples or None in entry.samples.values()):
            entry.state = "kept"
            self._slot_event(entry, "kept")
        elif self.num_rows is None:
            self._end(entry, "dropped", "failed", {"error": "a stream starts again at its first prompt"})
        else:
            # Lost with the worker, not stale: generated again under the same number.
            entry.samples = {}
            entry.state = "requeued" if entry.generation == 0 else "regenerate"
            self._slot_event(entry, entry.state)

    def _start_state(self) -> dict[str, Any]:
        if self.num_rows is None:
            seen = [*self._epochs, *(epoch for epoch, _ in self._open)]
            return {"epoch": max(seen, default=-1) + 1, "position": 0, "skip": []}
        taken = {key for key, entry in self._open.items() if entry.state != "requeued"}
        epoch, position = 0, 0
        while (epoch, position) in taken or self._has_ended(Slot(epoch, 0, position)):
            position += 1
            if position >= self.num_rows:
                epoch, position = epoch + 1, 0
        skip = set(taken)
        for number, ended in self._epochs.items():
            if number >= epoch:
                skip.update((number, p) for p in ended.beyond)
                first = position if number == epoch else 0
                skip.update((number, p) for p in range(first, ended.cursor))
        return {
            "epoch": epoch,
            "position": position,
            "skip": [list(key) for key in sorted(skip) if key > (epoch, position)],
        }

    # -- rows -----------------------------------------------------------------------------------------------------

    def _next_seq(self) -> int:
        self._seq += 1
        return self._seq

    def _slot_event(self, entry: _Open, state: str, **details: Any) -> int:
        slot, seq = entry.slot, self._next_seq()
        self._rows.append(
            SlotRow(seq, self._worker, slot.epoch, slot.row, slot.position, entry.generation, state, **details)
        )
        return seq

    def _sample_event(self, sample: TrainingSample, event: str, **details: Any) -> None:
        slot = sample.slot
        entry = self._open.get((slot.epoch, slot.position))
        record = entry.record if entry is not None else 0
        self._rows.append(
            SampleRow(
                self._next_seq(),
                sample.sample_id,
                slot.epoch,
                slot.row,
                sample.generation,
                record,
                event,
                **details,
            )
        )

    def _missing_event(self, entry: _Open, sample_id: str) -> None:
        slot = entry.slot
        self._rows.append(
            SampleRow(
                self._next_seq(),
                sample_id,
                slot.epoch,
                slot.row,
                entry.generation,
                entry.record,
                "dropped",
                "missing",
            )
        )
