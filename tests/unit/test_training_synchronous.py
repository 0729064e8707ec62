"""Who generates when: synchronous steps, and asynchronous ones with max_staleness=0 (F017, F019, F107).

The source, its allowance, the buffer and the worker's admission are the real ones; the worker's groups are played, one
turn per poll of the waiting trainer, so that nothing depends on time.
"""

from __future__ import annotations

import dataclasses
import random
import time
from types import SimpleNamespace

import pytest

from asyncgrpo_core.errors import RolloutError
from asyncgrpo_core.ledger import LedgerWriter
from asyncgrpo_core.ledger_counts import audit, counts
from asyncgrpo_core.metrics import MetricWindow
from asyncgrpo_core.rollout.admission import BUSY, TokenAdmission
from asyncgrpo_core.rollout.buffer import SampleBuffer
from asyncgrpo_core.slots import SlotBook
from asyncgrpo_core.training import source as module
from asyncgrpo_core.training.source import SampleSource, TokenAllowance
from asyncgrpo_core.types import GroupRecord, Slot
from tests.unit.fakes import FakeVLLM
from tests.unit.rollout_run import loop_run
from tests.unit.samples import make_sample

GROUP = 4


class PlayedWorker:
    """Starts groups as the real worker does, and ends one of them per turn, in random order."""

    def __init__(self, buffer, allowance, rng, *, shares_prompt=False):
        self.buffer, self.rng, self.shares_prompt = buffer, rng, shares_prompt
        self.admission = TokenAdmission(allowance)
        self.allowance, self.idle_at, self.version = allowance, BUSY, 0
        self.dispatched = []  # since the last record
        self.running, self.again, self.next, self.group_id, self.turns = [], [], 0, 0, 0

    def turn(self):
        self.turns += 1
        assert self.turns < 20_000, "the trainer waits for ever"
        self.again += self.buffer.take_regenerations()
        while True:
            self.admission.allowance = self.allowance
            self.idle_at = self.allowance if self.admission.is_idle else BUSY
            if not self.admission.may_start() or len(self.running) >= 8:
                break
            self.start()
        if self.running:
            self.end(self.running.pop(self.rng.randrange(len(self.running))))

    def start(self):
        if self.again:
            slot, generation = self.again.pop(0)
        else:
            slot, generation = Slot(0, self.next, self.next), 0
            self.next += 1
        self.running.append((slot, generation, self.group_id, self.version))
        self.dispatched.append((slot, generation))
        self.group_id += 1
        self.admission.group_started()

    def end(self, group):
        slot, generation, group_id, version = group
        outcome = "zero_std" if self.rng.random() < 0.2 else "scored"
        samples = [self.sample(group, i) for i in range(GROUP if outcome == "scored" else 0)]
        self.admission.group_generated(40)
        self.admission.group_ended(sum(sample.sequence.num_tokens for sample in samples))
        announced, self.dispatched = self.dispatched, []
        self.buffer.put(GroupRecord(outcome, slot, generation, group_id, version, samples, 0.5, dispatched=announced))

    def sample(self, group, rollout):
        slot, generation, group_id, version = group
        made = make_sample(
            slot.position, prompt_tokens=6, completion_tokens=self.rng.randint(1, 8), version=version,
            generation=generation, rollout=rollout,
        )  # fmt: skip
        if self.shares_prompt:
            made.sequence.token_ids[:] += 100 * rollout + 10_000
            made.sequence.token_ids[:6] = slot.position + 1
        return dataclasses.replace(made, group_id=group_id)

    def check(self):
        return None

    def in_flight(self):
        return len(self.running)

    def is_idle(self):
        return self.idle_at == self.allowance

    def set_allowance(self, tokens):
        self.allowance = tokens


