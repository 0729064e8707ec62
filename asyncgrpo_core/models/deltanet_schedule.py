"""How a recurrent layer goes over a row's prefix trie: what is gathered, and in which calls.

Everything is derived from the segments of a `RowPlan` once per row, and then used by all layers.

The causal convolution of a token reads the `kernel_size - 1` tokens before it *on its path*. In the row, those are the
tokens just before it, except at the start of a segment that does not follow its parent directly. A `ConvPatch`
recomputes only these few positions.

The recurrence goes from a segment to its children, so segments of one depth are computed together, and the number of
calls is the depth of the trie, not the number of its segments. Segments of very different length in one batch would
mostly compute padding: a depth is split into several calls where that is cheaper (`_split`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asyncgrpo_core.models.row_plan import RowPlan

# Cost of a call: its own fixed cost, and per chunk of 64 tokens one iteration of kernel launches besides the
# arithmetic of each segment in it. The unit is the arithmetic of one chunk of one segment. They are estimates for a
# GPU: a factor of two in either moves the chosen split little.
_CHUNK = 64
_CALL_COST = 16
_ITERATION_COST = 8


@dataclass(frozen=True)
class ConvPatch:
    """M windows of W = 2 (kernel_size - 1) tokens: the path before a segment's first token, then its first tokens."""

    sources: Tensor  # int64 [U], the distinct row indices that the windows read
    windows: Tensor  # int64 [M * W], index into `sources`
    missing: Tensor  # bool [M, W, 1], before the start of a root or after the end of a segment: zero
    results: Tensor  # int64 [P], index into the flattened [M * W] outputs
    positions: Tensor  # int64 [P], the row index that each result is for
    num_windows: int


@dataclass(frozen=True)
class Call:
    """B segments of one depth: right-padded to `length` tokens, or end to end when `cu_seqlens` says where they lie."""

    num_segments: int
    length: int  # padded: of the longest segment; end to end: of all of them
    start: int | None  # they are a slice of the row from here on, and not gathered
    index: Tensor | None  # int64 [B * length] or [length], row indices; padding reads some other token of the row
    padding: Tensor | None  # bool [B, length, 1]; None when there is none
    cu_seqlens: Tensor | None  # int64 [B + 1]
    initial: Tensor | None  # int64 [B], which of the states kept by the depth before; None at depth 0
    keep: Tensor | None  # int64, the segments of this call whose final state has a reader; None: nobody reads one


@dataclass(frozen=True)
class Schedule:
    """Calls by depth, in the order in which states are kept, and where every token of the row ends up."""

    depths: list[list[Call]]
    restore: Tensor | None  # int64 [T], index into the concatenated outputs of all calls; None: they are in row order

    @property
    def num_calls(self) -> int:
        return sum(len(calls) for calls in self.depths)


def conv_patch(plan: RowPlan, kernel_size: int) -> ConvPatch | None:
    """What a convolution over the plain row gets wrong; None when it gets everything right."""
    return plan.once(("conv patch", kernel_size), lambda: _build_conv_patch(plan, kernel_size))


def recurrence_schedule(plan: RowPlan, *, padded: bool) -> Schedule:
    """Padded batches, for a delta rule that takes equal lengths; else one call per depth, end to end."""
    return plan.once(("recurrence", padded), lambda: _build_schedule(plan, padded))


def _build_conv_patch(plan: RowPlan, kernel_size: int) -> ConvPatch | None:
    reach = kernel_size - 1
    offsets = _offsets(plan).tolist()
    tails: list[list[int]] = []  # of every segment, the last `reach` row indices of its path; -1 before the root
    windows: list[list[int]] = []
    heads: list[int] = []  # tokens of the segment itself in its window
    for s, parent in enumerate(plan.parents):
        start, length = offsets[s], plan.lengths[s]
        before = tails[parent] if parent >= 0 else [-1] * reach
        own = list(range(start, start + min(length, reach)))
        # The last `reach` tokens of a long segment are its own.
        last = list(range(start + length - reach, start + length)) if length >= reach else (before + own)[-reach:]
        tails.append(last if reach else [])
        if before != [i if i >= 0 else -1 for i in range(start - reach, start)]:
            windows.append(before + own + [-1] * (reach - len(own)))
            heads.append(len(own))
    if not windows:
        return None
    window = np.array(windows, np.int64)
    column = np.arange(2 * reach)[None]
    real = (column >= reach) & (column < reach + np.array(heads)[:, None])
    missing = window < 0
    sources, inverse = np.unique(np.where(missing, window.max(), window), return_inverse=True)
    return ConvPatch(
        sources=_to(sources, plan),
        windows=_to(inverse.reshape(-1), plan),
        missing=_to(missing[..., None], plan),
        results=_to(np.flatnonzero(real), plan),
        positions=_to(window[real], plan),
        num_windows=len(windows),
    )


