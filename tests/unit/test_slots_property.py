"""Random lives of a run (F166, F167): no prompt is lost, none is trained twice, whatever is killed when.

A world of worker, buffer, trainer and checkpoints is driven by hypothesis. An account that shares no code with the
SlotBook keeps what was really trained; at the end it must agree with the ledger's SQL.
"""

from __future__ import annotations

import copy
import itertools
import os
import random
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncgrpo_core.ledger import LedgerWriter, audit, counts
from asyncgrpo_core.slots import SlotBook
from asyncgrpo_core.types import GroupRecord, Slot, TrainingSample, TrainingSequence

GROUP = 3
SHARED_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
FINAL = ("zero_std", "no_reward", "filtered")


def make_sample(slot: Slot, generation: int, sample_id: str) -> TrainingSample:
    sequence = TrainingSequence(
        np.arange(4, dtype=np.int32), np.array([0, 0, 1, 1], bool), np.zeros(4, np.float32), np.full(4, 2, np.int32)
    )
    return TrainingSample(sequence, 0.5, 1.0, 0.5, slot, generation, 0, 2, "rollout", sample_id=sample_id)


@dataclass
class Account:
    """What really happened, kept without the SlotBook. Keys are (epoch, row)."""

    trained: list[tuple[tuple[int, int], str, str]] = field(default_factory=list)  # slot, group uid, sample id
    final: dict[tuple[int, int], str] = field(default_factory=dict)  # why a slot was not trained
    tries: Counter = field(default_factory=Counter)  # groups of a slot that came to nothing
    groups: dict[str, dict[str, str]] = field(default_factory=dict)  # group uid -> sample id -> how it ended

    def came_to_nothing(self, key: tuple[int, int], reason: str) -> None:
        self.tries[key] += 1
        if self.tries[key] == 3:  # the first and two repetitions
            self.final[key] = reason

    def ended(self, key: tuple[int, int], uid: str, sample_id: str, how: str) -> None:
        if how == "trained":
            self.trained.append((key, uid, sample_id))
        group = self.groups.setdefault(uid, {})
        group[sample_id] = how
        if len(group) == GROUP and "trained" not in group.values():
            final = [how for how in ("non_finite", "oversize") if how in group.values()]
            if final:
                self.final[key] = final[0]
            else:
                self.came_to_nothing(key, "stale")


@dataclass
class Checkpoint:
    state: dict[str, Any]
    pending: list[TrainingSample]
    records: list[GroupRecord]
    account: Account
    step: int


