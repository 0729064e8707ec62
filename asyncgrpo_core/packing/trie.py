"""The prefix trie of one row: a token shared by several samples is forwarded once (reference, 'Tree packing').

Two rollouts r0 = p1 p2 p3 a1 a2 and r1 = p1 p2 p3 b1 b2 make three segments and 8 tokens instead of 10:

    [p1 p2] -+- [p3 a1 a2]       p3 is not shared: a position predicts one token, and p3 predicts a1 or b1
             +- [p3 b1 b2]

The rule: position p of two samples is one node exactly when they agree on tokens 0 .. p and on what follows, which
is the same token p + 1 or, in both, the end. So

- samples fork one token before they diverge, whether or not the tokens that follow are trained;
- a sample that is a prefix of another keeps its last token to itself (nothing follows it there);
- identical samples share every node. Each of them still brings its own loss terms: two terms may read one position,
  always with the same target token, each with its own advantage and sampler log-probability;
- a sample is the concatenation of whole segments on one path from a root, and ends at the end of one.

A segment is a run of nodes without a branch, kept as a slice of the first sample that made it. Python touches
segments (at most two per sample), numpy touches tokens: placing a sample costs O(its tokens), whatever the row holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from asyncgrpo_core.errors import DataError
from asyncgrpo_core.types import TrainingSample

if TYPE_CHECKING:  # the planner builds on the trie
    from asyncgrpo_core.packing.planner import CostModel

_END = -1  # what follows the last token of a sample; no token has this id


@dataclass(eq=False, slots=True)
class Segment:
    """Positions [start, end) of every sample below it; `tokens` is one of those samples, whole."""

    tokens: np.ndarray
    start: int
    end: int
    parent: Segment | None
    children: dict[tuple[int, int], Segment] = field(default_factory=dict)  # (first token, the one after it) -> child

    def path(self) -> list[Segment]:
        """The segments from the root segment to this one."""
        found: list[Segment] = []
        at: Segment | None = self
        while at is not None and at.parent is not None:  # the empty segment above the roots is no part of the row
            found.append(at)
            at = at.parent
        return found[::-1]


class _Match(NamedTuple):
    shared: int  # leading positions of the sample that the trie already has
    segment: Segment  # where the last of them lies (the empty top segment when there is none)


class PrefixTrie:
    """The samples of one row as a prefix trie.

        trie = PrefixTrie()
        if trie.fits(sample, token_budget):
            trie.add(sample)

    The token arrays are kept, not copied: they must not change while the trie is used.
    """

    def __init__(self) -> None:
        self.samples: list[TrainingSample] = []
        self.leaves: list[Segment] = []  # of each sample, the segment it ends with
        self.num_tokens = 0  # forwarded tokens: each shared token once
        self.num_trained = 0  # loss terms: those of every sample, shared or not
        self._top = Segment(np.empty(0, np.int32), 0, 0, None)
        self._last: tuple[np.ndarray, _Match] | None = None  # asking about a sample and then adding it is one walk

    def shared_tokens(self, sample: TrainingSample) -> int:
        """How many leading tokens of `sample` the row already holds.

        Raises:
            DataError: the sample has no tokens.
        """
        return self._match(sample).shared

    def added_tokens(self, sample: TrainingSample) -> int:
        """How many tokens the row grows by if it takes `sample`; 0 for one that it holds already. Raises as above."""
        return sample.sequence.num_tokens - self._match(sample).shared

    def fits(self, sample: TrainingSample, budget: int) -> bool:
        """Would both the row's unique tokens and its loss terms stay within `budget`?

        Without the second bound, a row whose samples share everything would never be full. Raises as above.
        """
        terms = self.num_trained + int(np.count_nonzero(sample.sequence.loss_mask))
        return terms <= budget and self.num_tokens + self.added_tokens(sample) <= budget

    def added_cost(self, sample: TrainingSample, model: CostModel) -> float:
        """By how much `cost` grows if the row takes `sample`. Raises as above.

        New positions see all positions before them, so they cost a lone sample less its shared prefix alone.
        """
        return model.sample_cost(sample.sequence.num_tokens) - model.sample_cost(self._match(sample).shared)

    def cost(self, model: CostModel) -> float:
        """The row's forward and backward in the model's units: queries x visible keys, plus the linear part."""
        return sum(model.sample_cost(s.end) - model.sample_cost(s.start) for s in self.segments())

    def add(self, sample: TrainingSample) -> None:
        """Take `sample` into the row. Raises as above."""
        shared, segment = self._match(sample)
        tokens = sample.sequence.token_ids
        if shared < len(tokens):
            parent = segment if shared == segment.end else self._split(segment, shared)
            segment = Segment(tokens, shared, len(tokens), parent)
            parent.children[_key(tokens, shared)] = segment
        self.leaves.append(segment)
        self.samples.append(sample)
        self.num_tokens += len(tokens) - shared
        self.num_trained += int(np.count_nonzero(sample.sequence.loss_mask))
        self._last = None

    def segments(self) -> Iterator[Segment]:
        """Depth first, children in the order in which they were first seen: the order of the row."""
        stack = list(self._top.children.values())[::-1]
        while stack:
            segment = stack.pop()
            yield segment
            if segment.children:
                stack.extend(list(segment.children.values())[::-1])

    def _match(self, sample: TrainingSample) -> _Match:
        tokens = sample.sequence.token_ids
        if self._last is None or self._last[0] is not tokens:
            if len(tokens) == 0:
                raise DataError(
                    f"sample {sample.sample_id} of slot {tuple(sample.slot)} has no tokens.",
                    "Check the loop that built the sequence.",
                )
            self._last = (tokens, self._walk(tokens))
        return self._last[1]

    def _walk(self, tokens: np.ndarray) -> _Match:
        n, depth, segment = len(tokens), 0, self._top
        while depth < n:
            child = segment.children.get(_key(tokens, depth))
            if child is None:
                return _Match(depth, segment)
            # A node is its token and the next one: compare one token past the segment, where both have one.
            theirs = child.tokens
            stop = min(child.end + 1, n, len(theirs))
            differs = tokens[depth + 1 : stop] != theirs[depth + 1 : stop]
            first = int(differs.argmax()) if len(differs) else 0
            if len(differs) and differs[first]:
                return _Match(depth + first, child)  # the token before the first difference has another successor
            if stop <= child.end and n != len(theirs):  # one of them ends here and the other goes on
                return _Match(stop - 1, child)
            depth, segment = child.end, child
        return _Match(depth, segment)

    def _split(self, segment: Segment, depth: int) -> Segment:
        """Cut before position `depth`; the lower part stays the same object, since samples end with it."""
        assert segment.parent is not None
        upper = Segment(segment.tokens, segment.start, depth, segment.parent)
        upper.parent.children[_key(segment.tokens, segment.start)] = upper  # type: ignore[union-attr]
        upper.children[_key(segment.tokens, depth)] = segment
        segment.start, segment.parent = depth, upper
        return upper


def _key(tokens: np.ndarray, position: int) -> tuple[int, int]:
    following = int(tokens[position + 1]) if position + 1 < len(tokens) else _END
    return int(tokens[position]), following


class RowOffer(NamedTuple):
    """What one row of the open micro-batch says about a sample that is to be placed."""

    holds_group: bool  # a sample of the same group is in it
    has_room: bool  # `PrefixTrie.fits`
    empty: bool  # it holds no sample yet
    cost: float  # of the row as it is
    cost_with: float  # of the row with the sample


def place(offers: Sequence[RowOffer]) -> int | None:
    """Index of the row that a sample goes to; None when the micro-batch has to close first (reference, 'Tree packing').

    1. Rows that hold its group and have room: there its prompt is paid for already.
    2. No row holds its group: any row with room.
    3. Its group's rows are full: an empty row (no rank may be left without work), or else a row with room that stays
       at or below the most loaded one, which sets the micro-batch's time. Otherwise it is cheaper to close: the
       sample shares its prompt with the rest of its group in the next micro-batch.

    Among several, the row that is cheapest with the sample in it; among equals, the first.
    """
    room = [i for i, offer in enumerate(offers) if offer.has_room]
    home = [i for i in room if offers[i].holds_group]
    if not home and any(offer.holds_group for offer in offers):
        most_loaded = max(offer.cost for offer in offers)
        empty = [i for i in room if offers[i].empty]
        room = empty or [i for i in room if offers[i].cost_with <= most_loaded]
    return min(home or room, key=lambda i: offers[i].cost_with, default=None)
