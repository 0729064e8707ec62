"""Segments of similar size as right-padded batches for torch's SDPA: every device and dtype, exact."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncgrpo_core.models.attention_backends.call import AttentionCall
from asyncgrpo_core.models.row_plan import Bucket


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
    if call.softcap is not None:
        visible = bucket.visible(window)[:, None]
        return capped(q, k, v, visible, scale=call.scale, softcap=call.softcap, dropout=call.dropout)
    gqa = q.shape[1] != k.shape[1]
    if bucket.causal and window is None:
        return F.scaled_dot_product_attention(
            q, k, v, dropout_p=call.dropout, is_causal=True, scale=call.scale, enable_gqa=gqa
        )
    mask = bucket.additive_mask(q.dtype, window)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=call.dropout, scale=call.scale, enable_gqa=gqa
    )
