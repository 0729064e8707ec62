"""Samples of one rank -> the tensors of one row ("padding-free": concatenated, no padding token).

On two samples, prompt p and completions a and b:

    index           0  1  2  3  4 | 5  6  7
    input_ids       p1 p2 p3 a1 a2| p1 p2 b1
    position_ids    0  1  2  3  4 | 0  1  2
    cu_seqlens      0               5        8      segment s is [cu_seqlens[s], cu_seqlens[s + 1])
    target_positions      2  3         6            the index whose hidden state predicts the trained token
    target_ids            a1 a2        b1

Everything per trained token is one flat tensor of N entries in row order, so that neither the language-model head
nor the loss ever visits an untrained position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import numpy as np
import torch

from asyncgrpo_core.errors import DataError
from asyncgrpo_core.types import TopLogprobs, TrainingSample


class PackedRow(TypedDict):
    """One row. T forwarded tokens, S samples, N trained tokens, k top tokens of the sampler per position."""

    input_ids: torch.Tensor  # int64 [1, T]
    position_ids: torch.Tensor  # int64 [1, T], counted inside each sample
    cu_seqlens: torch.Tensor  # int32 [S + 1]
    target_positions: torch.Tensor  # int64 [N], index into T
    target_ids: torch.Tensor  # int64 [N]
    sampler_logprobs: torch.Tensor  # float32 [N]
    advantages: torch.Tensor  # float32 [N]
    sample_index: torch.Tensor  # int64 [N], 0 .. S - 1
    top_ids: torch.Tensor  # int64 [N, k], -1 where the sampler reported fewer
    top_logprobs: torch.Tensor  # float32 [N, k], -inf there


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
            the sampler's top log-probabilities although k > 0, or it carries candidate sets (top-k/top-p sampling).
    """
    for sample in samples:
        _check_sample(sample, num_sampler_logprobs)
    lengths = [sample.sequence.num_tokens for sample in samples] or [1]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    trained = [np.flatnonzero(sample.sequence.loss_mask) for sample in samples]
    targets = _join([t + start for t, start in zip(trained, starts[:-1], strict=False)], np.int64)
    counts = [len(t) for t in trained]
    token_ids = _join([sample.sequence.token_ids for sample in samples], np.int64)
    if not samples:
        token_ids = np.array([_FILLER_ID], dtype=np.int64)
    tops = [
        _top_arrays(sample.sequence.top, n, num_sampler_logprobs) for sample, n in zip(samples, counts, strict=True)
    ]
    logprobs = [sample.sequence.sampler_logprobs[t] for sample, t in zip(samples, trained, strict=True)]
    positions = np.concatenate([np.arange(n, dtype=np.int64) for n in lengths])
    k = num_sampler_logprobs
    return PackedRow(
        input_ids=torch.from_numpy(token_ids)[None],
        position_ids=torch.from_numpy(positions)[None],
        cu_seqlens=torch.from_numpy(starts.astype(np.int32)),
        target_positions=torch.from_numpy(targets - 1),
        target_ids=torch.from_numpy(token_ids[targets]),
        sampler_logprobs=torch.from_numpy(_join(logprobs, np.float32)),
        advantages=torch.from_numpy(np.repeat([s.advantage for s in samples], counts).astype(np.float32)),
        sample_index=torch.from_numpy(np.repeat(np.arange(len(samples)), counts).astype(np.int64)),
        top_ids=torch.from_numpy(_join([ids for ids, _ in tops], np.int64, (0, k))),
        top_logprobs=torch.from_numpy(_join([values for _, values in tops], np.float32, (0, k))),
    )


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
    if seq.sampling_mask is not None:
        raise DataError(
            f"{name} was sampled from candidate sets (top-k, top-p or min-p).",
            "Packed rows normalise over the whole vocabulary; sample with top_p=1, top_k=0 and min_p=None.",
        )
    if num_sampler_logprobs and (seq.top is None or len(seq.top) != seq.num_trained):
        got = "no" if seq.top is None else f"{len(seq.top)} rows of"
        raise DataError(
            f"{name}: {got} top log-probabilities for {seq.num_trained} trained tokens; score centering needs one "
            "row each.",
            "Return output_sampler_logprobs for every generated token, or set score_centering=False.",
        )
