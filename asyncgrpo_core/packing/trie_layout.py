"""A prefix trie -> the arrays of its row, in depth-first order (reference, 'Tree packing').

    row index         0  1 | 2  3  4 | 5  6  7
    input_ids         p1 p2| p3 a1 a2| p3 b1 b2
    position_ids      0  1 | 2  3  4 | 2  3  4
    segment           0      1         2           parents -1 0 0
    target_positions         2  3      5  6        a trained token is predicted at the index of the one before it
    target_ids               a1 a2     b1 b2

Loss terms are in sample order, and by position inside a sample: the order of `pack_row`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from asyncgrpo_core.errors import DataError
from asyncgrpo_core.packing.trie import PrefixTrie
from asyncgrpo_core.types import TrainingSample


@dataclass(frozen=True)
class TreeLayout:
    """One row. T forwarded tokens, S segments, N loss terms, B samples; all arrays int64.

    Row indices of a segment are consecutive, and a parent comes before its children.
    """

    input_ids: np.ndarray  # [T]
    position_ids: np.ndarray  # [T], the index of the token in each of its samples
    cu_segments: np.ndarray  # [S + 1]: segment s is the row indices [cu_segments[s], cu_segments[s + 1])
    parents: np.ndarray  # [S], -1 for a root
    leaves: np.ndarray  # [B], the segment that the sample ends with; identical samples have the same one
    target_positions: np.ndarray  # [N], row index whose hidden state predicts the target
    target_ids: np.ndarray  # [N]
    sample_index: np.ndarray  # [N], 0 .. B - 1

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    def path(self, segment: int) -> np.ndarray:
        """Row indices that the last token of `segment` sees, itself included: all tokens from the root to it."""
        pieces = []
        while segment >= 0:
            pieces.append(np.arange(self.cu_segments[segment], self.cu_segments[segment + 1]))
            segment = int(self.parents[segment])
        return np.concatenate(pieces[::-1])

    def sample_tokens(self, sample: int) -> np.ndarray:
        """Row index of each token of `sample`, [its tokens]; `input_ids` there are the sample."""
        return self.path(int(self.leaves[sample]))


def lay_out(trie: PrefixTrie) -> TreeLayout:
    """The row of a trie. A trie without samples gives a row of no tokens (a rank without work needs a filler token).

    Raises:
        DataError: the first token of a sample is trained (nothing predicts it), or its loss mask has another length.
    """
    order = list(trie.segments())
    number = {id(segment): i for i, segment in enumerate(order)}
    starts = np.array([s.start for s in order], np.int64)
    lengths = np.array([s.end for s in order], np.int64) - starts
    cu_segments = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    shift = cu_segments[:-1] - starts  # of a segment: row index minus position
    target_positions, target_ids, counts = _loss_terms(trie, shift, number)
    return TreeLayout(
        input_ids=_join([s.tokens[s.start : s.end] for s in order]),
        position_ids=np.arange(cu_segments[-1]) - np.repeat(shift, lengths),
        cu_segments=cu_segments,
        parents=np.array([number.get(id(s.parent), -1) for s in order], np.int64),
        leaves=np.array([number[id(leaf)] for leaf in trie.leaves], np.int64),
        target_positions=target_positions,
        target_ids=target_ids,
        sample_index=np.repeat(np.arange(len(counts)), counts),
    )


def tree_layout(samples: Iterable[TrainingSample]) -> TreeLayout:
    """The row of `samples`, taken in this order. Raises as `lay_out`, and for a sample without tokens."""
    trie = PrefixTrie()
    for sample in samples:
        trie.add(sample)
    return lay_out(trie)


def key_value_index(layout: TreeLayout) -> tuple[np.ndarray, np.ndarray]:
    """What attention over contiguous keys gathers: the path of every segment, laid end to end.

    Returns:
        index: int64 [K], row index of each key and value; K is the sum over segments of their last position + 1.
        cu_seqlens: int64 [S + 1]; segment s sees [cu_seqlens[s], cu_seqlens[s + 1]) of it, causally from its end.
    """
    paths: list[np.ndarray] = []
    bounds = layout.cu_segments.tolist()
    for segment, parent in enumerate(layout.parents.tolist()):
        own = np.arange(bounds[segment], bounds[segment + 1])
        paths.append(own if parent < 0 else np.concatenate([paths[parent], own]))
    return _join(paths), np.cumsum([0] + [len(path) for path in paths], dtype=np.int64)


def _loss_terms(
    trie: PrefixTrie, shift: np.ndarray, number: dict[int, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Row indices that predict the trained tokens, those tokens, and how many each sample has.

    Works on all samples laid end to end ("flat"), so that short samples do not cost a dozen numpy calls each.
    """
    for sample in trie.samples:
        _check_mask(sample)
    flat_starts = np.cumsum([0] + [s.sequence.num_tokens for s in trie.samples], dtype=np.int64)
    masks = [s.sequence.loss_mask for s in trie.samples]
    trained = np.flatnonzero(np.concatenate(masks)) if masks else np.empty(0, np.int64)
    counts = np.diff(np.searchsorted(trained, flat_starts))
    # the pieces of every sample's path, with their flat ends: a position lies in the first piece that ends after it
    paths = [leaf.path() for leaf in trie.leaves]
    pieces = np.array([number[id(segment)] for path in paths for segment in path], np.int64)
    ends = np.array([segment.end for path in paths for segment in path], np.int64)
    sizes = [len(path) for path in paths]
    before = trained - 1
    piece = np.searchsorted(ends + np.repeat(flat_starts[:-1], sizes), before, side="right")
    positions = before - np.repeat(flat_starts[:-1], counts)
    return positions + shift[pieces[piece]], _join([s.sequence.token_ids for s in trie.samples])[trained], counts


def _check_mask(sample: TrainingSample) -> None:
    tokens, mask = sample.sequence.token_ids, sample.sequence.loss_mask
    if len(mask) != len(tokens):
        raise DataError(
            f"sample {sample.sample_id} of slot {tuple(sample.slot)}: token_ids and loss_mask have {len(tokens)} and "
            f"{len(mask)} entries.",
            "They must be equal; check the loop that built the sequence.",
        )
    if mask[0]:
        raise DataError(
            f"sample {sample.sample_id} of slot {tuple(sample.slot)}: its first token is trained.",
            "Nothing predicts it; start with a prompt token.",
        )


def _join(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts, dtype=np.int64, casting="safe") if parts else np.empty(0, np.int64)
