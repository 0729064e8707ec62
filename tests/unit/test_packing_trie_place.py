"""Which row a sample goes to (F126), as a table; and the rule driven by real tries."""

import pytest

from asyncgrpo_core.packing.planner import CostModel
from asyncgrpo_core.packing.trie import PrefixTrie, RowOffer, place
from tests.unit.test_packing_trie import sample_of


def row(cost, cost_with, *, group=False, room=True, empty=False):
    return RowOffer(holds_group=group, has_room=room, empty=empty, cost=cost, cost_with=cost_with)


PLACEMENTS = {
    # the group's row wins although another is cheaper, even as the most loaded one
    "home first": ([row(5, 6), row(90, 91, group=True)], 1),
    "two homes: the cheaper": ([row(50, 51, group=True), row(20, 21, group=True), row(0, 9, empty=True)], 1),
    "two homes, one full": ([row(50, 51, group=True), row(20, 21, group=True, room=False)], 0),
    # nobody has the group
    "new group: the cheapest row": ([row(50, 55), row(20, 25), row(30, 35)], 1),
    "new group: cheapest with the sample in it": ([row(20, 40), row(25, 30)], 1),
    "new group: may raise the most loaded row": ([row(50, 90), row(49, 89)], 1),
    "new group: only rows with room": ([row(1, 2, room=False), row(50, 55)], 1),
    "new group, no room": ([row(50, 55, room=False), row(20, 25, room=False)], None),
    "first sample of all": ([row(0, 4, empty=True), row(0, 4, empty=True)], 0),
    # the group's rows are full
    "home full: an empty row": ([row(50, 51, group=True, room=False), row(20, 25), row(0, 60, empty=True)], 2),
    "home full: below the most loaded": ([row(50, 51, group=True, room=False), row(20, 49)], 1),
    "home full: exactly the most loaded": ([row(50, 51, group=True, room=False), row(20, 50)], 1),
    "home full: would raise the most loaded": ([row(50, 51, group=True, room=False), row(20, 51)], None),
    "home full: the cheapest of those allowed": (
        [row(90, 91, group=True, room=False), row(40, 70), row(30, 60), row(80, 99)], 2),
    "home full and no other row": ([row(50, 51, group=True, room=False)], None),
    "home full, the rest full": ([row(50, 51, group=True, room=False), row(20, 25, room=False)], None),
    "equal costs: the first": ([row(7, 8), row(7, 8)], 0),
}  # fmt: skip


@pytest.mark.parametrize(("offers", "expected"), PLACEMENTS.values(), ids=PLACEMENTS.keys())
def test_f126_table_of_placements(offers, expected):
    assert place(offers) == expected


def offers_of(tries, groups, sample, group, budget, model):
    return [
        RowOffer(
            holds_group=group in held,
            has_room=trie.fits(sample, budget),
            empty=not trie.samples,
            cost=trie.cost(model),
            cost_with=trie.cost(model) + trie.added_cost(sample, model),
        )
        for trie, held in zip(tries, groups, strict=True)
    ]


def test_f126_a_group_stays_together_until_its_row_is_full_and_then_fills_the_empty_one():
    """Budget 16; group 0: a prompt of 8 and completions of 2 (10 tokens, then 3 more each: 10, 13, 16, full)."""
    model, tries, groups = CostModel(4), [PrefixTrie(), PrefixTrie()], [set(), set()]
    placed = []
    arrivals = [(0, [*range(1, 9), 100 + i, 200 + i]) for i in range(5)] + [(1, [50, 51, 52])] * 2
    for group, ids in arrivals:
        sample = sample_of(ids, [len(ids) - 1])
        at = place(offers_of(tries, groups, sample, group, 16, model))
        placed.append(at)
        tries[at].add(sample)
        groups[at].add(group)
    assert placed == [0, 0, 0, 1, 1, 1, 1]
    assert [trie.num_tokens for trie in tries] == [16, 16]
    again = sample_of([*range(1, 9), 300, 301], [9])
    assert place(offers_of(tries, groups, again, 0, 16, model)) is None
