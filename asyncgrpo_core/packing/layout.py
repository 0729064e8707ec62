"""Samples of one rank -> the tensors of one row: a prefix trie, depth first, no padding token.

On two samples with prompt p and completions a and b (trie.py says why p3 is there twice):

    index             0  1 | 2  3  4 | 5  6  7
    input_ids         p1 p2| p3 a1 a2| p3 b1 b2
    position_ids      0  1 | 2  3  4 | 2  3  4
    cu_segments       0      2         5         8    segment s is [cu_segments[s], cu_segments[s + 1])
    parents           -1     0         0              it continues segment parents[s]
    target_positions         2  3      5  6           the index whose hidden state predicts the trained token
    target_ids               a1 a2     b1 b2

Everything per trained token is one flat tensor of N entries, in sample order, so that neither the language-model head
nor the loss ever visits an untrained position. Samples that share nothing give one segment each: ordinary packing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NotRequired, TypedDict

import numpy as np
import torch

from asyncgrpo_core.errors import DataError
from asyncgrpo_core.packing.candidates import row_candidates
from asyncgrpo_core.packing.trie_layout import tree_layout
from asyncgrpo_core.types import TopLogprobs, TrainingSample


class PackedRow(TypedDict):
    """One row. T forwarded tokens, S samples, N trained tokens, k top tokens of the sampler per position."""

    input_ids: torch.Tensor  # int64 [1, T]
    position_ids: torch.Tensor  # int64 [1, T], the token's index in each of its samples
    cu_segments: torch.Tensor  # int32 [G + 1], G segments
    parents: torch.Tensor  # int64 [G], -1 for a root; a parent comes before its children
    target_positions: torch.Tensor  # int64 [N], index into T
    target_ids: torch.Tensor  # int64 [N]
    sampler_logprobs: torch.Tensor  # float32 [N]
    advantages: torch.Tensor  # float32 [N]
    sample_index: torch.Tensor  # int64 [N], 0 .. S - 1
    top_ids: torch.Tensor  # int64 [N, k], -1 where the sampler reported fewer
    top_logprobs: torch.Tensor  # float32 [N, k], -inf there
    candidate_ids: NotRequired[torch.Tensor]  # int64 [C]; both only where top-k, top-p or min-p restricts sampling:
    candidate_offsets: NotRequired[torch.Tensor]  # int64 [N + 1], the set of each loss term (candidates.py)


# Token of a row without samples. Any id of any vocabulary would do: nothing is trained on it.
_FILLER_ID = 0


def pack_row(samples: Sequence[TrainingSample], num_sampler_logprobs: int) -> PackedRow:
    """Lay one rank's samples out as a row.

    Args:
        samples: the samples in row order. None at all gives a row of one untrained token, so that a rank without
            work still takes part in the micro-batch's collectives (its loss is 0 and attached to the parameters).
        num_sampler_logprobs: k, the sampler's top tokens per position used by score centering; 0 without it.

    Raises:
        DataError: a sample's arrays disagree in length, its first token is trained (nothing predicts it), it lacks
            the sampler's top log-probabilities although k > 0, or its candidate sets cannot be (`row_candidates`).
    """
    for sample in samples:
        _check_sample(sample, num_sampler_logprobs)
    tree = tree_layout(samples)
    trained = [np.flatnonzero(sample.sequence.loss_mask) for sample in samples]
    counts = [len(t) for t in trained]
    tops = [
        _top_arrays(sample.sequence.top, n, num_sampler_logprobs) for sample, n in zip(samples, counts, strict=True)
    ]
    logprobs = [sample.sequence.sampler_logprobs[t] for sample, t in zip(samples, trained, strict=True)]
    k = num_sampler_logprobs
    empty = not len(samples)
    row = PackedRow(
        input_ids=torch.from_numpy(np.array([_FILLER_ID]) if empty else tree.input_ids)[None],
        position_ids=torch.from_numpy(np.array([0]) if empty else tree.position_ids)[None],
        cu_segments=torch.from_numpy(np.array([0, 1]) if empty else tree.cu_segments).to(torch.int32),
        parents=torch.from_numpy(np.array([-1]) if empty else tree.parents),
        target_positions=torch.from_numpy(tree.target_positions),
        target_ids=torch.from_numpy(tree.target_ids),
        sampler_logprobs=torch.from_numpy(_join(logprobs, np.float32)),
        advantages=torch.from_numpy(np.repeat([s.advantage for s in samples], counts).astype(np.float32)),
        sample_index=torch.from_numpy(tree.sample_index),
        top_ids=torch.from_numpy(_join([ids for ids, _ in tops], np.int64, (0, k))),
        top_logprobs=torch.from_numpy(_join([values for _, values in tops], np.float32, (0, k))),
    )
    candidates = row_candidates(samples, tree.target_ids, row["top_ids"].numpy(), tree.sample_index)
    if candidates is not None:
        row["candidate_ids"], row["candidate_offsets"] = map(torch.from_numpy, candidates)
    return row


def _join(parts: list[np.ndarray], dtype: type, empty_shape: tuple[int, ...] = (0,)) -> np.ndarray:
    """Concatenate along the first axis; no part at all gives an empty array of the right shape."""
    if not parts:
        return np.empty(empty_shape, dtype=dtype)
    return np.concatenate(parts).astype(dtype)


def _top_arrays(top: TopLogprobs | None, num_trained: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k most likely reported tokens of each trained position, padded with id -1 and log-probability -inf.

    A server that reports the sampled token beside its top k gives k + 1 columns; the head is the top k only.
    """
    if k == 0 or top is None:
        return np.empty((num_trained, 0), np.int64), np.empty((num_trained, 0), np.float32)
    ids, values = top.ids, top.logprobs
    if ids.shape[1] > k:
        best = np.argsort(-values, axis=1, kind="stable")[:, :k]
        ids, values = np.take_along_axis(ids, best, axis=1), np.take_along_axis(values, best, axis=1)
    pad = ((0, 0), (0, k - ids.shape[1]))
    ids = np.pad(ids.astype(np.int64), pad, constant_values=-1)
    values = np.pad(values.astype(np.float32), pad, constant_values=-np.inf)
    return ids, np.where(ids < 0, -np.inf, values)


def _check_sample(sample: TrainingSample, num_sampler_logprobs: int) -> None:
    seq, name = sample.sequence, f"sample {sample.sample_id} of slot {tuple(sample.slot)}"
    if not len(seq.token_ids) == len(seq.loss_mask) == len(seq.sampler_logprobs) or seq.num_tokens == 0:
        raise DataError(
            f"{name}: token_ids, loss_mask and sampler_logprobs have {len(seq.token_ids)}, {len(seq.loss_mask)} and "
            f"{len(seq.sampler_logprobs)} entries.",
            "They must be equal and not 0; check the loop that built the sequence.",
        )
    if seq.loss_mask[0]:
        raise DataError(f"{name}: its first token is trained.", "Nothing predicts it; start with a prompt token.")
    if num_sampler_logprobs and (seq.top is None or len(seq.top) != seq.num_trained):
        got = "no" if seq.top is None else f"{len(seq.top)} rows of"
        raise DataError(
            f"{name}: {got} top log-probabilities for {seq.num_trained} trained tokens; score centering needs one "
            "row each.",
            "Return output_sampler_logprobs for every generated token, or set score_centering=False.",
        )
