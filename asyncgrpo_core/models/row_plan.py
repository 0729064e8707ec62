"""Who sees whom in a row: the segments of its prefix trie, and what each attention back end derives from them.

    cu_segments  0     2        5        8      segment s is the row indices [cu_segments[s], cu_segments[s + 1])
    parents     -1     0        0               it continues segment parents[s]; -1 is a root
    starts       0     2        2               position of its first token inside every sample that passes through it

Segments come depth first, a parent before its children, so the descendants of a segment are consecutive. A token sees
itself and what precedes it on the path to its root: token k is visible to token q exactly when

    k <= q < subtree_end[k]                     subtree_end[k]: the row index where the subtree of k's segment ends

and, in a layer with a sliding window of w tokens, position[q] - position[k] < w. A row without shared tokens has roots
only: ordinary padding-free packing, with nothing gathered.

A plan is built once per forward and shared by all layers. Everything derived is made when first asked for.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

# A bucket takes segments of at least this share of its longest one, or this few tokens shorter: padding costs
# arithmetic, a bucket more costs kernel calls.
_MIN_LENGTH_SHARE = 0.75
_MIN_LENGTH_SLACK = 8
_WHOLE = (slice(None), slice(None))  # of a bucket: all segments, all queries


@dataclass(frozen=True)
class Bucket:
    """B segments of similar size, queries padded to Q and keys to K tokens. Padding repeats row index 0.

    The keys of a segment are its whole path; query i of it is at position `starts + i` of that path, so padded keys
    lie after everything that a real query sees.
    """

    query_index: Tensor  # int64 [B, Q]
    key_index: Tensor  # int64 [B, K]
    starts: Tensor  # int64 [B]
    last_start: int  # the largest of them
    causal: bool  # all of them are roots: the plain causal mask fits
    masks: dict[Any, Tensor] = field(default_factory=dict, repr=False)  # additive masks, by (dtype, window)

    def visible(self, window: int | None, part: tuple[slice, slice] = _WHOLE) -> Tensor:
        """bool [B, Q, K]: which key each query sees; of a `part`, those segments and queries with the keys they need.

        A padding query sees at least one key: kernels differ in what they make of one that sees none.
        """
        segments, queries = part
        device, num_keys = self.starts.device, self.keys_of(queries)
        places = torch.arange(self.query_index.shape[1], device=device)[queries]
        position = (self.starts[segments, None] + places).clamp_max_(num_keys - 1)[..., None]
        keys = torch.arange(num_keys, device=device)
        seen = keys <= position
        return seen if window is None else seen.logical_and_(keys > position - window)

    def keys_of(self, queries: slice) -> int:
        """How many keys, from the first on, these queries need."""
        num_queries, num_keys = self.query_index.shape[1], self.key_index.shape[1]
        return min(num_keys, self.last_start + min(num_queries, num_queries if queries.stop is None else queries.stop))

    def additive_mask(self, dtype: torch.dtype, window: int | None) -> Tensor:
        """[B, 1, Q, K], 0 where visible and -inf elsewhere; kept, since every layer asks for the same."""
        if (dtype, window) not in self.masks:
            self.masks[dtype, window] = additive(self.visible(window), dtype)
        return self.masks[dtype, window]


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """bool [B, Q, K] -> [B, 1, Q, K], 0 where true and -inf elsewhere."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)[:, None]