class World:
    """One run. `keep_records`: a checkpoint keeps unread records, not only samples."""

    def __init__(self, folder: Path, num_rows: int, keep_records: bool) -> None:
        self.path = folder / "ledger.sqlite"
        self.num_rows, self.keep_records = num_rows, keep_records
        self.ids = itertools.count()
        self.group_of: dict[str, str] = {}
        self.account = Account()
        self.checkpoint: Checkpoint | None = None
        self.ledger: LedgerWriter | None = None
        self.kills = 0
        self.start_trainer()

    # -- trainer ------------------------------------------------------------------------------------------------------

    def start_trainer(self) -> None:
        if self.ledger is not None:
            self.ledger.close()
        saved = self.checkpoint
        self.book = SlotBook(self.num_rows)
        self.pending: list[TrainingSample] = []
        self.step = 0
        kept: list[GroupRecord] = []
        if saved is None:
            self.account = Account()
        else:
            self.account = copy.deepcopy(saved.account)
            self.book.load_state_dict(copy.deepcopy(saved.state))
            self.pending, kept, self.step = list(saved.pending), list(saved.records), saved.step
        self.ledger = LedgerWriter(
            self.path, num_rows=self.num_rows, checkpoint_seq=self.book.ledger_seq, every_s=0.001
        )
        self.book.continue_after(self.ledger.last_seq)
        self.start_worker(kept)

    def start_worker(self, records: list[GroupRecord]) -> None:
        slots = [s.slot for s in self.pending] + [r.slot for r in records if r.slot is not None]
        ids = {s.sample_id for s in self.pending} | {s.sample_id for r in records for s in r.samples}
        start = self.book.worker_resume_state(slots, buffered_samples=ids)
        self.spool = list(records)
        self.wanted = self.book.pending_regenerations()
        self.skip = {tuple(pair) for pair in start["skip"]}
        self.next = (start["epoch"], start["position"])
        self.in_flight: list[tuple[Slot, int]] = []
        self.announced: list[tuple[Slot, int]] = []
        self.write()

    def write(self) -> None:
        assert self.ledger is not None
        self.ledger.write(self.book.drain_rows())

    def take(self) -> None:
        for record in self.spool:
            assert record.slot is not None
            key = (record.slot.epoch, record.slot.row)
            if record.outcome in FINAL:
                self.account.final[key] = record.outcome
            if record.outcome == "failed":
                self.account.came_to_nothing(key, "failed")
            samples, again = self.book.apply(record)
            self.pending.extend(samples)
            if again is not None:
                self.wanted.append(again)
        self.spool = []
        self.write()

    def train(self, number: int) -> None:
        self.step += 1
        for sample in self.pending[:number]:
            self.note(sample, "trained")
            self.book.sample_trained(sample, self.step)
        del self.pending[:number]
        self.write()

    def drop(self, number: int, reason: str) -> None:
        for sample in self.pending[:number]:
            self.note(sample, reason)
            again = self.book.sample_dropped(sample, reason)
            if again is not None:
                self.wanted.append(again)
        del self.pending[:number]
        self.write()

    def note(self, sample: TrainingSample, how: str) -> None:
        key = (sample.slot.epoch, sample.slot.row)
        self.account.ended(key, self.group_of[sample.sample_id], sample.sample_id, how)

    def save(self) -> None:
        if not self.keep_records:
            self.take()
        assert self.ledger is not None
        self.write()
        self.ledger.flush(10)
        self.checkpoint = Checkpoint(
            copy.deepcopy(self.book.state_dict()),
            list(self.pending),
            list(self.spool),
            copy.deepcopy(self.account),
            self.step,
        )

    def kill_all(self) -> None:
        self.kills += 1
        self.start_trainer()

    def kill_worker(self) -> None:
        self.take()
        self.start_worker([])

    # -- worker -------------------------------------------------------------------------------------------------------

    def dispatch(self) -> None:
        if self.wanted:
            job = self.wanted.pop(0)
        else:
            while self.next in self.skip:
                self.advance()
            epoch, position = self.next
            job = (Slot(epoch, (self.num_rows - 1 - position + epoch) % self.num_rows, position), 0)
            self.advance()
        self.in_flight.append(job)
        self.announced.append(job)

    def advance(self) -> None:
        epoch, position = self.next
        self.next = (epoch, position + 1) if position + 1 < self.num_rows else (epoch + 1, 0)

    def finish(self, which: int, outcome: str) -> None:
        if not self.in_flight:
            return
        slot, generation = self.in_flight.pop(which % len(self.in_flight))
        uid, samples = f"g{next(self.ids)}", []
        if outcome == "scored":
            for _ in range(GROUP):
                sample = make_sample(slot, generation, f"s{next(self.ids)}")
                self.group_of[sample.sample_id] = uid
                samples.append(sample)
        record = GroupRecord(outcome, slot, generation, samples=samples, dispatched=self.announced)
        self.announced = []
        self.spool.append(record)

    # -- the end ------------------------------------------------------------------------------------------------------

    def finish_epochs(self, epochs: int) -> None:
        """Go on quietly until so many passes are done."""
        for _ in range(20 * epochs * self.num_rows):
            if self.book.passes_done(epochs):
                break
            self.dispatch()
            self.finish(0, "scored")
            self.take()
            self.train(len(self.pending))
        assert self.book.passes_done(epochs), "the run never ends: a slot was lost"
        while self.in_flight:
            self.finish(0, "scored")
        self.take()
        self.train(len(self.pending))
        assert self.ledger is not None
        self.ledger.flush(10)

    def check(self, epochs: int) -> None:
        found = counts(self.path)
        assert audit(self.path) == []
        assert found["lost"] == 0
        assert found["trained_twice"] == 0
        ids = [sample_id for _, _, sample_id in self.account.trained]
        assert len(ids) == len(set(ids)), "a sample was trained twice"
        groups: dict[tuple[int, int], set[str]] = {}
        for key, uid, _ in self.account.trained:
            groups.setdefault(key, set()).add(uid)
        assert all(len(uids) == 1 for uids in groups.values()), "a slot was trained from two groups"
        for key in itertools.product(range(epochs), range(self.num_rows)):
            assert (key in groups) + (key in self.account.final) == 1, f"{key} did not end exactly once"
        assert found["trained"] == len(groups)
        why = Counter(self.account.final.values())
        assert found["filtered"] == why["filtered"]
        assert found["dropped"] == {reason: why[reason] for reason in found["dropped"]}
        assert found["prompts"] == found["trained"] + sum(found["dropped"].values()) + found["pending"]
        # what is still open lies ahead of the worker, or waits to be generated again
        open_now = [(slot.epoch, slot.position) for slot in self.book.unfinished()]
        asked = {(slot.epoch, slot.position) for slot, _ in self.wanted}
        assert found["pending"] == len(open_now)
        assert all(key >= self.next or key in asked for key in open_now)


