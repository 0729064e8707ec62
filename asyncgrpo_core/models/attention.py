"""Causal attention inside the segments of a packed row, registered with transformers as `asyncgrpo_packed`.

A row is one sequence of T tokens to everything in the model but attention. `AttentionPlan` says which tokens may see
which: segment s is `[cu_seqlens[s], cu_seqlens[s + 1])` and sees itself, causally. It is built once per forward and
reaches every layer as the keyword argument `packed_attention`. Back ends (`choose_backend`):

    varlen   torch's variable-length FlashAttention: CUDA, 16-bit
    padded   any device and dtype: segments of similar length become right-padded batches for SDPA. Padding comes
             after a segment's tokens, so the causal mask alone hides it and every segment's result is exact.

Without `packed_attention` (generation, an ordinary forward) the function is transformers' own SDPA, mask included.
"""

from __future__ import annotations

import inspect
import itertools
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from asyncgrpo_core.errors import ConfigError

PACKED_ATTENTION = "asyncgrpo_packed"

# A bucket takes segments of at least this share of its longest one, or this few tokens shorter: padding costs
# arithmetic, a bucket more costs kernel calls.
_MIN_LENGTH_SHARE = 0.75
_MIN_LENGTH_SLACK = 8


@dataclass(frozen=True)
class Bucket:
    """B segments padded to L tokens. `index` [B * L] are positions in the row (padding repeats position 0)."""

    num_segments: int
    length: int
    index: Tensor


@dataclass
class AttentionPlan:
    """Who sees whom in a row, for all layers of one forward. Offsets are counted in tokens of the row."""

    cu_seqlens: Tensor  # int32 [S + 1], on the model's device
    lengths: list[int]  # of the S segments
    _padded: tuple[list[Bucket], Tensor] | None = field(default=None, repr=False)

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor) -> AttentionPlan:
        """One device-to-host copy on a GPU.

        Raises:
            ValueError: offsets that do not start at 0 or do not grow.
        """
        offsets = cu_seqlens.tolist()
        lengths = [b - a for a, b in itertools.pairwise(offsets)]
        if not lengths or offsets[0] != 0 or min(lengths) < 1:
            raise ValueError(f"cu_seqlens must start at 0 and grow strictly, got {offsets[:8]}")
        return cls(cu_seqlens.to(torch.int32), lengths)

    @property
    def max_length(self) -> int:
        return max(self.lengths)

    def padded(self) -> tuple[list[Bucket], Tensor]:
        """The buckets, and for every token of the row its index in their flattened concatenation."""
        if self._padded is None:
            self._padded = self._build_padded()
        return self._padded

    def _build_padded(self) -> tuple[list[Bucket], Tensor]:
        starts = self.cu_seqlens[:-1].tolist()
        restore = torch.empty(sum(self.lengths), dtype=torch.int64)
        buckets, offset = [], 0
        for members in _group_by_length(self.lengths):
            longest = self.lengths[members[0]]
            first = torch.tensor([starts[s] for s in members])[:, None]
            size = torch.tensor([self.lengths[s] for s in members])[:, None]
            column = torch.arange(longest)[None]
            real = column < size
            index = torch.where(real, first + column, 0)
            restore[index[real]] = offset + torch.arange(index.numel()).view_as(index)[real]
            buckets.append(Bucket(len(members), longest, index.flatten().to(self.cu_seqlens.device)))
            offset += index.numel()
        return buckets, restore.to(self.cu_seqlens.device)


def _group_by_length(lengths: list[int]) -> list[list[int]]:
    """Segment numbers in groups of similar length, the longest of each group first."""
    groups: list[list[int]] = []
    longest = 0
    for s in sorted(range(len(lengths)), key=lambda s: lengths[s], reverse=True):
        n = lengths[s]
        if groups and (n >= _MIN_LENGTH_SHARE * longest or n >= longest - _MIN_LENGTH_SLACK):
            groups[-1].append(s)
        else:
            groups.append([s])
            longest = n
    return groups


def choose_backend(device: torch.device, dtype: torch.dtype, *, softcap: float | None) -> str:
    """The one place that decides: "varlen" or "padded" (module docstring)."""
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and softcap is None:
        return "varlen"
    return "padded"


