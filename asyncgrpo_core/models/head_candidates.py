"""The head for tokens that were drawn from a candidate set S (reference, 'Top-k and top-p sampling').

    logprobs     = z[y] - logsumexp(z[S])
    top_logprobs = z[top_ids] - logsumexp(z[S])     -inf outside S
    entropy      of the full-vocabulary distribution, as without sets

The server drew from the softmax over S, so its log-probabilities are normalised over S, and the trainer's must be too:
over the whole vocabulary the ratio of an unchanged policy would be the mass of S and not 1.

Only the entropy needs the whole vocabulary, so the backward pass computes no logits again: the gradient lives inside
the sets, d logp_v / d z = onehot(v) - p on S, and the log-probabilities there are saved (4 bytes per candidate, half of
what its id takes). Small sets are multiplied as ragged sums of rows, large ones as a dense matrix of one chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding_bag

from asyncgrpo_core.models.head_chunks import HeadCall, add_product, cast_head, raw_logits

# Above this share of a chunk's logits inside the sets, the dense products are faster than gathering rows.
_DENSE_SHARE = {"cpu": 1 / 20, "cuda": 1 / 256}


class _Ragged(NamedTuple):
    """The candidates of one chunk of r tokens, c of them."""

    ids: Tensor  # int64 [c]
    row: Tensor  # int64 [c], 0 .. r - 1
    starts: Tensor  # int64 [r + 1], from 0 to c
    span: slice  # of all candidates


class CandidateHead(torch.autograd.Function):
    """Arguments as `head.chunked_log_probs`, every set non-empty."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, target_ids, top_ids, candidate_ids, offsets, call):
        n, acc, chunk = hidden.shape[0], call.accumulation_dtype, call.arithmetic()
        entropy, log_z = (torch.empty(n, dtype=acc, device=hidden.device) for _ in range(2))
        asked = torch.cat([target_ids[:, None], top_ids], dim=1)
        picked = torch.empty(asked.shape, dtype=acc, device=hidden.device)
        place = torch.empty_like(asked)  # index into the candidates, -1 outside the set
        log_p = torch.empty(candidate_ids.shape, dtype=acc, device=hidden.device)
        cast = cast_head(weight, bias, call.compute_dtype)
        bounds = _bounds(offsets, call, n)
        for rows, ragged in zip(call.chunks(n), _ragged_chunks(candidate_ids, offsets, bounds, call, n), strict=True):
            raw = raw_logits(hidden[rows], *cast)
            z = call.picked(raw[ragged.row, ragged.ids])
            _, entropy[rows], _ = chunk.statistics(raw)
            del raw
            log_z[rows] = _segment_logsumexp(z, ragged)
            log_p[ragged.span] = z - log_z[rows][ragged.row]
            found = _find(ragged, asked[rows], weight.shape[0])
            picked[rows] = torch.where(found < 0, -torch.inf, log_p[ragged.span][found.clamp_min(0)])
            place[rows] = found
        ctx.save_for_backward(hidden, weight, bias, candidate_ids, offsets, place, log_p, log_z)
        ctx.call, ctx.bounds = call, bounds
        ctx.mark_non_differentiable(entropy)
        return picked[:, 0].clone(), entropy, picked[:, 1:].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs, _grad_entropy, grad_top):
        hidden, weight, bias, candidate_ids, offsets, place, log_p, log_z = ctx.saved_tensors
        call, acc, n = ctx.call, log_z.dtype, hidden.shape[0]
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=acc, device=weight.device) if need_weight else None
        grad_bias = torch.zeros(bias.shape, dtype=acc, device=bias.device) if need_bias else None
        cast_weight, _ = cast_head(weight, None, call.compute_dtype)
        asked = torch.cat([grad_logprobs[:, None], grad_top], dim=1)
        asked = torch.where(place < 0, torch.zeros_like(asked), asked)
        for rows, ragged in zip(
            call.chunks(n), _ragged_chunks(candidate_ids, offsets, ctx.bounds, call, n), strict=True
        ):
            own = _candidate_gradient(ragged, log_p[ragged.span], log_z[rows], place[rows], asked[rows], call)
            here = hidden[rows].to(call.compute_dtype)
            if len(own) > _DENSE_SHARE.get(weight.device.type, 1 / 20) * len(here) * weight.shape[0]:
                low = torch.zeros((len(here), weight.shape[0]), dtype=call.compute_dtype, device=weight.device)
                low[ragged.row, ragged.ids] = own.to(low.dtype)
                if grad_hidden is not None:
                    grad_hidden[rows] = (low @ cast_weight).to(hidden.dtype)
                if grad_weight is not None:
                    add_product(grad_weight, low, here)
            else:
                if grad_hidden is not None:
                    grad_hidden[rows] = _weighted_rows(cast_weight, ragged.ids, ragged.starts, own).to(hidden.dtype)
                if grad_weight is not None:
                    _add_by_token(grad_weight, ragged, here.to(acc), own)
            if grad_bias is not None:
                grad_bias.index_add_(0, ragged.ids, own)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *(None,) * 5,
        )


