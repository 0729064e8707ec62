"""What a layer asks of its attention, and the gather that flash kernels need."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from asyncgrpo_core.models.row_plan import RowPlan


@dataclass(frozen=True)
class AttentionCall:
    """One layer's attention over one row."""

    plan: RowPlan
    scale: float
    window: int | None = None  # tokens a query sees, itself included; None: all before it
    softcap: float | None = None  # scores become softcap * tanh(score / softcap) (Gemma 2)
    dropout: float = 0.0

    def effective_window(self) -> int | None:
        """The window, or None when no sample is long enough to feel it."""
        return None if self.window is None or self.window >= self.plan.max_path else self.window


def along_paths(x: Tensor, call: AttentionCall) -> Tensor:
    """[1, Hkv, T, D] -> [K, Hkv, D]: the paths of all segments end to end (`RowPlan.gathered_keys`).

    A token's gradient is the sum over every descendant that read it. An embedding lookup adds those up in float32 and
    in a fixed order, which index_select's backward (16-bit atomic additions) does not.
    """
    index, _ = call.plan.gathered_keys()
    heads, dim = x.shape[1], x.shape[3]
    tokens = x[0].transpose(0, 1)
    if index is None:
        return tokens
    return F.embedding(index, tokens.reshape(len(tokens), heads * dim)).view(-1, heads, dim)
