"""How the layers between embedding and head are computed: as transformers wrote them, or each compiled on its own.

Small models are bound by kernel launches and by memory traffic of what lies between the matrix products: norms, rotary
embedding, gate, residual additions. Compiling one decoder layer at a time ("regional") fuses those, is the same code
for every layer, so it compiles once however deep the model is, and leaves gradient checkpointing and FSDP, which wrap
whole layers, as they are. Row lengths are dynamic: a new length does not compile again. Attention stays outside the
compiled graphs (`packed_attention_forward` is opaque to the compiler), because it is a fused kernel already.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from asyncgrpo_core.errors import ConfigError
from asyncgrpo_core.models.compiler import allow_recompiles, compiler_works
from asyncgrpo_core.models.forward import causal_model
from asyncgrpo_core.models.support import dense_attention_layers

logger = logging.getLogger(__name__)

TRUNK_KERNELS = ("auto", "eager", "compile")
# Layers differ in window, dtype of autocast, train and eval.
_RECOMPILE_LIMIT = 32


def prepare_trunk(model: nn.Module, requested: str, *, device: torch.device, world_size: int) -> str:
    """Compile the layers when `requested` or the automatic choice says so, and log why; returns the choice.

    Call it before DDP or FSDP wrap the model. Raises ConfigError as `choose_trunk` and `compile_layers`.
    """
    base = causal_model(model)
    choice, reason = choose_trunk(
        requested,
        device=device,
        text_config=base.config.get_text_config(),
        wrapped=base is not model,
        world_size=world_size,
    )
    if choice == "compile":
        compile_layers(base.get_decoder())
    logger.info("Layers: %s (%s).", choice, reason)
    return choice


def choose_trunk(
    requested: str, *, device: torch.device, text_config: Any, wrapped: bool, world_size: int
) -> tuple[str, str]:
    """("eager" or "compile", why).

    Args:
        requested: "auto", "eager" or "compile".
        device: where the model trains.
        text_config: of the text model.
        wrapped: the model carries an adapter.
        world_size: number of trainer ranks.

    Raises:
        ConfigError: an unknown name.
    """
    if requested not in TRUNK_KERNELS:
        raise ConfigError(
            f"trunk_kernels={requested!r} is unknown.", f"Use one of {', '.join(map(repr, TRUNK_KERNELS))}."
        )
    if requested != "auto":
        return requested, "it was asked for"
    if device.type != "cuda":
        return "eager", f"the device is {device.type}"
    if wrapped:
        return "eager", "the model carries an adapter"
    if world_size > 1:
        return "eager", "compiled layers were not measured over several ranks"
    if not compiler_works(device.type):
        return "eager", "torch.compile does not work here"
    if not dense_attention_layers(text_config):
        return "eager", "experts and recurrent layers branch on data, where a compiler gains nothing"
    return "compile", "every layer is attention and a dense block on a CUDA device"


def compile_layers(decoder: nn.Module) -> int:
    """Compile every decoder layer in place, lazily at its first call; returns how many.

    Raises:
        ConfigError: the decoder has no list of layers.
    """
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ConfigError(
            f"{type(decoder).__name__} keeps no list of layers, so they cannot be compiled one by one.",
            "Set trunk_kernels='eager'.",
        )
    allow_recompiles(_RECOMPILE_LIMIT)
    for layer in layers:
        layer.compile(dynamic=True)
    return len(layers)


def uncompile_layers(decoder: nn.Module) -> None:
    """Back to eager, for comparisons."""
    for layer in getattr(decoder, "layers", ()):
        layer._compiled_call_impl = None


def compiled_graphs() -> int:
    """How many graphs this process has compiled so far, of any kind: grows only when a shape or type was new."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
