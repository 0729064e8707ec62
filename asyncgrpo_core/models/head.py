"""The chunked language-model head: log-probabilities at trained positions, never a [tokens, vocabulary] matrix.

For hidden states h [N, D] of trained positions and the head's weight W [V, D]:

    z = cap(scale * (h W^T + b)) / temperature        logits as the sampler sees them
    logprobs     = z[y] - logsumexp(z)                 of the sampled token y
    entropy      = logsumexp(z) - sum_v p_v z_v        of the full-vocabulary distribution, no gradient
    top_logprobs = z[top_ids] - logsumexp(z)           of the sampler's top tokens

With candidate sets (top-k, top-p, min-p) the first and last are normalised over the token's set: head_candidates.py.

Chunks of positions are visited one after another; the backward pass computes a chunk's logits again from h and the
saved logsumexp, so the memory is one chunk's logits in either direction. The gradient is closed form:
d logp_v / d z = onehot(v) - p. The last chunk's logits are kept for the backward pass, which starts there: it needs
that memory anyway, and a row of one chunk is never computed twice.

Computing the gradient in the forward pass (as fused cross entropies do) would save that second product, one of four.
It is not done because the coefficients of log p_y and of the top tokens are not known there: they are functions of the
log-probabilities that this head returns, under sequence-level losses of all tokens of a sample.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from asyncgrpo_core.models.head_candidates import CandidateHead
from asyncgrpo_core.models.head_chunks import (
    HeadCall,
    LogitTransform,
    add_product,
    can_fuse,
    cast_head,
    raw_logits,
)

__all__ = ["LogitTransform", "chunked_log_probs"]

# Elements of one chunk's logits. A CPU chunk should stay near its caches. On a GPU every chunk's product with the
# hidden states is added to the [V, D] gradient of the weight, so a chunk needs rows to be worth that: 883 at V = 152k.
_CHUNK_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 26}
_FUSED_CHUNK_ELEMENTS = 1 << 27  # 2 bytes each instead of 10
_FUSED_FROM = 1 << 24  # fewer logits than this (a canary) are not worth compiling for their temperature
_ROW_TILE = 128  # rows of a matrix-product tile on a GPU


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, target_ids, top_ids, call):
        n, acc, chunk = hidden.shape[0], call.accumulation_dtype, call.arithmetic()
        entropy, log_z = (torch.empty(n, dtype=acc, device=hidden.device) for _ in range(2))
        # column 0: the sampled token, then the top tokens; padding reads the sampled token and is masked below
        ids = torch.cat([target_ids[:, None], torch.where(top_ids < 0, target_ids[:, None], top_ids)], dim=1)
        picked = torch.empty(ids.shape, dtype=acc, device=hidden.device)
        cast = cast_head(weight, bias, call.compute_dtype)
        kept = None
        for rows in call.chunks(n):
            kept = None  # before the next chunk's logits are made
            raw = raw_logits(hidden[rows], *cast)
            picked[rows] = call.picked(raw.gather(1, ids[rows]))
            log_z[rows], entropy[rows], kept = chunk.statistics(raw)
            del raw
        picked -= log_z[:, None]
        ctx.save_for_backward(hidden, weight, bias, ids, top_ids, log_z)
        ctx.call = call
        ctx.kept = kept if any(ctx.needs_input_grad) else None
        ctx.mark_non_differentiable(entropy)
        return picked[:, 0].clone(), entropy, picked[:, 1:].masked_fill(top_ids < 0, -torch.inf)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs, _grad_entropy, grad_top):
        hidden, weight, bias, ids, top_ids, log_z = ctx.saved_tensors
        call, acc, chunk = ctx.call, log_z.dtype, ctx.call.arithmetic()
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=acc, device=weight.device) if need_weight else None
        grad_bias = torch.zeros(bias.shape, dtype=acc, device=bias.device) if need_bias else None
        cast = cast_head(weight, bias, call.compute_dtype)
        grad_picked = torch.cat([grad_logprobs[:, None], torch.where(top_ids < 0, 0.0, grad_top)], dim=1)
        kept, ctx.kept = ctx.kept, None  # is written over: a second backward pass computes it again
        for rows in reversed(call.chunks(hidden.shape[0])):
            if kept is None:
                kept = chunk.again(raw_logits(hidden[rows], *cast), log_z[rows])
            low, kept = chunk.gradient(kept, log_z[rows], ids[rows], grad_picked[rows]), None
            if grad_hidden is not None:
                grad_hidden[rows] = (low @ cast[0]).to(hidden.dtype)
            if grad_weight is not None:
                add_product(grad_weight, low, hidden[rows].to(call.compute_dtype))
            if grad_bias is not None:
                grad_bias += low.sum(dim=0, dtype=acc)
            del low
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
        )


def _compute_dtype(weight: Tensor) -> torch.dtype:
    """The dtype that the model's own head would multiply in: autocast's when it is on, else the weight's."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def _head_call(
    n: int, weight: Tensor, transform: LogitTransform, chunk_elements: int | None, fused: bool | None
) -> HeadCall:
    device, dtype = weight.device.type, _compute_dtype(weight)
    if fused is None:
        fused = n * weight.shape[0] >= _FUSED_FROM and can_fuse(device, dtype)
    elements = chunk_elements or (_FUSED_CHUNK_ELEMENTS if fused else _CHUNK_ELEMENTS.get(device, 1 << 24))
    rows = max(1, elements // weight.shape[0])
    if device == "cuda" and rows > _ROW_TILE:
        rows -= rows % _ROW_TILE
    return HeadCall(transform, dtype, rows, fused)


def chunked_log_probs(
    hidden: Tensor,
    weight: Tensor,
    target_ids: Tensor,
    top_ids: Tensor,
    transform: LogitTransform,
    *,
    bias: Tensor | None = None,
    candidates: tuple[Tensor, Tensor] | None = None,
    chunk_elements: int | None = None,
    fused: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities and entropy at N trained positions (module docstring).

    Args:
        hidden: [N, D], any float dtype.
        weight: [V, D]; bias: [V] or None.
        target_ids: int64 [N].
        top_ids: int64 [N, k]; -1 entries are ignored (their result is -inf and takes no gradient). k may be 0.
        transform: from `LogitTransform.from_config`.
        candidates: (ids int64 [C], offsets int64 [N + 1]): the set that token n was drawn from is
            ids[offsets[n] : offsets[n + 1]], ascending; an empty one means the whole vocabulary. None: all are empty.
            A token outside its set has log-probability -inf and takes no gradient.
        chunk_elements: bound on the elements of the logits that exist at a time; None picks by device.
        fused: whether a chunk's arithmetic is compiled; None: on a GPU where torch.compile works, for long rows.

    Returns:
        logprobs [N], entropy [N] (no gradient), top_logprobs [N, k], in float32 (float64 for float64 weights).
    """
    call = _head_call(len(target_ids), weight, transform, chunk_elements, fused)
    with torch.autocast(weight.device.type, enabled=False):
        if candidates is None:
            return _ChunkedHead.apply(hidden, weight, bias, target_ids, top_ids, call)
        candidate_ids, offsets = candidates
        sizes = offsets.diff()
        restricted = sizes > 0
        count = int(restricted.sum())
        if count == 0:
            return _ChunkedHead.apply(hidden, weight, bias, target_ids, top_ids, call)
        if count == len(target_ids):
            return CandidateHead.apply(hidden, weight, bias, target_ids, top_ids, candidate_ids, offsets, call)
        free, bound = (torch.nonzero(mask)[:, 0] for mask in (~restricted, restricted))
        its_offsets = torch.cat([offsets[:1], sizes[bound].cumsum(0)])
        parts = (
            _ChunkedHead.apply(hidden[free], weight, bias, target_ids[free], top_ids[free], call),
            CandidateHead.apply(
                hidden[bound], weight, bias, target_ids[bound], top_ids[bound], candidate_ids, its_offsets, call
            ),
        )
        back = torch.cat([free, bound]).argsort()
        logprobs, entropy, top = (torch.cat(pair).index_select(0, back) for pair in zip(*parts, strict=True))
        return logprobs, entropy.detach(), top
