"""SlotBook, case by case: how slots end, what is generated again, what a resume continues with."""

from __future__ import annotations

import json

import numpy as np
import pytest

from asyncgrpo_core.errors import CheckpointError, LedgerError
from asyncgrpo_core.ledger_schema import SampleRow, SlotRow
from asyncgrpo_core.slots import SlotBook
from asyncgrpo_core.types import GroupRecord, Slot, TrainingSample, TrainingSequence


def slot(position: int, epoch: int = 0) -> Slot:
    return Slot(epoch, 100 + position, position)


def sample(of: Slot, name: str, generation: int = 0) -> TrainingSample:
    sequence = TrainingSequence(
        np.arange(6, dtype=np.int32),
        np.array([0, 0, 0, 1, 1, 0], bool),
        np.zeros(6, np.float32),
        np.array([3, 3, 3, 3, 5, 4], np.int32),
    )
    return TrainingSample(sequence, 0.25, 1.5, 0.5, of, generation, 9, 3, "r", sample_id=name)


def scored(of: Slot, *names: str, generation: int = 0) -> GroupRecord:
    samples = [sample(of, name, generation) for name in names]
    return GroupRecord("scored", of, generation, 9, 3, samples, 0.5, dispatched=[(of, generation)])


def outcome(of: Slot, what: str, generation: int = 0) -> GroupRecord:
    return GroupRecord(what, of, generation, dispatched=[(of, generation)])


def states(book: SlotBook) -> list[tuple]:
    return [(row.position, row.state, row.reason) for row in book.drain_rows() if isinstance(row, SlotRow)]


def through_json(book: SlotBook, num_rows: int | None = 10) -> SlotBook:
    restored = SlotBook(num_rows)
    restored.load_state_dict(json.loads(json.dumps(book.state_dict())))
    return restored


def test_slot_is_trained_when_its_last_sample_ends():
    book = SlotBook(10)
    a, b, c = book.apply(scored(slot(0), "a", "b", "c")).samples
    book.sample_trained(a, 4)
    assert book.sample_dropped(b, "stale") is None
    assert book.epoch_progress() == {}
    book.sample_trained(c, 6)
    assert book.epoch_progress() == {0: 1}
    rows = book.drain_rows()
    assert [r.state for r in rows if isinstance(r, SlotRow)] == ["dispatched", "scored", "trained"]
    assert rows[-1].step == 6
    made = [r for r in rows if isinstance(r, SampleRow) and r.event == "generated"]
    assert [(r.version_first, r.version_last, r.forwarded_tokens, r.trained_tokens) for r in made] == [(3, 5, 6, 2)] * 3
    assert [r.seq for r in rows] == list(range(1, len(rows) + 1))


@pytest.mark.parametrize("what", ["zero_std", "no_reward"])
def test_final_outcomes_are_dropped_and_count_toward_the_epoch(what):
    """F028, F216: a dropped group is final and counts toward the epoch."""
    book = SlotBook(1)
    assert book.apply(outcome(slot(0), what)) == ([], None)
    assert book.passes_done(1)
    assert states(book)[-1] == (0, "dropped", what)


def test_filtered_is_final_and_counts_toward_the_epoch():
    book = SlotBook(1)
    assert book.apply(outcome(slot(0), "filtered")).regenerate is None
    assert book.passes_done(1)
    assert states(book)[-1] == (0, "filtered", None)


def test_stale_group_is_generated_again_twice_then_dropped():
    book = SlotBook(10)
    for generation in range(3):
        group = book.apply(scored(slot(0), f"a{generation}", f"b{generation}", generation=generation)).samples
        assert book.sample_dropped(group[0], "stale") is None
        again = book.sample_dropped(group[1], "stale")
        assert again == ((slot(0), generation + 1) if generation < 2 else None)
    assert states(book)[-1] == (0, "dropped", "stale")
    assert book.epoch_progress() == {0: 1}


def test_failed_group_is_generated_again_and_can_still_be_trained():
    book = SlotBook(10)
    assert book.apply(outcome(slot(0), "failed")).regenerate == (slot(0), 1)
    (a,) = book.apply(scored(slot(0), "a", generation=1)).samples
    book.sample_trained(a, 1)
    assert states(book)[-1] == (0, "trained", None)


