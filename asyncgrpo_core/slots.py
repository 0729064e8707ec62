"""SlotBook: which prompt slots are over, which are not, and why. A pure state machine: no files, no clock, no threads.

    worker announces            ─► dispatched ─► scored ─► trained | dropped          (record with samples)
                                            └──────────► dropped | filtered           (zero_std, no_reward, filtered)
    all samples stale, or failed ─► regenerate ─► dispatched ─► ...                   (at most twice, then dropped)
    worker replaced or resumed   ─► kept | requeued | regenerate                      (worker_resume_state)

A slot ends exactly once. The unit inside it is the sample: a group's samples may be trained in different steps, so each
sample ends once, as trained or dropped, and the slot is trained when all have ended and at least one was trained.
Every transition leaves rows for the ledger (`drain_rows`). Source: design.md, 'The ledger: exactly once'.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from asyncgrpo_core.errors import CheckpointError, LedgerError
from asyncgrpo_core.ledger_schema import DROP_REASONS, LedgerRow
from asyncgrpo_core.slot_parts import EndedSlots, OpenSlot, RowLog, facts_of, start_state
from asyncgrpo_core.types import GroupRecord, Slot, TrainingSample

MAX_REGENERATIONS = 2
STATE_VERSION = 1

Regeneration = tuple[Slot, int]  # the slot and the generation number that it is to be generated as

_GONE = "missing"  # a sample that was to be kept over a restart and is not there any more
_FINAL = ("non_finite", "oversize")  # never generated again; a slot without a trained sample gets the first that fits
_RETRIED = {"stale", _GONE}  # samples that ended like this say nothing about the prompt: try again


class Applied(NamedTuple):
    """What `SlotBook.apply` made of a record.

    Attributes:
        samples: the samples to train on. Empty for a record that must not be trained again (already seen, out of date).
        regenerate: what to ask the worker to generate again, or None.
    """

    samples: list[TrainingSample]
    regenerate: Regeneration | None


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
        self._ended = EndedSlots()
        self._open: dict[tuple[int, int], OpenSlot] = {}  # by (epoch, position)
        self._log = RowLog()
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
        entry.facts = facts_of(record)
        if record.outcome == "filtered":
            self._end(entry, "filtered")
            return Applied([], None)
        if record.outcome in ("failed", "scored"):  # "scored" without samples: nothing in it can be trained
            return Applied([], self._again_or_drop(entry, "failed"))
        self._end(entry, "dropped", record.outcome)
        return Applied([], None)

    def sample_trained(self, sample: TrainingSample, step: int) -> None:
        """The optimizer step `step` used this sample.

        Raises:
            LedgerError: the sample has already ended or was never handed out; its training is on record all the same.
        """
        entry = self._open.get(_key(sample.slot))
        self._log.sample(sample.slot, sample.generation, sample.sample_id, "trained", entry, step=step)
        entry = self._end_sample(sample, "trained")
        entry.last_step = step
        self.counters["samples_trained"] += 1
        self._settle(entry)

    def sample_dropped(self, sample: TrainingSample, reason: str) -> Regeneration | None:
        """The trainer gave this sample up: "stale" (too many weight syncs old), "oversize" (longer than a row) or
        "non_finite" (its step's loss or gradient was not, and was skipped).

        Returns:
            What to ask the worker to generate again: when every sample of the group ended stale.

        Raises:
            LedgerError: the sample has already ended or was never handed out.
        """
        if reason not in ("stale", *_FINAL):
            raise ValueError(f"a sample is dropped as 'stale', {' or '.join(map(repr, _FINAL))}, got {reason!r}")
        entry = self._end_sample(sample, reason)
        self._log.sample(sample.slot, sample.generation, sample.sample_id, "dropped", entry, reason=reason)
        self.counters["samples_dropped"] += 1
        return self._settle(entry)

    def drain_rows(self) -> list[LedgerRow]:
        """The ledger rows since the previous call, in order; hand them to `LedgerWriter.write`."""
        return self._log.drain()

    # -- questions ------------------------------------------------------------------------------------------------

    @property
    def ledger_seq(self) -> int:
        """Sequence number of the newest row; a checkpoint's rows are those up to here."""
        return self._log.seq

    def is_waiting(self, sample: TrainingSample) -> bool:
        """Whether this sample was handed out and has neither been trained nor dropped."""
        entry = self._open.get(_key(sample.slot))
        return entry is not None and entry.samples.get(sample.sample_id, "absent") is None

    def unfinished(self) -> list[Slot]:
        """Slots that were given out and have not ended, in prompt order."""
        return [self._open[key].slot for key in sorted(self._open)]

    def epoch_progress(self) -> dict[int, int]:
        """Epoch -> number of slots that have ended in it; trained, dropped and filtered all count."""
        return self._ended.per_epoch()

    def passes(self) -> float:
        """Passes over the dataset: ended slots / rows. 0.0 when the number of rows is not known."""
        return sum(self.epoch_progress().values()) / self.num_rows if self.num_rows else 0.0

    def passes_done(self, num_epochs: float) -> bool:
        """Whether the first `num_epochs` passes are over: every slot in them has ended.

        A fraction means the first positions of the last pass: 1.5 epochs over 10 rows = epoch 0 and 0-4 of epoch 1.
        False while the number of rows is not known.
        """
        return self.num_rows is not None and self._ended.cover(num_epochs, self.num_rows)

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
        self._log.worker += 1
        kept = {_key(slot): slot for slot in buffered_slots}
        for key, slot in sorted(kept.items()):
            if key not in self._open and key not in self._ended:
                self._open[key] = OpenSlot(slot, 0, "kept")
        for key in sorted(self._open):
            self._replan(self._open[key], key in kept, buffered_samples)
        return start_state(self._open, self._ended, self.num_rows)

    def pending_regenerations(self) -> list[Regeneration]:
        """What has been asked to be generated again and not been announced by the worker, oldest first."""
        return [
            (entry.slot, entry.generation) for _, entry in sorted(self._open.items()) if entry.state == "regenerate"
        ]

    def continue_after(self, seq: int) -> None:
        """Give the next ledger row the number `seq` + 1 (LedgerWriter.last_seq, after a resume)."""
        self._log.seq = max(self._log.seq, seq)

    def state_dict(self) -> dict[str, Any]:
        """The content of rollout_state.json (JSON types only). Rows up to `ledger_seq` belong to this state."""
        return {
            "version": STATE_VERSION,
            "num_rows": self.num_rows,
            "ledger_seq": self._log.seq,
            "worker": self._log.worker,
            "counters": dict(self.counters),
            "epochs": self._ended.state_dict(),
            "unfinished": [entry.state_dict() for _, entry in sorted(self._open.items())],
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
        self._log.seq, self._log.worker = state["ledger_seq"], state["worker"]
        self.counters.update(state["counters"])
        self._ended.load_state_dict(state["epochs"])
        entries = [OpenSlot.from_state(item) for item in state["unfinished"]]
        self._open = {_key(entry.slot): entry for entry in entries}

    # -- transitions ----------------------------------------------------------------------------------------------

    def _is_from_replaced_worker(self, record: GroupRecord) -> bool:
        """Then what it announced besides its own group died with that worker."""
        if record.slot is None:
            return False
        entry = self._open.get(_key(record.slot))
        return entry is not None and entry.state == "kept"

    def _announce(self, slot: Slot, generation: int) -> OpenSlot | None:
        """The open entry that this (slot, generation) belongs to; None when it is not wanted (over, or out of date)."""
        slot = Slot(*slot)
        entry = self._open.get(_key(slot))
        if entry is None:
            if _key(slot) in self._ended:
                return None
            entry = self._open[_key(slot)] = OpenSlot(slot, generation, "dispatched")
            self._log.slot(entry, "dispatched")
        elif entry.generation != generation:
            return None
        elif entry.state in ("requeued", "regenerate"):
            entry.state = "dispatched"
            self._log.slot(entry, "dispatched")
        return entry

    def _score(self, entry: OpenSlot, record: GroupRecord) -> None:
        entry.state = "scored"
        entry.samples = {sample.sample_id: None for sample in record.samples}
        if len(entry.samples) != len(record.samples):
            raise LedgerError(f"Group {record.group_id} of slot {entry.slot} has two samples with the same sample_id.")
        entry.facts = facts_of(record)
        entry.record = self._log.slot(entry, "scored")
        for sample in record.samples:
            self._log.generated(sample, entry)

    def _take_back(self, entry: OpenSlot, record: GroupRecord) -> list[TrainingSample]:
        """A group that was already known when the worker was replaced: hand out what has not ended."""
        if record.generation != entry.generation:
            self.counters["refused_records"] += 1
            return []
        entry.state = "scored"
        return [sample for sample in record.samples if entry.samples.get(sample.sample_id, "absent") is None]

    def _end_sample(self, sample: TrainingSample, how: str) -> OpenSlot:
        if not self.is_waiting(sample):
            raise LedgerError(
                f"Sample {sample.sample_id} of {sample.slot} (generation {sample.generation}) was reported as {how} "
                "but is not waiting: it was trained or dropped before, or its record was refused.",
                "This is a bug in the trainer or the loop; train only what SlotBook.apply returned, each sample once.",
            )
        entry = self._open[_key(sample.slot)]
        entry.samples[sample.sample_id] = how
        return entry

    def _settle(self, entry: OpenSlot) -> Regeneration | None:
        """End the slot if all its samples have."""
        if entry.is_waiting:
            return None
        if entry.has_trained:
            self._end(entry, "trained", step=entry.last_step)
            return None
        if set(entry.samples.values()) <= _RETRIED:
            return self._again_or_drop(entry, "stale")
        self._end(entry, "dropped", next(reason for reason in _FINAL if reason in entry.samples.values()))
        return None

    def _again_or_drop(self, entry: OpenSlot, reason: str) -> Regeneration | None:
        if not self.regenerate or entry.generation >= MAX_REGENERATIONS:
            self._end(entry, "dropped", reason)
            return None
        entry.generation += 1
        entry.state = "regenerate"
        self.counters["regenerated"] += 1
        self._log.slot(entry, "regenerate", reason=reason)
        entry.samples, entry.facts = {}, {}
        return entry.slot, entry.generation

    def _end(self, entry: OpenSlot, state: str, reason: str | None = None, **details: Any) -> None:
        del self._open[_key(entry.slot)]
        self._ended.add(entry.slot)
        self.counters[state if reason is None else f"{state}_{reason}"] += 1
        self._log.slot(entry, state, reason=reason, **details)

    def _replan(self, entry: OpenSlot, is_kept: bool, buffered_samples: Collection[str] | None) -> None:
        """Decide what a replaced worker means for one open slot."""
        gone = [
            sample_id
            for sample_id, how in entry.samples.items()
            if how is None and (not is_kept or (buffered_samples is not None and sample_id not in buffered_samples))
        ]
        for sample_id in gone:
            entry.samples[sample_id] = _GONE
            self._log.sample(entry.slot, entry.generation, sample_id, "dropped", entry, reason=_GONE)
        if entry.samples and not entry.is_waiting and entry.has_trained:
            self._settle(entry)
        elif is_kept and (not entry.samples or entry.is_waiting):
            entry.state = "kept"
            self._log.slot(entry, "kept")
        elif self.num_rows is None:
            self._end(entry, "dropped", "failed", error="a stream starts again at its first prompt")
        else:
            # Lost with the worker, not stale: generated again under the same number.
            entry.samples, entry.facts = {}, {}
            entry.state = "requeued" if entry.generation == 0 else "regenerate"
            self._log.slot(entry, entry.state)


def _key(slot: Slot) -> tuple[int, int]:
    return slot.epoch, slot.position