def _bounds(offsets: Tensor, call: HeadCall, n: int) -> list[int]:
    """Candidates before each chunk, and their number at the end: read from the device once."""
    starts = [rows.start for rows in call.chunks(n)]
    return offsets[torch.tensor([*starts, n], device=offsets.device)].tolist()


def _ragged_chunks(ids: Tensor, offsets: Tensor, bounds: list[int], call: HeadCall, n: int):
    for i, rows in enumerate(call.chunks(n)):
        low, high = bounds[i], bounds[i + 1]
        starts = offsets[rows.start : rows.stop + 1] - low
        row = torch.repeat_interleave(
            torch.arange(len(starts) - 1, device=ids.device), starts.diff(), output_size=high - low
        )
        yield _Ragged(ids[low:high], row, starts, slice(low, high))


def _segment_logsumexp(z: Tensor, ragged: _Ragged) -> Tensor:
    largest = torch.segment_reduce(z, "max", offsets=ragged.starts, unsafe=True)
    return (
        largest
        + torch.segment_reduce((z - largest[ragged.row]).exp_(), "sum", offsets=ragged.starts, unsafe=True).log_()
    )


def _find(ragged: _Ragged, asked: Tensor, vocabulary: int) -> Tensor:
    """Where in the chunk's candidates each asked token [r, m] of a row is; -1 where it is not in the row's set."""
    keys = ragged.row * vocabulary + ragged.ids  # ascending, because the sets are
    wanted = torch.arange(len(asked), device=asked.device)[:, None] * vocabulary + asked
    place = torch.searchsorted(keys, wanted).clamp_max_(len(keys) - 1)
    return torch.where((keys[place] == wanted) & (asked >= 0), place, -1)


def _candidate_gradient(
    ragged: _Ragged, log_p: Tensor, log_z: Tensor, place: Tensor, asked: Tensor, call: HeadCall
) -> Tensor:
    """d/d(raw logits) of the chunk's candidates, [c]."""
    grad = log_p.exp().mul_(asked.sum(dim=1).neg()[ragged.row])
    # One column after another: within one, no candidate is named twice, so nothing depends on the order of adding.
    for column in range(asked.shape[1]):
        grad.index_add_(0, place[:, column].clamp_min(0), asked[:, column])
    return grad.mul_(call.transform.slope(log_p + log_z[ragged.row]))


def _weighted_rows(table: Tensor, index: Tensor, starts: Tensor, weights: Tensor) -> Tensor:
    """sum of weights * table[index] over each [starts[i], starts[i + 1]), without gathering the rows first."""
    return embedding_bag(
        index, table, starts, mode="sum", per_sample_weights=weights.to(table.dtype), include_last_offset=True
    )


def _add_by_token(total: Tensor, ragged: _Ragged, hidden: Tensor, weights: Tensor) -> None:
    """total[v] += sum over the tokens n with v in their set of weights * hidden[n]."""
    ids, order = ragged.ids.sort(stable=True)
    tokens, counts = torch.unique_consecutive(ids, return_counts=True)
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    total.index_add_(0, tokens, _weighted_rows(hidden, ragged.row[order], starts, weights[order]))