def test_without_regeneration_stale_and_failed_are_dropped_at_once():
    """The reference's behaviour."""
    book = SlotBook(10, regenerate=False)
    (a,) = book.apply(scored(slot(0), "a")).samples
    assert book.sample_dropped(a, "stale") is None
    assert book.apply(outcome(slot(1), "failed")) == ([], None)
    assert book.epoch_progress() == {0: 2}


def test_a_sample_of_a_skipped_step_is_final_and_is_not_generated_again():
    """Not finite beside stale and oversize: the step's failure is what the slot ended with."""
    book = SlotBook(10)
    a, b, c = book.apply(scored(slot(0), "a", "b", "c")).samples
    assert book.sample_dropped(a, "stale") is None
    assert book.sample_dropped(b, "oversize") is None
    assert book.sample_dropped(c, "non_finite") is None
    assert states(book)[-1] == (0, "dropped", "non_finite")
    assert book.counters["dropped_non_finite"] == 1 and book.passes() == 0.1
    with pytest.raises(LedgerError):
        book.sample_trained(c, 1)


def test_a_slot_with_a_trained_sample_ends_as_trained_whatever_a_skipped_step_lost():
    book = SlotBook(10)
    a, b = book.apply(scored(slot(0), "a", "b")).samples
    book.sample_dropped(a, "non_finite")
    book.sample_trained(b, 3)
    assert states(book)[-1][:2] == (0, "trained")


def test_oversize_is_final_even_beside_stale_samples():
    book = SlotBook(10)
    a, b = book.apply(scored(slot(0), "a", "b")).samples
    book.sample_dropped(a, "stale")
    assert book.sample_dropped(b, "oversize") is None
    assert states(book)[-1] == (0, "dropped", "oversize")


def test_scored_group_without_samples_does_not_hang():
    book = SlotBook(10)
    assert book.apply(scored(slot(0))).regenerate == (slot(0), 1)


def test_second_record_of_a_group_is_refused():
    book = SlotBook(10)
    (a,) = book.apply(scored(slot(0), "a")).samples
    assert book.apply(scored(slot(0), "b")) == ([], None)
    book.sample_trained(a, 1)
    assert book.apply(scored(slot(0), "c")) == ([], None)
    assert book.counters["refused_records"] == 2


def test_record_of_an_outdated_generation_is_refused():
    book = SlotBook(10)
    (a,) = book.apply(scored(slot(0), "a")).samples
    book.sample_dropped(a, "stale")
    assert book.apply(scored(slot(0), "late")).samples == []
    assert book.pending_regenerations() == [(slot(0), 1)]


def test_training_a_sample_twice_is_an_error_and_stays_on_record():
    book = SlotBook(10)
    a, _ = book.apply(scored(slot(0), "a", "b")).samples
    book.sample_trained(a, 1)
    book.drain_rows()
    with pytest.raises(LedgerError, match="not waiting"):
        book.sample_trained(a, 2)
    assert [(row.sample_id, row.event) for row in book.drain_rows()] == [("a", "trained")]


def test_epochs_count_distinct_prompts_whatever_the_samples():
    """F215: forks do not count; an epoch is over when each of its slots has ended, not when N slots have."""
    book = SlotBook(3)
    for position, names in ((0, ["a", "b", "c", "d"]), (2, ["e"])):
        for item in book.apply(scored(slot(position), *names)).samples:
            book.sample_trained(item, 1)
    book.apply(outcome(slot(0, epoch=1), "zero_std"))  # the worker runs ahead into the next epoch
    assert book.passes() == 1.0
    assert not book.passes_done(1)
    book.apply(outcome(slot(1), "zero_std"))
    assert book.passes_done(1)
    assert book.passes_done(1.33)  # and the first position of epoch 1
    assert not book.passes_done(1.34)
    assert SlotBook(None).passes_done(0.1) is False


def test_resume_starts_at_the_first_prompt_that_is_not_over_and_leaves_out_the_rest():
    """F166: a stale group does not pin the position, and nothing in between is skipped."""
    book = SlotBook(10)
    book.apply(GroupRecord("report", dispatched=[(slot(p), 0) for p in range(7)]))
    for position in (0, 1, 3):
        book.apply(outcome(slot(position), "zero_std"))
    (stale,) = book.apply(scored(slot(2), "s")).samples
    book.sample_dropped(stale, "stale")
    book.apply(scored(slot(5), "kept"))
    resumed = through_json(book)
    state = resumed.worker_resume_state([slot(5)], buffered_samples={"kept"})
    assert state == {"epoch": 0, "position": 4, "skip": [[0, 5]]}
    assert resumed.pending_regenerations() == [(slot(2), 1)]
    assert states(resumed) == [
        (2, "regenerate", None),
        (4, "requeued", None),
        (5, "kept", None),
        (6, "requeued", None),
    ]


