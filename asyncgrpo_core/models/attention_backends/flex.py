"""torch's FlexAttention (CUDA): a block mask says who sees whom, so no key or value is copied per descendant.

Compiled kernels are made for exact shapes: kernels for any length were a third slower. Rows differ in length, so they
are padded to one of a few lengths (`padded_length`), each of which compiles once; `compiled_shapes` counts them. Where
it can, the packed forward pads the row itself (a filler token sees itself alone); otherwise queries, keys and values
are padded here, in every layer.

The block mask is computed from the segments with a few operations on [blocks, blocks] arrays: with the last and first
row index of a block of queries and the smallest and largest `subtree_end` of a block of keys, a block is fully visible
or empty exactly when those say so, and only the blocks between ask `mask_mod` token by token.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from asyncgrpo_core.models.attention_backends.call import AttentionCall
from asyncgrpo_core.models.compiler import allow_recompiles, compiler_works
from asyncgrpo_core.models.row_plan import RowPlan

logger = logging.getLogger(__name__)

BLOCK = 128
# A padded length is at most a sixteenth longer than its row, and an octave of lengths has sixteen of them.
_LENGTHS_PER_OCTAVE = 16
# Shapes x (plain, window, softcap) x (with and without gradient).
_RECOMPILE_LIMIT = 64

compiled_shapes: set[tuple[Any, ...]] = set()


def usable() -> bool:
    """Whether torch has the compiler that makes FlexAttention's kernels; without it a row's scores would be dense."""
    return compiler_works("cuda")


def padded_length(num_tokens: int) -> int:
    """The length that a row of `num_tokens` is computed at: a multiple of 128."""
    octave = 1 << (max(num_tokens, 2) - 1).bit_length()
    step = max(BLOCK, octave // (2 * _LENGTHS_PER_OCTAVE))
    return -(-num_tokens // step) * step


def attend(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
    """Compiled on a GPU, torch's eager (dense) evaluation of the same mask on a CPU."""
    num_tokens, window = query.shape[2], call.effective_window()
    length = padded_length(call.plan.num_tokens)
    mask = block_mask(call.plan, window)
    q, k, v = (F.pad(x, (0, 0, 0, length - num_tokens)) if length > num_tokens else x for x in (query, key, value))
    function: Any = flex_attention
    if query.device.type != "cpu":
        _count_shape(q, k, window, call.softcap)
        function = _compiled()
    out = function(
        q,
        k,
        v,
        score_mod=None if call.softcap is None else _softcap(call.softcap),
        block_mask=mask,
        scale=call.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return cast(Tensor, out)[0, :, :num_tokens].transpose(0, 1)


def block_mask(plan: RowPlan, window: int | None) -> BlockMask:
    """The row's block mask at its padded length; kept in the plan, since every layer asks for the same.

    Padding tokens see themselves alone.
    """
    return plan.once(("flex", window), lambda: _build_mask(plan, window))


def _build_mask(plan: RowPlan, window: int | None) -> BlockMask:
    num_tokens = plan.num_tokens
    length = padded_length(num_tokens)
    end = torch.arange(1, length + 1, dtype=torch.int32)
    end[:num_tokens] = torch.from_numpy(plan.subtree_ends())
    position = torch.arange(length, dtype=torch.int32)
    position[:num_tokens] = torch.from_numpy(plan.positions())
    end, position = end.to(plan.device), position.to(plan.device)
    first = torch.arange(0, length, BLOCK, device=plan.device)
    per_block = end.view(-1, BLOCK)
    below = first[None] < first[:, None]  # [queries, keys]
    full = below & (per_block.amin(1)[None] >= first[:, None] + BLOCK)
    some = (below & (per_block.amax(1)[None] > first[:, None])) | (first[None] == first[:, None])
    if window is not None:
        blocks = position.view(-1, BLOCK)
        low, high = blocks.amin(1), blocks.amax(1)
        full &= high[:, None] - low[None] < window
        some &= low[:, None] - high[None] < window
    return BlockMask.from_kv_blocks(
        *_ordered(some & ~full), *_ordered(full), BLOCK_SIZE=BLOCK, mask_mod=_mask_mod(end, position, window)
    )


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """bool [queries, keys] -> how many key blocks each query block has, and their numbers first in each row."""
    count = blocks.sum(-1, dtype=torch.int32)
    order = torch.argsort(blocks.to(torch.int8), dim=-1, descending=True, stable=True).to(torch.int32)
    return count[None, None].contiguous(), order[None, None].contiguous()


def _mask_mod(end: Tensor, position: Tensor, window: int | None) -> Callable[..., Tensor]:
    def tree(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < end[key])

    if window is None:
        return tree
    width = window

    def tree_and_window(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < end[key]) & (position[query] - position[key] < width)

    return tree_and_window


@functools.cache
def _softcap(softcap: float) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, _batch: Tensor, _head: Tensor, _query: Tensor, _key: Tensor) -> Tensor:
        return torch.tanh(score / softcap) * softcap

    return score_mod


@functools.cache
def _compiled() -> Callable[..., Any]:
    allow_recompiles(_RECOMPILE_LIMIT)
    return torch.compile(flex_attention, dynamic=False)


def _count_shape(q: Tensor, k: Tensor, window: int | None, softcap: float | None) -> None:
    shape = (q.shape[1:], k.shape[1], q.dtype, window is None, softcap, q.device)
    if shape not in compiled_shapes:
        compiled_shapes.add(shape)
        logger.info("FlexAttention compiles for rows of %d tokens (shape number %d)", q.shape[2], len(compiled_shapes))