def _build_schedule(plan: RowPlan, padded: bool) -> Schedule:
    depths: list[list[Call]] = []
    order: list[np.ndarray] = []  # row index of every output, padding as -1
    slots: dict[int, int] = {}  # of the segments of the depth before: where its final state is kept
    for segments, has_children in _by_depth(plan):
        kept: dict[int, int] = {}
        calls = []
        for members in _split(segments, plan.lengths) if padded else [segments]:
            rows = _padded_rows(members, plan) if padded else _joined_rows(members, plan)
            order.append(rows.reshape(-1))
            initial = [slots[plan.parents[s]] for s in members if plan.parents[s] >= 0]
            readers = [i for i, s in enumerate(members) if s in has_children]
            for i in readers:
                kept[members[i]] = len(kept)
            calls.append(_call(rows, members, initial, readers, plan))
        depths.append(calls)
        slots = kept
    return Schedule(depths, _restore(np.concatenate(order), plan))


def _call(rows: np.ndarray, members: list[int], initial: list[int], readers: list[int], plan: RowPlan) -> Call:
    flat, padded = rows.reshape(-1), rows.ndim == 2
    is_slice = (not padded or len(members) == 1) and np.array_equal(flat, np.arange(flat[0], flat[0] + len(flat)))
    # Padding reads tokens all over the row: a backward that adds the (zero) gradients of all padding at one index
    # would do so one after another.
    index = np.where(flat < 0, np.arange(len(flat)) % plan.num_tokens, flat)
    return Call(
        num_segments=len(members),
        length=rows.shape[-1],
        start=int(flat[0]) if is_slice else None,
        index=None if is_slice else _to(index, plan),
        padding=_to(rows[..., None] < 0, plan) if (rows < 0).any() else None,
        cu_seqlens=None if padded else _to(np.cumsum([0, *(plan.lengths[s] for s in members)]), plan),
        initial=_to(np.array(initial), plan) if initial else None,
        keep=_to(np.array(readers), plan) if readers else None,
    )


def _padded_rows(members: list[int], plan: RowPlan) -> np.ndarray:
    """int64 [B, longest], row indices; -1 is padding."""
    offsets = _offsets(plan)
    size = np.array([plan.lengths[s] for s in members])[:, None]
    column = np.arange(size.max())[None]
    return np.where(column < size, offsets[members][:, None] + column, -1)


def _joined_rows(members: list[int], plan: RowPlan) -> np.ndarray:
    offsets = _offsets(plan)
    return np.concatenate([np.arange(offsets[s], offsets[s] + plan.lengths[s]) for s in members])


def _by_depth(plan: RowPlan) -> list[tuple[list[int], set[int]]]:
    """For each depth its segments in row order, and those of them that have children."""
    depth: list[int] = []
    for parent in plan.parents:
        depth.append(0 if parent < 0 else depth[parent] + 1)
    found: list[tuple[list[int], set[int]]] = [([], set()) for _ in range(max(depth) + 1)]
    for s, parent in enumerate(plan.parents):
        found[depth[s]][0].append(s)
        if parent >= 0:
            found[depth[parent]][1].add(parent)
    return found


def _split(segments: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """Segments of one depth -> the calls of least cost, longest first (see the constants above).

    A call holds segments that are neighbours in length, so the best split is found by dynamic programming over the
    distinct numbers of chunks: at most sqrt(2 T / 64) of them in a row of T tokens.
    """
    ordered = sorted(segments, key=lambda s: -lengths[s])
    chunks = [-(-lengths[s] // _CHUNK) for s in ordered]
    cuts = [i for i in range(len(ordered)) if i == 0 or chunks[i] != chunks[i - 1]]
    cuts.append(len(ordered))
    best, previous = [0], [0]
    for end in range(1, len(cuts)):
        costs = [best[i] + _CALL_COST + chunks[cuts[i]] * (_ITERATION_COST + cuts[end] - cuts[i]) for i in range(end)]
        previous.append(min(range(end), key=costs.__getitem__))
        best.append(costs[previous[-1]])
    calls: list[list[int]] = []
    end = len(cuts) - 1
    while end:
        calls.append(ordered[cuts[previous[end]] : cuts[end]])
        end = previous[end]
    return calls[::-1]


def _restore(order: np.ndarray, plan: RowPlan) -> Tensor | None:
    """order[i]: row index of output i, -1 for padding. Its inverse; None when outputs and row are the same."""
    if np.array_equal(order, np.arange(plan.num_tokens)):
        return None
    restore = np.empty(plan.num_tokens, np.int64)
    restore[order[order >= 0]] = np.flatnonzero(order >= 0)
    return _to(restore, plan)


def _offsets(plan: RowPlan) -> np.ndarray:
    return np.cumsum([0, *plan.lengths])[:-1]


def _to(array: np.ndarray, plan: RowPlan) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(plan.device)
