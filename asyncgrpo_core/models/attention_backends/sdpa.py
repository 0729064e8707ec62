"""Segments of similar size as right-padded batches for torch's SDPA: every device and dtype, exact.

SDPA takes a dense mask, [queries, keys] per segment, and where it has no fused kernel (grouped heads in float32 on a
GPU), as for soft-capped scores, there are scores of that size per head. Where those of a batch would be large, it is
computed part by part, and again in the backward pass, so that one part's are all that exist at a time.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from asyncgrpo_core.models.attention_backends.call import AttentionCall
from asyncgrpo_core.models.row_plan import Bucket, additive

# Of a mask, or of scores where they are made: 256 MiB in float32, a row of 8,192 tokens.
_DENSE_ELEMENTS = 1 << 26


def attend(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
    """Attention bucket by bucket; padding comes after what a real query sees, so every segment's result is exact."""
    buckets, restore = call.plan.buckets()
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    outputs = []
    for bucket in buckets:
        out = _attend_bucket(
            _gather(q, bucket.query_index), _gather(k, bucket.key_index), _gather(v, bucket.key_index), bucket, call
        )
        outputs.append(out.transpose(1, 2).reshape(-1, *out.shape[1::2]))
    return torch.cat(outputs).index_select(0, restore)


def capped(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, *, scale: float, softcap: float, dropout: float = 0.0
) -> Tensor:
    """Attention [B, H, Q, D] with soft-capped scores, which SDPA cannot compute; `visible` broadcasts to the scores."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = torch.tanh((q @ k.transpose(2, 3)) * (scale / softcap)) * softcap
    acc = torch.promote_types(q.dtype, torch.float32)
    # The lowest number and not -inf: a padding query may see nothing, and its row must stay finite.
    weights = scores.masked_fill(~visible, torch.finfo(q.dtype).min).softmax(dim=-1, dtype=acc)
    return F.dropout(weights.to(q.dtype), dropout) @ v


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """[T, H, D] -> [B, H, L, D]."""
    return x.index_select(0, index.flatten()).view(*index.shape, *x.shape[1:]).transpose(1, 2)


def _attend_bucket(q: Tensor, k: Tensor, v: Tensor, bucket: Bucket, call: AttentionCall) -> Tensor:
    window = call.effective_window()
    if window is not None and window >= k.shape[2]:
        window = None
    plain = bucket.causal and window is None and call.softcap is None
    parts = 1 if plain and _fused(q, k) else _num_parts(q, k, call)
    if parts > 1:
        return _attend_in_parts(q, k, v, bucket, call, window, parts)
    if call.softcap is not None:
        visible = bucket.visible(window)[:, None]
        return capped(q, k, v, visible, scale=call.scale, softcap=call.softcap, dropout=call.dropout)
    return _sdpa(q, k, v, None if plain else bucket.additive_mask(q.dtype, window), call)


def _fused(q: Tensor, k: Tensor) -> bool:
    """Whether causal attention without a mask has a kernel that makes no scores."""
    return q.device.type == "cpu" or q.dtype.itemsize == 2 or q.shape[1] == k.shape[1]


def _num_parts(q: Tensor, k: Tensor, call: AttentionCall) -> int:
    heads = 1 if call.softcap is None and q.device.type == "cpu" else q.shape[1]  # of scores; a mask has one
    return -(-q.shape[0] * q.shape[2] * k.shape[2] * heads // _DENSE_ELEMENTS)


def _attend_in_parts(
    q: Tensor, k: Tensor, v: Tensor, bucket: Bucket, call: AttentionCall, window: int | None, parts: int
) -> Tensor:
    """A few segments at a time, or where one is too large already, a few queries of each."""
    per_segment = -(-parts // q.shape[0])
    queries = max(1, q.shape[2] // per_segment)
    segments = max(1, q.shape[0] // parts)

    def attend_part(q: Tensor, k: Tensor, v: Tensor, part: tuple[slice, slice]) -> Tensor:
        visible = bucket.visible(window, part)
        if call.softcap is not None:
            return capped(q, k, v, visible[:, None], scale=call.scale, softcap=call.softcap, dropout=call.dropout)
        return _sdpa(q, k, v, additive(visible, q.dtype), call)

    outputs = []
    for first in range(0, q.shape[0], segments):
        row = slice(first, first + segments)
        found = []
        for start in range(0, q.shape[2], queries):
            part = slice(start, start + queries)
            keys = slice(bucket.keys_of(part))
            inputs = q[row, :, part], k[row, :, keys], v[row, :, keys], (row, part)
            found.append(checkpoint(attend_part, *inputs, use_reentrant=False, preserve_rng_state=call.dropout > 0))
        outputs.append(torch.cat(found, dim=2))
    return torch.cat(outputs)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: AttentionCall) -> Tensor:
    """Causal without a mask."""
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=call.dropout,
        is_causal=mask is None,
        scale=call.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
