"""torch.compile: whether it works on this machine, and how often it may compile the same code."""

from __future__ import annotations

import logging
from functools import cache

import torch

logger = logging.getLogger(__name__)


@cache
def compiler_works(device_type: str) -> bool:
    """Compile and run a tiny function there, once per process (seconds); says so where it fails.

    It needs Triton, a driver that fits it and a C compiler.

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


def allow_recompiles(limit: int) -> None:
    """Let dynamo keep at least `limit` compilations of one piece of code in this process.

    Its own 8 are soon used up (a compilation per dtype, temperature, soft cap, exact length), and beyond them it runs
    uncompiled, or raises where the whole function has to be compiled.
    """
    name = "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else "cache_size_limit"
    setattr(torch._dynamo.config, name, max(limit, getattr(torch._dynamo.config, name)))