OUTCOMES = ["scored"] * 6 + ["failed", *FINAL]


def act(world: World, rng: random.Random, kinds: list[str]) -> None:
    """One random action."""
    kind = rng.choice(kinds)
    if kind == "dispatch":
        for _ in range(rng.randint(1, 4)):
            world.dispatch()
    elif kind == "finish":
        world.finish(rng.randrange(6), rng.choice(OUTCOMES))
    elif kind == "fail":
        world.finish(rng.randrange(6), "failed")
    elif kind == "train":
        world.train(rng.randint(1, 7))
    elif kind == "stale":
        world.drop(rng.randint(1, 9), "stale")
    elif kind == "oversize":
        world.drop(1, "oversize")
    elif kind == "skip":  # a step that was not finite
        world.drop(rng.randint(1, 7), "non_finite")
    else:
        getattr(world, kind)()


# How often each thing happens, in three kinds of weather.
WEATHER = {
    "calm": {"dispatch": 6, "finish": 12, "take": 6, "train": 8, "stale": 1, "oversize": 1, "save": 2, "kill_all": 1}
    | {"skip": 1},
    "stale": {"dispatch": 4, "finish": 12, "take": 8, "train": 1, "stale": 8, "fail": 3, "save": 2, "kill_all": 1},
    "deadly": {"dispatch": 6, "finish": 10, "take": 4, "train": 6, "stale": 2, "oversize": 1, "save": 3, "kill_all": 3}
    | {"kill_worker": 2, "skip": 1},
}


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**32 - 1),
    num_actions=st.integers(40, 200),
    num_rows=st.integers(1, 9),
    keep_records=st.booleans(),
    weather=st.sampled_from(sorted(WEATHER)),
)
def test_no_slot_is_lost_or_trained_twice(seed, num_actions, num_rows, keep_records, weather):
    """F165, F166, F167: any interleaving of work, checkpoints, kills of the run and kills of the worker."""
    rng = random.Random(seed)
    kinds = [kind for kind, weight in WEATHER[weather].items() for _ in range(weight)]
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:  # sqlite's fsyncs would be most of the time
        world = World(Path(folder), num_rows, keep_records)
        try:
            for _ in range(num_actions):
                act(world, rng, kinds)
                assert all(n <= num_rows for n in world.book.epoch_progress().values())
            epochs = max(world.next[0], 1) + 1
            world.finish_epochs(epochs)
            world.check(epochs)
        finally:
            assert world.ledger is not None
            world.ledger.close()