def test_resume_in_a_later_epoch_skips_what_has_ended_there():
    book = SlotBook(3)
    for position in (0, 2):
        book.apply(outcome(slot(position), "zero_std"))
    for position in (0, 1):
        book.apply(outcome(slot(position, epoch=1), "zero_std"))
    state = through_json(book, 3).worker_resume_state([])
    assert state == {"epoch": 0, "position": 1, "skip": [[0, 2], [1, 0], [1, 1]]}


def test_half_trained_group_continues_with_its_waiting_samples():
    """F167: what was generated and not yet trained is kept."""
    book = SlotBook(10)
    record = scored(slot(0), "a", "b", "c")
    a, *_ = book.apply(record).samples
    book.sample_trained(a, 1)
    resumed = through_json(book)
    state = resumed.worker_resume_state([slot(0)], buffered_samples={"b", "c"})
    assert state["position"] == 1
    again = resumed.apply(record)
    assert [s.sample_id for s in again.samples] == ["b", "c"]
    assert resumed.apply(record).samples == []
    for item in again.samples:
        resumed.sample_trained(item, 2)
    assert states(resumed)[-1] == (0, "trained", None)


def test_half_trained_group_whose_rest_is_gone_ends_as_trained():
    """Generating it again would train the prompt from two groups."""
    book = SlotBook(10)
    a, b, _ = book.apply(scored(slot(0), "a", "b", "c")).samples
    book.sample_trained(a, 1)
    resumed = through_json(book)
    resumed.worker_resume_state([slot(0)], buffered_samples={"b"})
    resumed.sample_trained(b, 2)
    assert states(resumed)[-1] == (0, "trained", None)
    other = through_json(book)
    other.worker_resume_state([])
    assert states(other) == [(0, "trained", None)]
    assert other.epoch_progress() == {0: 1}


def test_group_that_was_in_flight_keeps_its_generation():
    book = SlotBook(10)
    book.apply(outcome(slot(0), "failed"))
    book.apply(GroupRecord("report", dispatched=[(slot(0), 1)]))
    resumed = through_json(book)
    assert resumed.worker_resume_state([]) == {"epoch": 0, "position": 1, "skip": []}
    assert resumed.pending_regenerations() == [(slot(0), 1)]


def test_unread_record_of_the_checkpoint_is_taken_as_if_new():
    book = SlotBook(10)
    resumed = through_json(book)
    state = resumed.worker_resume_state([slot(1)], buffered_samples={"a"})
    assert state == {"epoch": 0, "position": 0, "skip": [[0, 1]]}
    old = scored(slot(1), "a", generation=0)
    old.dispatched.insert(0, (slot(0), 0))  # was in flight in the worker that died
    assert [s.sample_id for s in resumed.apply(old).samples] == ["a"]
    assert resumed.unfinished() == [slot(1)]


def test_stream_restarts_as_a_new_epoch():
    """F168: an IterableDataset starts again at its first prompt; what was open is closed, not lost."""
    book = SlotBook(None)
    book.apply(GroupRecord("report", dispatched=[(slot(0), 0), (slot(1), 0)]))
    (kept,) = book.apply(scored(slot(2), "k")).samples
    resumed = through_json(book, None)
    assert resumed.worker_resume_state([slot(2)]) == {"epoch": 1, "position": 0, "skip": []}
    resumed.sample_trained(kept, 1)
    assert resumed.unfinished() == []


def test_state_of_another_dataset_or_version_is_refused():
    state = SlotBook(10).state_dict()
    with pytest.raises(CheckpointError, match="10 rows, this one has 11"):
        SlotBook(11).load_state_dict(state)
    with pytest.raises(CheckpointError, match="version 0"):
        SlotBook(10).load_state_dict({**state, "version": 0})


def test_state_stays_small():
    """A cursor plus exceptions: ten thousand ended slots do not grow the checkpoint."""
    book = SlotBook(20_000)
    for position in range(10_000):
        if position != 17:
            book.apply(outcome(slot(position), "zero_std"))
    book.apply(outcome(slot(17), "zero_std"))
    assert len(json.dumps(book.state_dict())) < 1000