class RowPlan:
    """The segments of one row (module docstring). Counts and offsets are in tokens of the row.

    No dataclass: FSDP rebuilds those among a layer's arguments to cast their tensors, and every layer would get a plan
    of its own and derive everything anew.

    Attributes:
        cu_segments: int32 [S + 1], on the model's device.
        parents, lengths, starts: of the S segments.
        backend: which of models/attention_backends computes attention.
    """

    def __init__(
        self, cu_segments: Tensor, parents: list[int], lengths: list[int], starts: list[int], backend: str = "sdpa"
    ) -> None:
        self.cu_segments, self.parents, self.lengths, self.starts = cu_segments, parents, lengths, starts
        self.backend = backend
        self._derived: dict[Any, Any] = {}

    @classmethod
    def from_segments(cls, cu_segments: Tensor, parents: Tensor | None = None, backend: str = "sdpa") -> RowPlan:
        """One device-to-host copy on a GPU. Without `parents` every segment is a root.

        Raises:
            ValueError: offsets that do not start at 0 or do not grow, a parent that does not come before its child,
                or segments that are not in depth-first order.
        """
        if parents is None:
            parents = torch.full((len(cu_segments) - 1,), -1, device=cu_segments.device)
        values = torch.cat((cu_segments.to(torch.int64), parents.to(torch.int64))).tolist()
        offsets, above = values[: len(cu_segments)], values[len(cu_segments) :]
        lengths = [b - a for a, b in itertools.pairwise(offsets)]
        if not lengths or offsets[0] != 0 or min(lengths) < 1:
            raise ValueError(f"cu_segments must start at 0 and grow strictly, got {offsets[:8]}")
        if len(above) != len(lengths):
            raise ValueError(f"{len(lengths)} segments have {len(above)} parents")
        return cls(cu_segments.to(torch.int32), above, lengths, _starts(lengths, above), backend)

    # Layers ask for these: a sum over thousands of segments in each of them would add up.
    @functools.cached_property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def used(self) -> bool:
        """Whether any layer has asked for what it computes with."""
        return bool(self._derived)

    @property
    def device(self) -> torch.device:
        return self.cu_segments.device

    @property
    def roots_only(self) -> bool:
        """No token is shared: every segment is a whole sample."""
        return max(self.parents) < 0

    @functools.cached_property
    def max_length(self) -> int:
        return max(self.lengths)

    @functools.cached_property
    def max_path(self) -> int:
        """The longest path from a root to the end of a segment: the longest sample."""
        return max(start + length for start, length in zip(self.starts, self.lengths, strict=True))

    def paths(self) -> list[np.ndarray]:
        """Of every segment the row indices from its root to its own end, int64."""
        return self.once("paths", self._build_paths)

    def gathered_keys(self) -> tuple[Tensor | None, Tensor]:
        """For attention over contiguous keys: the paths of all segments, end to end.

        Returns:
            index: int64 [K] on the device; None for a row of roots, whose keys lie there already.
            cu_keys: int32 [S + 1] on the device: segment s sees [cu_keys[s], cu_keys[s + 1]) causally from its end.
        """
        return self.once("gathered_keys", self._build_gathered_keys)

    def subtree_ends(self) -> np.ndarray:
        """int64 [T], `subtree_end` of the module docstring."""
        return self.once("subtree_ends", self._build_subtree_ends)

    def positions(self) -> np.ndarray:
        """int64 [T], index of each token inside its samples."""
        offsets = np.cumsum([0, *self.lengths])[:-1]
        return np.arange(self.num_tokens) - np.repeat(offsets - np.array(self.starts), self.lengths)

    def buckets(self) -> tuple[list[Bucket], Tensor]:
        """The buckets, and for every token of the row its index in their flattened queries."""
        return self.once("buckets", self._build_buckets)

    def once(self, name: Any, build: Callable[[], Any]) -> Any:
        """What `build` returned the first time that this plan was asked for `name`."""
        if name not in self._derived:
            self._derived[name] = build()
        return self._derived[name]

    def _build_paths(self) -> list[np.ndarray]:
        offsets = np.cumsum([0, *self.lengths]).tolist()
        paths: list[np.ndarray] = []
        for s, parent in enumerate(self.parents):
            own = np.arange(offsets[s], offsets[s + 1])
            paths.append(own if parent < 0 else np.concatenate((paths[parent], own)))
        return paths

    def _build_gathered_keys(self) -> tuple[Tensor | None, Tensor]:
        if self.roots_only:
            return None, self.cu_segments
        paths = self.paths()
        cu_keys = torch.from_numpy(np.cumsum([0, *map(len, paths)]).astype(np.int32))
        return torch.from_numpy(np.concatenate(paths)).to(self.device), cu_keys.to(self.device)

    def _build_subtree_ends(self) -> np.ndarray:
        offsets = np.cumsum([0, *self.lengths])
        ends = offsets[1:].copy()
        for s in range(len(ends) - 1, -1, -1):  # children after parents: their subtrees are complete when met
            if self.parents[s] >= 0:
                ends[self.parents[s]] = max(ends[self.parents[s]], ends[s])
        return np.repeat(ends, self.lengths)

    def _build_buckets(self) -> tuple[list[Bucket], Tensor]:
        paths = self.paths()
        restore = np.empty(self.num_tokens, np.int64)
        buckets, offset = [], 0
        for members in _similar(self.lengths, self.starts):
            num_queries = max(self.lengths[s] for s in members)
            num_keys = max(len(paths[s]) for s in members)
            queries = np.zeros((len(members), num_queries), np.int64)
            keys = np.zeros((len(members), num_keys), np.int64)
            for row, s in enumerate(members):
                own = paths[s][self.starts[s] :]
                queries[row, : len(own)] = own
                keys[row, : len(paths[s])] = paths[s]
                restore[own] = offset + row * num_queries + np.arange(len(own))
            buckets.append(
                Bucket(
                    torch.from_numpy(queries).to(self.device),
                    torch.from_numpy(keys).to(self.device),
                    torch.tensor([self.starts[s] for s in members], device=self.device),
                    max(self.starts[s] for s in members),
                    all(self.starts[s] == 0 for s in members),
                )
            )
            offset += queries.size
        return buckets, torch.from_numpy(restore).to(self.device)


def _starts(lengths: list[int], parents: list[int]) -> list[int]:
    starts: list[int] = []
    path: list[int] = []  # segments from the root to the last one
    for s, parent in enumerate(parents):
        if not -1 <= parent < s:
            raise ValueError(f"segment {s} has parent {parent}, which does not come before it")
        while path and path[-1] != parent:
            path.pop()
        if parent >= 0 and not path:
            raise ValueError(f"segment {s} continues segment {parent}, whose subtree has ended: not depth first")
        starts.append(0 if parent < 0 else starts[parent] + lengths[parent])
        path.append(s)
    return starts


def _similar(lengths: list[int], starts: list[int]) -> list[list[int]]:
    """Segment numbers in groups of similar query and key counts; roots apart, whose mask is the plain causal one."""
    groups: list[list[int]] = []
    shapes: list[tuple[bool, int, int]] = []  # is it of roots; queries and keys of its first, largest segment
    order = sorted(range(len(lengths)), key=lambda s: (starts[s] + lengths[s], lengths[s]), reverse=True)
    for s in order:
        root, queries, keys = starts[s] == 0, lengths[s], starts[s] + lengths[s]
        for group, (of_roots, most_queries, most_keys) in zip(groups, shapes, strict=True):
            if of_roots == root and _near(keys, most_keys) and _near(queries, most_queries):
                group.append(s)
                break
        else:
            groups.append([s])
            shapes.append((root, queries, keys))
    return groups


def _near(a: int, b: int) -> bool:
    low, high = min(a, b), max(a, b)
    return low >= _MIN_LENGTH_SHARE * high or low >= high - _MIN_LENGTH_SLACK
