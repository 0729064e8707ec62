"""Attention over the segments of a row, one file for each way of computing it.

All take (query, key, value, `AttentionCall`) with query [1, H, T, D], key and value [1, Hkv, T, D], and return
[T, H, D]. A token sees exactly the tokens that `models/row_plan.py` says.

    sdpa     torch's SDPA on padded batches of segments: any device and dtype, gradients of every order of precision
    varlen   torch's variable-length FlashAttention: CUDA, 16 bit; keys and values gathered per segment path
    flex     torch's FlexAttention with a block mask: CUDA; nothing is gathered
    hub      FlashAttention from the `kernels` hub, by device: 16 bit; keys and values gathered per segment path
"""

from asyncgrpo_core.models.attention_backends.call import AttentionCall

__all__ = ["AttentionCall"]
