"""From buffer to rows: staleness, oversize, stop, starvation, token allowance.

Rows F017, F019, F021, F027, F069, F081, F088, F107, F108, F120.
"""

from __future__ import annotations

import dataclasses
import sqlite3
import time

import pytest

from asyncgrpo_core.errors import ConfigError, RolloutError
from asyncgrpo_core.ledger import LedgerWriter
from asyncgrpo_core.ledger_counts import audit, counts
from asyncgrpo_core.metrics import MetricWindow
from asyncgrpo_core.packing.planner import CostModel
from asyncgrpo_core.rollout.buffer import SampleBuffer
from asyncgrpo_core.slots import SlotBook
from asyncgrpo_core.training.source import SampleSource, TokenAllowance
from asyncgrpo_core.types import GroupRecord, Slot
from tests.unit.samples import make_record, make_sample


class Worker:
    """Records what the source tells it; `flying` is its number of requests in flight."""

    def __init__(self):
        self.allowances, self.checks, self.flying, self.error = [], 0, 0, None

    def check(self):
        self.checks += 1
        if self.error:
            raise self.error

    def in_flight(self):
        return self.flying

    def is_idle(self):
        return False  # a group is being scored

    def set_allowance(self, tokens):
        self.allowances.append(tokens)


class Rig:
    def __init__(self, path, *, token_budget=10, max_staleness=4, num_rows=100, regenerate=True, **source):
        self.buffer = SampleBuffer(path / "buffer")
        self.book = SlotBook(num_rows=num_rows, regenerate=regenerate)
        self.ledger = LedgerWriter(path / "ledger.sqlite", num_rows=num_rows)
        self.window, self.worker = MetricWindow(), Worker()
        self.version, self.stop = 0, lambda: False
        self.allowance = TokenAllowance(max_staleness=max_staleness, step_tokens=token_budget)
        self.source = SampleSource(
            buffer=self.buffer,
            book=self.book,
            ledger=self.ledger,
            window=self.window,
            worker=self.worker,
            allowance=self.allowance,
            token_budget=token_budget,
            max_staleness=max_staleness,
            version=lambda: self.version,
            should_stop=lambda: self.stop(),
            **source,
        )

    def put(self, *records):
        for record in records:
            self.buffer.put(record)


@pytest.fixture
def rig(tmp_path):
    made = []

    def make(**kwargs):
        made.append(Rig(tmp_path, **kwargs))
        return made[-1]

    yield make
    for r in made:
        r.ledger.close()


def ids(step):
    return [[s.sample_id for s in row] for microbatch in step for row in microbatch.rows]


def test_long_rollouts_that_arrive_late_are_trained_before_newer_ones(rig):
    """Oldest policy first: group 5, started under version 0, arrives after groups of version 1 and 2."""
    r = rig(token_budget=10)
    r.put(make_record(7, version=2), make_record(6, version=1), make_record(8, version=2))
    r.source.drain()
    r.put(make_record(5, version=0), make_record(4, version=1))
    order = [ids(r.source.next_step(1))[0][0] for _ in range(4)]
    assert order == ["s0-5-0-0", "s0-4-0-0", "s0-6-0-0", "s0-7-0-0"]


def test_f120_saturation_metrics_stay_when_the_samples_go_stale(rig):
    """They are recorded when a group is scored, whatever becomes of its samples."""
    r = rig(token_budget=10, max_staleness=0)
    r.version = 1
    stale = make_record(0, version=0)
    stale.metrics = [("reward", "mean", 3.0, 4.0), ("frac_reward_zero_std", "mean", 0.0, 1.0)]
    r.put(stale, make_record(1, version=1), make_record(2, version=1))
    r.source.next_step(1)
    values = r.window.reduce()
    assert values["sample/dropped_stale_count"] == 2
    assert values["reward"] == 0.75 and values["frac_reward_zero_std"] == 0.0


def test_rows_fill_up_to_the_token_budget_in_arrival_order(rig):
    r = rig(token_budget=10)  # two samples of five tokens
    r.put(make_record(0), make_record(1), make_record(2))
    assert ids(r.source.next_step(1)) == [["s0-0-0-0", "s0-0-0-1"]]
    assert ids(r.source.next_step(1)) == [["s0-1-0-0", "s0-1-0-1"]]


