"""Prompt order: seeded permutation per epoch, resume, skips, streams, prompt checks."""

from __future__ import annotations

import itertools

import pytest

from asyncgrpo_core.errors import ConfigError, DataError
from asyncgrpo_core.rollout.prompts import PromptOrder, check_prompt, open_prompts
from asyncgrpo_core.slots import SlotBook
from asyncgrpo_core.types import GroupRecord, Slot

ROWS = [{"prompt": i} for i in range(7)]


def slots(stream, count: int) -> list[Slot]:
    return [slot for slot, _ in itertools.islice(stream, count)]


def test_every_epoch_is_a_permutation_and_epochs_differ() -> None:
    got = slots(open_prompts(ROWS, 3, "random"), 21)
    for epoch in range(3):
        part = got[7 * epoch : 7 * epoch + 7]
        assert {s.epoch for s in part} == {epoch} and [s.position for s in part] == list(range(7))
        assert sorted(s.row for s in part) == list(range(7))
    orders = {tuple(s.row for s in got[7 * e : 7 * e + 7]) for e in range(3)}
    assert len(orders) == 3


def test_the_order_depends_on_the_seed_alone() -> None:
    assert slots(open_prompts(ROWS, 3, "random"), 14) == slots(open_prompts(ROWS, 3, "random"), 14)
    assert slots(open_prompts(ROWS, 3, "random"), 7) != slots(open_prompts(ROWS, 4, "random"), 7)


def test_sequential_is_the_datasets_order() -> None:
    assert [s.row for s in slots(open_prompts(ROWS, 3, "sequential"), 9)] == [0, 1, 2, 3, 4, 5, 6, 0, 1]


def test_resume_goes_on_where_the_state_says_and_skips_what_has_ended() -> None:
    whole = slots(open_prompts(ROWS, 3, "random"), 21)
    state = {"epoch": 1, "position": 2, "skip": [[1, 3], [2, 0]]}
    got = slots(open_prompts(ROWS, 3, "random", resume_state=state), 6)
    expected = [s for s in whole if (s.epoch, s.position) >= (1, 2) and (s.epoch, s.position) not in {(1, 3), (2, 0)}]
    assert got == expected[:6]


def test_start_index_runs_over_epochs() -> None:
    got = slots(open_prompts(ROWS, 3, "sequential", start_index=9), 1)
    assert got == [Slot(1, 2, 2)]


def test_rows_of_slots_can_be_read_again() -> None:
    stream = open_prompts(ROWS, 3, "random")
    for slot, row in itertools.islice(stream, 10):
        assert stream.row(slot) == row


def test_stream_without_length_repeats_from_the_start() -> None:
    """F168: an iterable restarts from the first prompt whatever position the resume state names."""

    class Endless:
        def __iter__(self):
            return iter(ROWS[:3])

    stream = open_prompts(Endless(), 3, "random", resume_state={"epoch": 5, "position": 2})
    assert [(s.epoch, s.row) for s in slots(stream, 5)] == [(5, 0), (5, 1), (5, 2), (6, 0), (6, 1)]
    assert stream.prompts_per_epoch == 3
    assert stream.row(Slot(6, 0, 0)) == ROWS[0]


def test_empty_datasets_and_unknown_orders_are_refused() -> None:
    with pytest.raises(DataError, match="no rows"):
        open_prompts([], 0, "random")
    with pytest.raises(DataError, match="no rows"):
        next(open_prompts(iter(()), 0, "random"))
    with pytest.raises(ConfigError, match="group_by_length"):
        PromptOrder(3, 0, "group_by_length")


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("What is 2+2?", "plain text"),
        ([], "not a list of messages"),
        (["hi"], "not a message"),
        ([{"content": "hi"}], "not a message"),
        ([{"role": "user"}], "without content"),
        ([{"role": "user", "content": [{"type": "image"}]}], "not text"),
    ],
)
def test_prompts_that_are_not_conversational_text_are_refused(prompt, text) -> None:
    """F002, F012."""
    with pytest.raises(DataError, match=f"row 17.*{text}"):
        check_prompt(prompt, "row 17")


def test_a_conversation_is_accepted() -> None:
    check_prompt([{"role": "system", "content": ""}, {"role": "user", "content": "hi"}], "row 0")
    check_prompt([{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "row 0")


@pytest.mark.parametrize("source", ["stream", "no dataset"])
def test_f168_a_resumed_stream_starts_with_the_first_prompt_under_slots_of_its_own(source) -> None:
    """What SlotBook plans for a stream: the first epoch that no slot has. A slot that has ended is never used again."""
    rows = [{"prompt": [{"role": "user", "content": str(i)}]} for i in range(3)]
    dataset = RowStream(rows) if source == "stream" else None
    first = open_prompts(dataset, 0, "random")
    used = {next(first)[0] for _ in range(5)}
    book = SlotBook(num_rows=None)
    for slot in used:
        book.apply(GroupRecord(outcome="zero_std", slot=slot, dispatched=[(slot, 0)]))
    again = open_prompts(dataset, 0, "random", resume_state=book.worker_resume_state(set()))
    got = [next(again) for _ in range(5)]
    assert not {slot for slot, _ in got} & used
    assert got[0][1] == (rows[0] if source == "stream" else {})
    assert again.row(got[0][0]) == got[0][1]


class RowStream:
    """An iterable without a length."""

    def __init__(self, rows) -> None:
        self._rows = rows

    def __iter__(self):
        return iter(self._rows)
