"""FlashAttention kernels of the `kernels` hub (reference, 'Compatibility and constraints'), 16 bit.

Which kernel fits a device is in `models/support.py`. Keys and values are gathered along each segment's path.
"""

from __future__ import annotations

import functools
from typing import Any, cast

from torch import Tensor

from asyncgrpo_core.models.attention_backends.call import AttentionCall, along_paths

# The hub's major versions, whose interfaces this file was written for.
KERNEL_VERSIONS = {
    "kernels-community/flash-attn3": 1,
    "kernels-community/flash-attn4": 0,
    "kernels-community/aiter-flash-attn": 2,
}


class HubUnavailable(Exception):
    """The kernel could not be fetched or imported; the message says why."""


@functools.cache
def load_kernel(repository: str) -> Any:
    """The kernel's module, from the local cache or the hub.

    Raises:
        HubUnavailable: `kernels` is not installed, the hub cannot be reached, or it has no build for this machine.
    """
    try:
        from kernels import get_kernel
    except ImportError as error:
        raise HubUnavailable("the `kernels` package is not installed") from error
    try:
        kernel = get_kernel(repository, version=KERNEL_VERSIONS.get(repository, 1))
    except Exception as error:  # offline, no such build, a driver too old: all mean that another back end serves
        raise HubUnavailable(
            f"{repository}: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        ) from error
    if not callable(getattr(kernel, "flash_attn_varlen_func", None)):
        raise HubUnavailable(f"{repository} has no flash_attn_varlen_func")
    return kernel


def attend(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, *, repository: str) -> Tensor:
    """As the varlen back end, by the hub's kernel; it also knows soft-capped scores."""
    plan, window = call.plan, call.effective_window()
    function = load_kernel(repository).flash_attn_varlen_func
    extra: dict[str, Any] = {}
    if window is not None:  # the kernels spell "none" differently, so without one they are told nothing
        # Causal bounds the right side in any case; aiter refuses to hear of that side.
        extra["window_size"] = (window - 1, -1 if repository.endswith("aiter-flash-attn") else 0)
    if call.softcap is not None:
        extra["softcap"] = call.softcap
    _, cu_keys = plan.gathered_keys()
    out = function(
        query[0].transpose(0, 1),
        along_paths(key, call),
        along_paths(value, call),
        cu_seqlens_q=plan.cu_segments,
        cu_seqlens_k=cu_keys,
        max_seqlen_q=plan.max_length,
        max_seqlen_k=plan.max_path,
        softmax_scale=call.scale,
        causal=True,
        **extra,
    )
    return cast(Tensor, out[0] if isinstance(out, tuple) else out)