@pytest.mark.parametrize(
    ("hidden_size", "lengths"),
    [(0, [[8], [5, 2, 2, 1]]), (10_000, [[8, 1], [5, 2, 2]])],  # attention alone: quadratic; matrices alone: linear
)
def test_ranks_are_balanced_by_the_policys_own_cost(rig, hidden_size, lengths):
    r = rig(token_budget=10, world_size=2, row_cost=CostModel(hidden_size))
    r.put(*(make_record(i, 1, prompt_tokens=n - 1, completion_tokens=1) for i, n in enumerate([8, 5, 2, 2])))
    r.put(make_record(4, 1, prompt_tokens=1, completion_tokens=0), make_record(5, 1, prompt_tokens=8))
    (microbatch,) = r.source.next_step(1)
    assert [[s.sequence.num_tokens for s in row] for row in microbatch.rows] == lengths


def test_f021_a_step_has_one_row_per_accumulation(rig):
    r = rig(token_budget=5)
    r.put(make_record(0), make_record(1))
    step = r.source.next_step(3)
    assert ids(step) == [["s0-0-0-0"], ["s0-0-0-1"], ["s0-1-0-0"]]


def test_f027_dropped_groups_leave_the_step_full(rig):
    r = rig(token_budget=10)
    r.put(make_record(0, outcome="zero_std"), make_record(1), make_record(2, outcome="zero_std"), make_record(3))
    assert sum(len(row) for row in ids(r.source.next_step(1))) == 2


def test_f019_f081_a_sample_more_than_max_staleness_behind_is_dropped_and_counted(rig):
    r = rig(token_budget=10, max_staleness=2)
    r.version = 5
    r.put(make_record(0, version=2), make_record(1, version=3), make_record(2, version=4))
    assert ids(r.source.next_step(1)) == [["s0-1-0-0", "s0-1-0-1"]]
    assert r.window.reduce()["sample/dropped_stale_count"] == 2


def test_staleness_is_judged_again_for_a_sample_left_over_from_the_previous_row(rig):
    r = rig(token_budget=10, max_staleness=0)
    r.put(make_record(0), make_record(1), make_record(2, version=1), make_record(3, version=1))
    r.source.next_step(1)
    r.version = 1  # a sync happened: record 1, pulled under version 0, is now one behind
    assert ids(r.source.next_step(1)) == [["s0-2-0-0", "s0-2-0-1"]]


def test_a_wholly_stale_group_is_asked_to_be_generated_again(rig):
    r = rig(token_budget=10, max_staleness=0)
    r.version = 1
    r.put(make_record(0), make_record(1, version=1), make_record(2, version=1))
    r.source.next_step(1)
    assert r.buffer.take_regenerations() == [(Slot(0, 0, 0), 1)]


def test_without_regeneration_a_stale_group_is_dropped_at_once(rig):
    r = rig(token_budget=10, max_staleness=0, regenerate=False)
    r.version = 1
    r.put(make_record(0), make_record(1, version=1), make_record(2, version=1))
    r.source.next_step(1)
    assert r.buffer.take_regenerations() == []
    r.ledger.flush()
    with sqlite3.connect(r.ledger.path) as db:
        assert db.execute("select state, reason from slots where row = 0").fetchall() == [("dropped", "stale")]


def test_f069_the_queue_is_measured_where_a_step_has_been_taken_from_it(rig):
    r = rig(token_budget=10)
    r.put(make_record(0), make_record(1), make_record(2))  # two samples each, two of them fill a row
    r.source.next_step(1)
    assert r.window.reduce()["rollout/queue_size"] == 4
    r.put(make_record(3))
    r.source.next_step(2)
    assert r.window.reduce()["rollout/queue_size"] == 2


def test_f088_a_sample_longer_than_the_budget_is_dropped_with_a_warning(rig, caplog):
    r = rig(token_budget=10)
    r.put(make_record(0, samples=2, completion_tokens=8), make_record(1), make_record(2))
    assert ids(r.source.next_step(1)) == [["s0-1-0-0", "s0-1-0-1"]]
    assert r.window.reduce()["batch/dropped_oversize_count"] == 2
    assert "token_budget=10" in caplog.text


