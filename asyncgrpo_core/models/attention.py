"""Attention of packed rows, registered with transformers as `asyncgrpo_packed`.

A row is one sequence of T tokens to everything in the model but attention. A `RowPlan` says which tokens see which; it
is built once per forward and reaches every layer as the keyword argument `packed_attention`. How it is computed is one
of `attention_backends/`; `choose_backend` is the one place that decides.

Without `packed_attention` (generation, an ordinary forward) the function is transformers' own SDPA, mask included.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from asyncgrpo_core.errors import ConfigError
from asyncgrpo_core.models.attention_backends import AttentionCall, flex, hub, sdpa, varlen
from asyncgrpo_core.models.attention_backends.hub import HubUnavailable, load_kernel
from asyncgrpo_core.models.row_plan import RowPlan
from asyncgrpo_core.models.support import DeviceTraits, current_device_traits, hub_attention_kernel

logger = logging.getLogger(__name__)

PACKED_ATTENTION = "asyncgrpo_packed"
BACKENDS = ("auto", "hub", "varlen", "flex", "sdpa")


@dataclass(frozen=True)
class Choice:
    """An attention back end, and the sentence that says why."""

    backend: str
    reason: str


def choose_backend(
    requested: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    softcap: float | None,
    traits: DeviceTraits | None,
    head_dims: tuple[int, int] | None = None,
) -> Choice:
    """Which back end computes attention (reference, 'Compatibility and constraints', for the kernels of the hub).

    Args:
        requested: "auto" or a name of `BACKENDS`.
        device, dtype: where and in what the layers compute (autocast's dtype when it is on).
        softcap: the model's cap on attention scores.
        traits: of the GPU; None on a CPU.
        head_dims: of the attention's queries and of its values; flash kernels take equal ones, multiples of 8 up to
            256.

    Raises:
        ConfigError: a requested back end that this device, dtype or model cannot use.
    """
    on_gpu, sixteen_bit = device.type == "cuda", dtype in (torch.bfloat16, torch.float16)
    wide, values = head_dims or (8, 8)
    flash = on_gpu and sixteen_bit and wide == values <= 256 and wide % 8 == 0
    if requested != "auto":
        return _requested(requested, on_gpu=on_gpu, flash=flash, softcap=softcap, traits=traits)
    if not on_gpu:
        return Choice("sdpa", f"the device is {device.type}")
    if not flash:
        why = (
            f"{str(dtype).removeprefix('torch.')} on a GPU"
            if not sixteen_bit
            else f"heads of {wide} with values of {values}"
        )
        local = "flex" if flex.usable() else "sdpa"
        return Choice(local, f"{why}: flash kernels take equal 16-bit ones, of a multiple of 8 up to 256")
    assert traits is not None
    try:
        load_kernel(hub_attention_kernel(traits))
        return Choice("hub", f"{hub_attention_kernel(traits)} fits {traits.name}")
    except HubUnavailable as error:
        local = "flex" if flex.usable() else "varlen" if softcap is None else "sdpa"
        logger.warning("attention_backend='auto' uses %r: the hub's kernel is not to be had (%s)", local, error)
        return Choice(local, "the kernel hub could not serve this machine")


def _requested(name: str, *, on_gpu: bool, flash: bool, softcap: float | None, traits: DeviceTraits | None) -> Choice:
    if name not in BACKENDS:
        raise ConfigError(f"attention_backend={name!r} is unknown.", f"Use one of {', '.join(map(repr, BACKENDS))}.")
    if name in ("hub", "varlen") and not flash:
        raise ConfigError(
            f"attention_backend={name!r} needs a GPU and a 16-bit model with equal heads of a multiple of 8 up to 256.",
            'Use "auto", or "sdpa".',
        )
    if name == "flex" and not on_gpu:
        raise ConfigError("attention_backend='flex' is compiled for GPUs.", 'Use "auto", or "sdpa".')
    if name == "flex" and not flex.usable():
        raise ConfigError(
            "attention_backend='flex' needs torch.compile, which does not work on this machine (the log says why).",
            'Install Triton and a C compiler, or use "auto".',
        )
    if name == "varlen" and softcap is not None:
        raise ConfigError(
            f"attention_backend='varlen' cannot cap attention scores (the model's cap is {softcap}).", 'Use "flex".'
        )
    if name == "hub":
        assert traits is not None
        try:
            load_kernel(hub_attention_kernel(traits))
        except HubUnavailable as error:
            raise ConfigError(
                f"attention_backend='hub' cannot be used: {error}.", 'Use "auto", which falls back, or "varlen".'
            ) from error
    return Choice(name, "it was asked for")


@torch.compiler.disable
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
    packed_attention: RowPlan | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface. query [1, H, T, D], key and value [1, Hkv, T, D] -> [1, T, H, D].

    Opaque to a compiler that traces the layer around it (trunk.py): the plan is no tensor, and the kernels are fused.

    Raises:
        ConfigError: the layer asks for attention sinks, a position bias or a dropout, which packed rows or their back
            end cannot give, or the model's code gave it the packed forward's mask and not the plan.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if packed_attention is None:
        if attention_mask is not None and attention_mask.numel() == 1 < query.shape[2]:
            raise plan_is_lost(type(module).__name__)
        return _ordinary(module, query, key, value, attention_mask, scale, dropout, softcap, kwargs)
    for name in ("s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ConfigError(
                f"{type(module).__name__} passes {name!r} to its attention, which packed rows do not support.",
                "Train a model of another architecture.",
            )
    if not getattr(module, "is_causal", True):
        raise ConfigError(
            f"{type(module).__name__} attends in both directions; packed rows are attended to causally.",
            "Train a causal model.",
        )
    dtype = compute_dtype(query.dtype, query.device)  # norms and rotary embeddings leave float32 behind under autocast
    query, key, value = (x.to(dtype) for x in (query, key, value))
    if dropout and packed_attention.backend != "sdpa":
        raise ConfigError(
            f"{type(module).__name__} drops out attention weights (p = {dropout}), which attention_backend="
            f"{packed_attention.backend!r} cannot.",
            "Set the model config's attention dropout to 0, or attention_backend='sdpa'.",
        )
    call = AttentionCall(packed_attention, scale, sliding_window, softcap, dropout)
    return _BACKENDS[packed_attention.backend](query, key, value, call)[None], None


def plan_is_lost(name: str) -> ConfigError:
    """Without the plan a token would see the whole row, later tokens and other samples included."""
    return ConfigError(
        f"{name} of transformers {transformers.__version__} does not hand its keyword arguments on to attention, so a "
        "packed row would not be told apart.",
        "Train a model of another architecture.",
    )


def compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Autocast's dtype where it is on for the device, else `dtype`."""
    kind = device.type
    autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)  # "meta" knows no autocast
    return torch.get_autocast_dtype(kind) if autocast else dtype


def _hub(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
    traits = current_device_traits()
    assert traits is not None
    return hub.attend(query, key, value, call, repository=hub_attention_kernel(traits))


_BACKENDS = {"sdpa": sdpa.attend, "varlen": varlen.attend, "flex": flex.attend, "hub": _hub}


def _ordinary(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scale: float,
    dropout: float,
    softcap: float | None,
    kwargs: dict[str, Any],
) -> tuple[Tensor, None]:
    if softcap is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scale, **kwargs)
    if attention_mask is None:
        num_queries, num_keys = query.shape[2], key.shape[2]
        last = torch.arange(num_keys - num_queries, num_keys, device=query.device)
        attention_mask = last[:, None] >= torch.arange(num_keys, device=query.device)[None]
    out = sdpa.capped(query, key, value, attention_mask, scale=scale, softcap=softcap, dropout=dropout)
    return out.transpose(1, 2), None


AttentionInterface.register(PACKED_ATTENTION, packed_attention_forward)
# Ordinary forwards of a model switched to this attention keep their padding mask.
AttentionMaskInterface.register(PACKED_ATTENTION, sdpa_mask)
