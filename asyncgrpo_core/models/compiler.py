"""Whether torch.compile works on this machine: it needs Triton, a driver that fits it and a C compiler."""

from __future__ import annotations

import logging
from functools import cache

import torch

logger = logging.getLogger(__name__)


@cache
def compiler_works(device_type: str) -> bool:
    """Compile and run a tiny function there, once per process (seconds); says so where it fails.

    What asks are the choices that fall back to something slower: FlexAttention, compiled layers, the fused head.
    """
    if device_type != "cuda":  # nothing here compiles for a CPU by itself
        return False
    try:
        compiled = torch.compile(lambda x: torch.logsumexp(x.float() * 2, dim=-1))
        compiled(torch.ones((2, 16), device=device_type, dtype=torch.bfloat16)).sum().item()
    except Exception as error:  # whatever a missing compiler or driver raises
        text = str(error).strip().splitlines()
        logger.warning(
            "torch.compile does not work here, so attention, layers and head run uncompiled, slower: %s: %s",
            type(error).__name__,
            text[0][:300] if text else "no message",
        )
        return False
    return True