def packed_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    packed_attention: AttentionPlan | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface. query [1, H, T, D], key and value [1, Hkv, T, D] -> [1, T, H, D].

    Raises:
        ConfigError: the layer asks for attention sinks or a position bias, which packed rows cannot give.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if packed_attention is None:
        if softcap is None:
            return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scale, **kwargs)
        visible = (
            _causal(query.shape[2], key.shape[2], None, query.device) if attention_mask is None else attention_mask
        )
        return _capped(query, key, value, scale, dropout, visible, softcap).transpose(1, 2), None
    for name in ("s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ConfigError(
                f"{type(module).__name__} passes {name!r} to its attention, which packed rows do not support.",
                "Train a model of another architecture.",
            )
    if choose_backend(query.device, query.dtype, softcap=softcap) == "varlen":
        out = _varlen(query, key, value, packed_attention, scale, sliding_window)
    else:
        out = _padded(query, key, value, packed_attention, scale, dropout, sliding_window, softcap)
    return out[None], None


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scale: float, sliding_window: int | None
) -> Tensor:
    # A window of w tokens counts the query itself, varlen_attn counts the tokens to its left.
    left = -1 if sliding_window is None or sliding_window >= plan.max_length else sliding_window - 1
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    cu, longest = plan.cu_seqlens, plan.max_length
    extra: dict[str, Any] = {"enable_gqa": True} if _VARLEN_TAKES_GQA_FLAG and q.shape[1] != k.shape[1] else {}
    return cast(Tensor, varlen_attn(q, k, v, cu, cu, longest, longest, scale=scale, window_size=(left, 0), **extra))


# torch 2.11 handles grouped heads without being told, later versions want to be told.
_VARLEN_TAKES_GQA_FLAG = "enable_gqa" in inspect.signature(varlen_attn).parameters


def _padded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: AttentionPlan,
    scale: float,
    dropout: float,
    sliding_window: int | None,
    softcap: float | None,
) -> Tensor:
    """Attention bucket by bucket; returns [T, H, D]."""
    buckets, restore = plan.padded()
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    outputs = []
    for bucket in buckets:
        bq, bk, bv = (_gather(x, bucket) for x in (q, k, v))
        window = sliding_window if sliding_window is not None and sliding_window < bucket.length else None
        out = _attend(bq, bk, bv, scale, dropout, window, softcap)
        outputs.append(out.transpose(1, 2).reshape(-1, *out.shape[1::2]))
    return torch.cat(outputs).index_select(0, restore)


def _gather(x: Tensor, bucket: Bucket) -> Tensor:
    """[T, H, D] -> [B, H, L, D]."""
    rows = x.index_select(0, bucket.index)
    return rows.view(bucket.num_segments, bucket.length, *x.shape[1:]).transpose(1, 2)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, dropout: float, window: int | None, softcap: float | None
) -> Tensor:
    """Causal attention of a padded batch [B, H, L, D]; a mask is built only for a window or a soft cap."""
    gqa = q.shape[1] != k.shape[1]
    if window is None and softcap is None:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=gqa)
    visible = _causal(q.shape[2], k.shape[2], window, q.device)
    if softcap is not None:
        return _capped(q, k, v, scale, dropout, visible, softcap)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, dropout_p=dropout, scale=scale, enable_gqa=gqa)


def _capped(q: Tensor, k: Tensor, v: Tensor, scale: float, dropout: float, visible: Tensor, softcap: float) -> Tensor:
    """Attention with soft-capped scores (Gemma 2), which no fused kernel used here computes."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = torch.tanh((q @ k.transpose(2, 3)) * (scale / softcap)) * softcap
    acc = torch.promote_types(q.dtype, torch.float32)
    # The lowest number and not -inf: a padding query sees nothing, and its row must stay finite.
    weights = scores.masked_fill(~visible, torch.finfo(q.dtype).min).softmax(dim=-1, dtype=acc)
    return F.dropout(weights.to(q.dtype), dropout) @ v


def _causal(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """bool [Q, K], True where a query sees a key; the last query is at the last key.

    A window of w tokens shows a query itself and the w - 1 tokens before it.
    """
    query = torch.arange(num_keys - num_queries, num_keys, device=device)
    distance = query[:, None] - torch.arange(num_keys, device=device)[None]
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)


AttentionInterface.register(PACKED_ATTENTION, packed_attention_forward)
# Ordinary forwards of a model switched to this attention keep their padding mask.
AttentionMaskInterface.register(PACKED_ATTENTION, sdpa_mask)