@pytest.fixture
def rig(tmp_path, monkeypatch):
    made = []

    def make(*, synchronous, max_staleness, token_budget=60, num_microbatches=1, seed=0, **played):
        buffer, book = SampleBuffer(tmp_path / "buffer"), SlotBook(num_rows=100_000)
        ledger = LedgerWriter(tmp_path / "ledger.sqlite", num_rows=100_000)
        allowance = TokenAllowance(
            max_staleness=0 if synchronous else max_staleness, step_tokens=token_budget * num_microbatches
        )
        worker = PlayedWorker(buffer, 0 if synchronous else allowance.value, random.Random(seed), **played)
        source = SampleSource(
            buffer=buffer,
            book=book,
            ledger=ledger,
            window=MetricWindow(),
            worker=worker,
            allowance=allowance,
            token_budget=token_budget,
            max_staleness=max_staleness,
            version=lambda: worker.version,
            should_stop=lambda: False,
            synchronous=synchronous,
        )
        source.publish_allowance()
        # of this module alone: another thread that sleeps must not play the worker too
        clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: worker.turn())
        monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(module, "_STARVED_AFTER_S", 0.0)
        made.append(ledger)
        return source, worker

    yield make
    for ledger in made:
        ledger.close()


def check_books(source):
    source.ledger.flush()
    assert audit(source.ledger.path) == []
    found = counts(source.ledger.path)
    assert found["lost"] == found["trained_twice"] == 0
    return found


def samples_of(step):
    return [sample for microbatch in step for sample in microbatch.samples]


@pytest.mark.parametrize("shares_prompt", [False, True])
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_f019_max_staleness_0_trains_only_fresh_samples_and_goes_on(rig, num_microbatches, shares_prompt):
    """The worker may be one step ahead; what it made meanwhile is dropped at the sync, and made again."""
    source, worker = rig(
        synchronous=False, max_staleness=0, num_microbatches=num_microbatches, shares_prompt=shares_prompt
    )
    for number in range(1, 31):
        step = source.next_step(num_microbatches)
        assert {sample.model_version for sample in samples_of(step)} == {worker.version}
        for _ in range(4):  # while the trainer computes
            worker.turn()
        source.finish_step(step, number)
        worker.version += 1
    found = check_books(source)
    assert found["trained"] > 30
    assert source.window.reduce()["sample/dropped_stale_count"] > 30


@pytest.mark.parametrize("shares_prompt", [False, True])
@pytest.mark.parametrize("max_staleness", [0, 4])
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_synchronous_steps_generate_only_while_the_trainer_waits(rig, num_microbatches, max_staleness, shares_prompt):
    source, worker = rig(
        synchronous=True,
        max_staleness=max_staleness,
        num_microbatches=num_microbatches,
        shares_prompt=shares_prompt,
    )
    left_over = []
    for number in range(1, 31):
        for _ in range(3):  # before the trainer asks
            worker.turn()
            assert not worker.running
        step = source.next_step(num_microbatches)
        assert len(step) == num_microbatches
        group_id, pending = worker.group_id, len(source.pending)
        for _ in range(5):  # forward, backward, sync
            worker.turn()
            assert not worker.running and worker.group_id == group_id
        assert worker.version - min(sample.model_version for sample in samples_of(step)) <= min(max_staleness, 1)
        left_over.append(pending)
        source.finish_step(step, number)
        worker.version += 1
        source.drain()
        assert len(source.pending) == pending  # nothing came after the step was handed out
    check_books(source)
    # after the first steps the worker makes about what a step takes: a few groups are left over, not a step
    assert sum(left_over[5:]) / len(left_over[5:]) < 3 * GROUP


def test_an_asynchronous_worker_does_run_meanwhile(rig):
    """The same play without `synchronous`: the test above can see the difference."""
    source, worker = rig(synchronous=False, max_staleness=4)
    source.finish_step(source.next_step(1), 1)
    worker.turn()
    assert worker.running


def test_a_stop_while_the_last_groups_end_puts_the_step_back(rig):
    source, worker = rig(synchronous=True, max_staleness=4)
    worker.is_idle = lambda: False
    asked = []
    source._should_stop = lambda: bool(source._shut and (asked.append(1) or len(asked) > 3))
    assert source.next_step(1) is None
    assert len(asked) > 3 and len(source.pending) >= GROUP
    assert [s.group_id for s in source.pending] == sorted(s.group_id for s in source.pending)


