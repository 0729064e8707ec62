"""ledger.sqlite: what is written survives, what was rolled back counts in nothing, and bugs show."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from asyncgrpo_core.errors import CheckpointError, LedgerError
from asyncgrpo_core.ledger import CountsReader, LedgerWriter, SampleRow, SlotRow, audit, counts, last_seq
from asyncgrpo_core.slots import SlotBook
from asyncgrpo_core.types import GroupRecord
from tests.unit.test_slots import outcome, sample, scored, slot

ZERO = {"zero_std": 0, "no_reward": 0, "oversize": 0, "stale": 0, "failed": 0, "non_finite": 0}


class Run:
    """A book and its ledger."""

    def __init__(self, path: Path, num_rows: int | None = 6) -> None:
        self.path, self.num_rows = path, num_rows
        self.book = SlotBook(num_rows)
        self.ledger = LedgerWriter(path, num_rows=num_rows, every_s=0.01)
        self.book.continue_after(self.ledger.last_seq)
        self.book.worker_resume_state([])

    def flush(self) -> None:
        self.ledger.write(self.book.drain_rows())
        self.ledger.flush(10)

    def counts(self) -> dict:
        self.flush()
        return counts(self.path)

    def resume(self, state: dict, buffered: list, snapshot: Path | None = None) -> dict:
        self.ledger.close()
        self.book = SlotBook(self.num_rows)
        self.book.load_state_dict(state)
        self.ledger = LedgerWriter(
            self.path,
            num_rows=self.num_rows,
            checkpoint_seq=self.book.ledger_seq,
            snapshot=snapshot,
            every_s=0.01,
        )
        self.book.continue_after(self.ledger.last_seq)
        return self.book.worker_resume_state(buffered)


@pytest.fixture
def run(tmp_path):
    made = Run(tmp_path / "ledger.sqlite")
    yield made
    made.ledger.close()


def train(run: Run, position: int, step: int = 1) -> None:
    for item in run.book.apply(scored(slot(position), f"{position}a", f"{position}b")).samples:
        run.book.sample_trained(item, step)


def test_counts_of_every_kind_of_end(run):
    train(run, 0)
    for position, what in ((1, "zero_std"), (2, "no_reward"), (3, "filtered")):
        run.book.apply(outcome(slot(position), what))
    a, _ = run.book.apply(scored(slot(4), "x", "y")).samples
    run.book.sample_dropped(a, "oversize")
    run.book.apply(GroupRecord("report", dispatched=[(slot(5), 0)]))
    assert run.counts() == {
        "prompts": 5,
        "trained": 1,
        "dropped": {**ZERO, "zero_std": 1, "no_reward": 1},
        "filtered": 1,
        "pending": 2,
        "rolled_back": 0,
        "lost": 0,
        "trained_twice": 0,
    }
    assert audit(run.path) == []


def test_views_hold_states_versions_tokens_reward_and_step(run):
    train(run, 0, step=7)
    run.flush()
    with sqlite3.connect(run.path) as db:
        assert db.execute("SELECT state, step, model_version, reward FROM slots").fetchall() == [("trained", 7, 3, 0.5)]
        rows = db.execute(
            "SELECT sample_id, state, step, version_first, version_last, forwarded_tokens, trained_tokens, reward, "
            "advantage FROM samples ORDER BY sample_id"
        ).fetchall()
    assert rows == [("0a", "trained", 7, 3, 5, 6, 2, 1.5, 0.25), ("0b", "trained", 7, 3, 5, 6, 2, 1.5, 0.25)]


def test_resume_rolls_back_what_came_after_the_checkpoint(run):
    train(run, 0)
    run.flush()
    state = run.book.state_dict()
    train(run, 1)
    run.book.apply(outcome(slot(2), "zero_std"))
    assert run.counts()["trained"] == 2
    start = run.resume(state, [])
    assert start["position"] == 1
    found = run.counts()
    assert (found["prompts"], found["trained"], found["rolled_back"], found["lost"]) == (1, 1, 2, 0)
    train(run, 1)  # trained again: the first time never happened
    found = run.counts()
    assert (found["trained"], found["trained_twice"], found["rolled_back"]) == (2, 0, 2)
    assert audit(run.path) == []


def test_going_back_to_an_abandoned_branch_brings_its_rows_back(run):
    """Checkpoint A, checkpoint B, resume from A, killed, resume from B: what B holds counts again."""
    train(run, 0)
    state_a = run.book.state_dict()
    train(run, 1)
    run.flush()
    state_b = run.book.state_dict()
    run.resume(state_a, [])
    train(run, 1, step=9)
    train(run, 2, step=9)
    run.flush()
    run.resume(state_b, [])
    found = run.counts()
    assert (found["trained"], found["lost"], found["trained_twice"]) == (2, 0, 0)
    assert audit(run.path) == []


def test_empty_disk_continues_from_the_snapshot_in_the_checkpoint(run, tmp_path):
    train(run, 0)
    run.book.apply(outcome(slot(1), "zero_std"))
    run.flush()
    state = run.book.state_dict()
    run.ledger.snapshot(tmp_path / "snapshot.sqlite")
    run.ledger.close()
    for path in tmp_path.glob("ledger.sqlite*"):
        path.unlink()
    with pytest.raises(CheckpointError, match="ends at row 0"):
        LedgerWriter(run.path, num_rows=6, checkpoint_seq=state["ledger_seq"])
    run.resume(state, [], snapshot=tmp_path / "snapshot.sqlite")
    train(run, 2)
    found = run.counts()
    assert (found["trained"], found["dropped"]["zero_std"], found["lost"]) == (2, 1, 0)
    assert not list(tmp_path.glob("snapshot.sqlite-*")), "a snapshot is one file"


# -- a bug must show --------------------------------------------------------------------------------------------------


def test_skipped_prompt_is_lost(run):
    train(run, 0)
    train(run, 3)  # nobody ever announced 1 and 2
    found = run.counts()
    assert (found["lost"], found["prompts"]) == (2, 4)


def test_prompt_skipped_by_a_resume_is_lost(run):
    train(run, 0)
    state = run.book.state_dict()
    train(run, 1)
    run.flush()
    run.resume(state, [])
    train(run, 2)  # the worker was started one too far: position 1 was rolled back and never comes again
    assert run.counts()["lost"] == 1


def test_requeued_prompt_that_the_worker_passes_is_lost(run):
    run.book.apply(GroupRecord("report", dispatched=[(slot(0), 0), (slot(1), 0)]))
    run.flush()
    run.resume(run.book.state_dict(), [])
    assert run.counts()["lost"] == 0
    train(run, 1)
    assert run.counts()["lost"] == 1
    train(run, 0)
    assert run.counts()["lost"] == 0


def test_open_slot_forgotten_by_a_restart_is_lost(run):
    train(run, 0)
    run.book.apply(GroupRecord("report", dispatched=[(slot(1), 0)]))
    state = run.book.state_dict()
    run.flush()
    state["unfinished"] = []  # the bug: the checkpoint forgets what was in flight
    run.resume(state, [])
    train(run, 2)
    assert run.counts()["lost"] == 1


def test_slot_left_open_after_its_last_sample_is_lost(run):
    run.book.apply(scored(slot(0), "a"))
    rows = run.book.drain_rows()
    run.ledger.write([*rows, SampleRow(rows[-1].seq + 1, "a", 0, 100, 0, 2, "trained", step=1)])
    run.ledger.flush(10)
    assert counts(run.path)["lost"] == 1
    assert counts(run.path)["pending"] == 0


def test_whole_epoch_passed_over_is_lost(run):
    run.book.apply(outcome(slot(0, epoch=2), "zero_std"))
    assert run.counts()["lost"] == 12


def test_prompt_order_that_changed_between_attempts_is_lost(run):
    rows = [SlotRow(50 + p, 1, 0, row, p, 0, "dispatched") for p, row in enumerate([100, 101, 100])]
    run.ledger.write(rows)
    assert run.counts()["lost"] == 1
    assert any("more than one position" in line for line in audit(run.path))


def test_sample_trained_again_is_counted(run):
    train(run, 0)
    with pytest.raises(LedgerError):
        run.book.sample_trained(sample(slot(0), "0a"), 2)
    assert run.counts()["trained_twice"] == 1


def test_slot_trained_from_two_groups_is_counted(run):
    """Same generation number, another group: a resume that generated a half-trained group again."""
    a, _ = run.book.apply(scored(slot(0), "a", "b")).samples
    run.book.sample_trained(a, 1)
    state = run.book.state_dict()
    run.flush()
    state["unfinished"] = []  # the bug
    run.resume(state, [])
    for item in run.book.apply(scored(slot(0), "c", "d")).samples:
        run.book.sample_trained(item, 2)
    assert run.counts()["trained_twice"] == 1


def test_audit_names_contradictions(run):
    train(run, 0)
    run.flush()
    seq = last_seq(run.path)
    run.ledger.write(
        [
            SlotRow(seq + 1, 1, 0, 100, 0, 0, "dispatched"),
            SlotRow(seq + 2, 1, 0, 101, 1, 0, "trained"),
            SampleRow(seq + 3, "ghost", 0, 102, 0, 0, "trained", step=1),
            SampleRow(seq + 4, "0a", 0, 100, 0, 0, "dropped", reason="stale"),
            SampleRow(seq + 5, "0b", 0, 100, 0, 999, "trained", step=1),
        ]
    )
    run.flush()
    text = " | ".join(audit(run.path))
    for part in (
        "went on after",
        "without a trained sample",
        "never generated",
        "another group",
        "both trained and dropped",
    ):
        assert part in text


def test_reader_does_not_count_again_at_once_unless_asked_to(run):
    train(run, 0)
    run.flush()
    reader = CountsReader(run.path, share=1e-9)
    assert reader.read()["trained"] == 1
    train(run, 1)
    run.flush()
    assert reader.read()["trained"] == 1
    assert reader.read(fresh=True)["trained"] == 2
    assert CountsReader(run.path, share=1e9).read()["trained"] == 2


# -- the writer -------------------------------------------------------------------------------------------------------


def test_sigkill_keeps_what_was_flushed(tmp_path):
    """A SIGKILL while rows stream in leaves a readable ledger with at least everything flushed before."""
    path = tmp_path / "ledger.sqlite"
    program = f"""