def test_a_run_whose_samples_are_all_too_long_ends_instead_of_dropping_for_ever(rig, monkeypatch):
    monkeypatch.setattr("asyncgrpo_core.training.source._MOST_OVERSIZE", 4)
    r = rig(token_budget=10)
    for number in (0, 2):  # three too long, one group that fits, and again: no four in a row
        r.put(make_record(number, samples=3, completion_tokens=8), make_record(number + 1))
    r.put(make_record(4, samples=4, completion_tokens=8))
    assert ids(r.source.next_step(1)) == [["s0-1-0-0", "s0-1-0-1"]]
    with pytest.raises(ConfigError, match=r"last 4 samples were all longer than training\.token_budget = 10"):
        r.source.next_step(1)
        r.source.next_step(1)
    assert r.window.reduce()["batch/dropped_oversize_count"] == 10


def test_a_stop_while_waiting_puts_everything_back_in_order(rig):
    r = rig(token_budget=10)
    r.put(make_record(0), make_record(1, samples=1))
    r.stop = lambda: True
    assert r.source.next_step(2) is None
    assert [s.sample_id for s in r.source.pending] == ["s0-0-0-0", "s0-0-0-1", "s0-1-0-0"]


def test_errors_of_the_worker_end_the_wait(rig, monkeypatch):
    monkeypatch.setattr("asyncgrpo_core.training.source._CHECK_EVERY_S", 0.0)
    r = rig()
    r.worker.error = RolloutError("the worker died")
    with pytest.raises(RolloutError, match="the worker died"):
        r.source.next_step(1)


def test_a_trainer_that_starves_beside_an_idle_worker_grants_one_row(rig, monkeypatch):
    # max_staleness 1 and a last step smaller than the budget: the worker stands at its allowance, and the row
    # lacks one sample. Without the grant both wait for ever.
    monkeypatch.setattr("asyncgrpo_core.training.source._STARVED_AFTER_S", 0.0)
    r = rig(token_budget=10, max_staleness=1)
    r.put(make_record(0, samples=1))
    polls = iter(range(6))
    r.stop = lambda: next(polls, None) is None
    assert r.source.next_step(1) is None
    assert r.worker.allowances == [20]  # one step of 10, and one row granted, once


def test_a_report_is_no_reason_for_another_grant(rig, monkeypatch):
    """The worker reports every second; a group that is scored for a minute must not let it run a minute ahead."""
    monkeypatch.setattr("asyncgrpo_core.training.source._STARVED_AFTER_S", 0.0)
    r = rig(token_budget=10, max_staleness=1)
    polls = []

    def stop():
        polls.append(1)
        r.put(GroupRecord("report", metrics=[("rollout/concurrency", "mean", 0.0, 1.0)]))
        r.source.drain()
        return len(polls) > 20

    r.stop = stop
    assert r.source.next_step(1) is None
    assert r.worker.allowances == [20]


def test_a_grant_is_enough_to_start_a_group(rig, monkeypatch):
    """Resumed samples that share their tokens: far more of them than a step, and the row is not full."""
    monkeypatch.setattr("asyncgrpo_core.training.source._STARVED_AFTER_S", 0.0)
    r = rig(token_budget=10, max_staleness=0)
    made = [make_sample(7, prompt_tokens=4, completion_tokens=1, rollout=i) for i in range(8)]
    for sample in made:
        sample.sequence.token_ids[:] = 7
    r.book.apply(dataclasses.replace(make_record(7), samples=made))
    r.source.preload(made)
    assert r.allowance.value == 10 - 40
    polls = []
    r.stop = lambda: polls.append(1) or len(polls) > 20
    assert r.source.next_step(1) is None
    assert r.worker.allowances == [10]  # of this worker's tokens: none is produced yet


def test_tokens_that_the_book_refused_do_not_hold_the_worker_back(rig):
    """The worker counts a group that it sends as produced, whatever the trainer makes of it."""
    r = rig(token_budget=10, max_staleness=2)
    r.put(make_record(0), make_record(0), make_record(1))
    step = r.source.next_step(1)
    r.source.finish_step(step, 1)
    assert r.book.counters["refused_records"] == 1
    assert r.worker.allowances[-1] == 10 + 10 + 2 * 10


def test_a_row_of_shared_tokens_is_granted_for_until_it_is_full(rig, monkeypatch):
    """Samples that share their tokens fill a row slower than they count against the allowance: one grant is not it."""
    monkeypatch.setattr("asyncgrpo_core.training.source._STARVED_AFTER_S", 0.0)
    r = rig(token_budget=40, max_staleness=1)

    def worker_at_its_allowance(tokens):
        Worker.set_allowance(r.worker, tokens)
        n = len(r.worker.allowances)
        sample = make_sample(n, prompt_tokens=8, completion_tokens=2)
        sample.sequence.token_ids[:] = [*range(8), 100 * n, 100 * n + 1]
        r.put(dataclasses.replace(make_record(n, samples=1), samples=[sample]))

    r.worker.set_allowance = worker_at_its_allowance
    worker_at_its_allowance(40)
    (microbatch,) = r.source.next_step(1)
    assert len(microbatch.samples) == 11 and microbatch.num_tokens == 7 + 11 * 3
    assert len(r.worker.allowances) == 12