def test_a_worker_that_dies_while_its_last_groups_end_is_noticed(rig, monkeypatch):
    monkeypatch.setattr(module, "_CHECK_EVERY_S", 0.0)
    source, worker = rig(synchronous=True, max_staleness=4)
    worker.is_idle = lambda: False

    def check():
        if source._shut:
            raise RolloutError("the worker died")

    worker.check = check
    with pytest.raises(RolloutError, match="died"):
        source.next_step(1)


def test_an_answer_to_an_earlier_shutting_is_not_taken_for_the_present_one(rig):
    """The trainer opens and shuts faster than the worker looks: it may have begun a group in between."""
    source, worker = rig(synchronous=True, max_staleness=4)
    step = source.next_step(1)
    assert worker.is_idle()
    source._open()
    source._shut, source._shuttings = True, source._shuttings + 1
    source.publish_allowance()
    assert not worker.is_idle()
    worker.turn()
    assert worker.is_idle()
    source.finish_step(step, 1)


def test_resumed_samples_are_used_before_new_ones_are_made(rig):
    source, worker = rig(synchronous=True, max_staleness=4)
    made = [make_sample(i, prompt_tokens=6, completion_tokens=4, rollout=j) for i in range(500, 502) for j in range(4)]
    for position in (500, 501):
        slot = Slot(0, position, position)
        own = [sample for sample in made if sample.slot == slot]
        source.book.apply(GroupRecord("scored", slot, 0, position, 0, own, 0.5, dispatched=[(slot, 0)]))
    source.preload(made)
    step = source.next_step(1)
    assert worker.group_id == 0 and {s.slot.position for s in samples_of(step)} == {500, 501}
    source.finish_step(step, 1)
    assert source.next_step(1) is not None and worker.group_id > 0


@pytest.mark.parametrize("synchronous", [False, True])
def test_resumed_samples_that_share_all_their_tokens_do_not_starve_the_first_step(rig, synchronous):
    """They count whole against the allowance, far more than a step, and fill a corner of the row."""
    source, worker = rig(synchronous=synchronous, max_staleness=0, num_microbatches=3)
    made = [make_sample(500, prompt_tokens=45, completion_tokens=1, rollout=j) for j in range(20)]
    for sample in made:
        sample.sequence.token_ids[:] = 7
    slot = Slot(0, 500, 500)
    source.book.apply(GroupRecord("scored", slot, 0, 500, 0, made, 0.5, dispatched=[(slot, 0)]))
    source.preload(made)
    source.publish_allowance()
    step = source.next_step(3)
    assert {sample.sample_id for sample in made} < {sample.sample_id for sample in samples_of(step)}
    assert worker.turns < 500
    source.finish_step(step, 1)


async def test_the_real_loop_reports_where_it_stands_idle(tmp_path):
    """Shut out: nothing is asked of the server. Opened: busy until all groups have ended and are in the buffer."""
    async with FakeVLLM(delay_s=0.02) as server:
        run = loop_run(server, tmp_path, allowance=-1)
        shared = run.loop.idle_at_value
        shared.value = BUSY
        states = iter(("shut", "open", "shut again", "over"))
        state, asked = next(states), 0

        def step():
            nonlocal state, asked
            idle = shared.value == run.allowance.value
            run.records += run.buffer.take() if idle else []
            if state == "shut" and idle:
                assert not server.requests
                run.allowance.value, state = 100, next(states)
            elif state == "open" and len(server.requests) >= 8:
                assert not idle
                run.allowance.value, state = -2, next(states)
            elif state == "shut again" and idle:
                asked = len(server.requests)
                assert server.in_flight == 0 and len(run.ended()) * 4 == asked  # every group that was begun is here
                state = next(states)
                run.until_when = time.monotonic() + 0.15
            return state == "over" and time.monotonic() > run.until_when

        await run.until(step)
        assert len(server.requests) == asked