import sys
from asyncgrpo_core.ledger import CountsReader, LedgerWriter, SlotRow
w = LedgerWriter({str(path)!r}, num_rows=None, every_s=0.001)
seq = w.last_seq
for p in range(10**9):
    seq += 1
    w.write([SlotRow(seq, 0, 0, p, p, 0, "dispatched")])
    if p % 50 == 0:
        w.flush(10)
        print(p + 1, flush=True)
"""
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    flushed = 0
    deadline = time.monotonic() + 60
    while flushed < 200 and time.monotonic() < deadline:
        flushed = int(child.stdout.readline())
    os.kill(child.pid, signal.SIGKILL)
    child.wait(10)
    child.stdout.close()
    assert counts(path)["prompts"] >= flushed >= 200
    assert counts(path)["lost"] == 0
    with LedgerWriterClosed(path) as writer:
        assert writer.attempt == 2
    assert counts(path)["prompts"] == 0
    assert counts(path)["rolled_back"] >= flushed


class LedgerWriterClosed:
    """Opens a ledger for a moment."""

    def __init__(self, path: Path) -> None:
        self.writer = LedgerWriter(path, num_rows=None)

    def __enter__(self) -> LedgerWriter:
        return self.writer

    def __exit__(self, *_: object) -> None:
        self.writer.close()


def test_flush_says_what_the_disk_said_and_loses_nothing(run):
    """While another process holds the file, rows wait; flush raises after its deadline; later they are written."""
    train(run, 0)
    run.flush()
    blocker = sqlite3.connect(run.path, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    train(run, 1)
    run.ledger.write(run.book.drain_rows())
    with pytest.raises(LedgerError, match="were not written in"):
        run.ledger.flush(0.3)
    blocker.execute("ROLLBACK")
    blocker.close()
    assert run.counts()["trained"] == 2


def test_close_writes_the_rest_and_refuses_more(run):
    train(run, 0)
    run.ledger.write(run.book.drain_rows())
    run.ledger.close()
    run.ledger.close()
    assert counts(run.path)["trained"] == 1
    with pytest.raises(LedgerError, match="closed"):
        run.ledger.write([])


def test_missing_and_damaged_ledgers_are_named(tmp_path):
    with pytest.raises(LedgerError, match=r"no ledger at .*nowhere"):
        counts(tmp_path / "nowhere.sqlite")
    damaged = tmp_path / "damaged.sqlite"
    damaged.write_bytes(b"not a database" * 100)
    with pytest.raises(LedgerError, match=r"damaged.sqlite cannot be"):
        counts(damaged)
    with pytest.raises(LedgerError, match=r"damaged.sqlite cannot be"):
        LedgerWriter(damaged, num_rows=1)
