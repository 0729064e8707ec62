"""The policy's weights under the names a vLLM server loads: Hugging Face names, adapters merged, ties once."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from asyncgrpo_core.errors import ConfigError
from asyncgrpo_core.models.forward import causal_model
from asyncgrpo_core.models.support import outside_text_model


def iter_server_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of everything the server must hold, detached, in the trainer's dtype.

    * A tied pair (input and output embedding) is yielded once, under the embedding's name.
    * With PEFT, a layer that carries adapters is yielded merged (reference: "merges the adapter into the base model
      and sends the full merged weights"). The merge happens on a copy of that one layer, so the base weights are
      never touched, not even by rounding, and at most one layer is held twice.
    * Of a vision-language model the text model alone is yielded: the rest is frozen, the server has it already.
    * Sharded tensors are gathered; then every rank must iterate.

    Tensors may alias the live weights: copy or send them before the next optimizer step.
    """
    base = causal_model(model)
    adapted = _adapter_modules(base)
    done: set[str] = set()
    outside = outside_text_model(base)
    for name, parameter in base.named_parameters():  # a tied parameter comes once, under its first name
        if name in outside:
            continue
        owner = _owner(name, adapted)
        if owner is None:
            yield name, _full(parameter.detach())
        elif owner not in done:
            done.add(owner)
            yield from _effective(owner, adapted[owner])


def _adapter_modules(base: nn.Module) -> dict[str, nn.Module]:
    """Modules that PEFT put around one of the model's own, by name; empty without PEFT."""
    try:
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils import AuxiliaryTrainingWrapper
    except ImportError:  # PEFT is optional, and without it nothing is wrapped
        return {}
    kinds: tuple[type, ...] = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    return {name: module for name, module in base.named_modules() if issubclass(type(module), kinds)}


def _owner(name: str, adapted: dict[str, nn.Module]) -> str | None:
    """The outermost wrapped module that a parameter lies in."""
    parts = name.split(".")
    prefixes = (".".join(parts[:i]) for i in range(1, len(parts)))
    return next((prefix for prefix in prefixes if prefix in adapted), None)


@torch.no_grad()
def _effective(name: str, module: Any) -> Iterator[tuple[str, Tensor]]:
    """The weights that a wrapped module computes with, under the names it has without the wrapper."""
    if hasattr(module, "modules_to_save"):  # trained in full, the original is kept beside it
        source: nn.Module = module.modules_to_save[module.active_adapters[0]]
    elif hasattr(module, "merge"):
        merged: Any = copy.deepcopy(module)
        merged.merge()
        source = merged.get_base_layer()
    else:
        raise ConfigError(
            f"{name} is wrapped in {type(module).__name__}, which cannot be merged into full weights.",
            "Use LoRA on linear layers, or modules_to_save.",
        )
    for suffix, parameter in source.named_parameters():
        yield f"{name}.{suffix}", _full(parameter.detach())


def _full(tensor: Tensor) -> Tensor:
    """A sharded tensor (FSDP2, a collective) in full; any other as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