def test_no_grant_while_requests_are_in_flight(rig, monkeypatch):
    monkeypatch.setattr("asyncgrpo_core.training.source._STARVED_AFTER_S", 0.0)
    r = rig(token_budget=10, max_staleness=1)
    r.worker.flying = 3
    polls = iter(range(6))
    r.stop = lambda: next(polls, None) is None
    r.source.next_step(1)
    assert r.worker.allowances == []


def test_f107_f108_allowance_by_hand():
    allowance = TokenAllowance(max_staleness=4, step_tokens=2048)
    assert allowance.value == 8192  # before the first step every row is full
    allowance.consumed, allowance.step_tokens = 1900, 1900
    assert allowance.value == 1900 + 4 * 1900
    assert TokenAllowance(max_staleness=0, step_tokens=100).value == 100
    # 600 tokens came from a checkpoint: using them up must not let the worker run further ahead
    assert TokenAllowance(max_staleness=2, step_tokens=100, preloaded=600, consumed=600).value == 200


def test_f107_a_finished_step_raises_the_allowance_by_what_it_used(rig):
    r = rig(token_budget=10, max_staleness=2)
    r.put(make_record(0), make_record(1))
    step = r.source.next_step(1)
    r.source.finish_step(step, 1)
    assert r.worker.allowances[-1] == 10 + 2 * 10


def test_preloaded_samples_come_first_and_do_not_count_as_produced(rig):
    r = rig(token_budget=10)
    preloaded = [make_sample(7, rollout=i) for i in range(2)]
    r.book.apply(make_record(7))
    r.source.preload(preloaded)
    r.put(make_record(8))
    assert r.allowance.value == 4 * 10 - 10
    assert ids(r.source.next_step(1)) == [["s0-7-0-0", "s0-7-0-1"]]


def test_a_trained_step_reaches_the_ledger(rig):
    r = rig(token_budget=10)
    r.put(make_record(0), make_record(1))
    r.source.finish_step(r.source.next_step(1), 3)
    r.ledger.flush()
    with sqlite3.connect(r.ledger.path) as db:
        trained = db.execute("select sample_id, step from trainings order by 1").fetchall()
        assert trained == [("s0-0-0-0", 3), ("s0-0-0-1", 3)]
        assert db.execute("select state from slots where row = 0").fetchone() == ("trained",)


def test_a_skipped_step_is_final_in_the_ledger_and_does_not_hold_the_worker_back(rig):
    r = rig(token_budget=10, max_staleness=2)
    r.put(make_record(0), make_record(1))
    r.source.drop_step(r.source.next_step(1))
    assert r.worker.allowances[-1] == 10 + 2 * 10  # as after a step that trained them
    assert r.buffer.take_regenerations() == []
    r.ledger.flush()
    with sqlite3.connect(r.ledger.path) as db:
        assert db.execute("select state, reason from slots where row = 0").fetchone() == ("dropped", "non_finite")
        samples = db.execute("select distinct state, reason from samples where row = 0").fetchall()
        assert samples == [("dropped", "non_finite")]
        assert db.execute("select count(*) from trainings").fetchone() == (0,)
    assert counts(r.ledger.path)["dropped"]["non_finite"] == 1
    assert audit(r.ledger.path) == []


def test_f090_waiting_for_samples_is_timed_and_a_full_queue_costs_nothing(rig):
    r = rig(token_budget=10)
    r.put(make_record(0), make_record(1))
    began = time.monotonic()
    r.source.next_step(1)
    assert r.window.reduce()["perf/rollout_wait_s"] == 0.0

    def stop():  # asked at every poll; the missing group comes after 60 ms
        if time.monotonic() - began > 0.06 and not late:
            late.append(1)
            r.put(make_record(2))
        return False

    late, began, r.stop = [], time.monotonic(), stop
    r.source.next_step(1)
    elapsed = time.monotonic() - began
    assert 0.05 < r.window.reduce()["perf/rollout_wait_s"] <= elapsed
