"""torch's variable-length FlashAttention (CUDA, 16 bit), with keys and values gathered along each segment's path."""

from __future__ import annotations

import inspect
from typing import Any, cast

from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from asyncgrpo_core.models.attention_backends.call import AttentionCall, along_paths

# torch 2.11 handles grouped heads without being told, later versions want to be told.
_TAKES_GQA_FLAG = "enable_gqa" in inspect.signature(varlen_attn).parameters


def attend(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
    """The last query of a segment sees the last key of its path: varlen_attn aligns the two ends."""
    plan = call.plan
    window = call.effective_window()
    left = -1 if window is None else window - 1  # varlen_attn does not count the query itself
    q = query[0].transpose(0, 1)
    k, v = along_paths(key, call), along_paths(value, call)
    _, cu_keys = plan.gathered_keys()
    extra: dict[str, Any] = {"enable_gqa": True} if _TAKES_GQA_FLAG and q.shape[1] != k.shape[1] else {}
    out = varlen_attn(
        q, k, v, plan.cu_segments, cu_keys, plan.max_length, plan.max_path,
        scale=call.scale, window_size=(left, 0), **extra,
    )  # fmt: skip
    return cast(Tensor, out)
