"""The policy's adapter as a folder that vLLM can load, and a probe of the way it takes there.

Folders are written by PEFT's own `save_pretrained`. What vLLM cannot serve as an adapter is said by `served_adapter`:
such a policy is sent as merged weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from asyncgrpo_core.errors import ConfigError
from asyncgrpo_core.models.forward import causal_model
from asyncgrpo_core.models.support import outside_text_model

# Initialisations that change the base weights too: the adapter alone is then not the policy.
_PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica")

_PROBE_SEED = 1618
_USUAL_SPREAD = 0.02  # of a weight that is stored quantised


@dataclass(frozen=True)
class ServedAdapter:
    """The active adapter of a policy.

    Attributes:
        rank: the highest rank of its modules.
        obstacle: why vLLM cannot serve it as an adapter; None when it can.
    """

    rank: int
    obstacle: str | None = None


def served_adapter(model: Any) -> ServedAdapter | None:
    """What a server needs to know of the policy's adapter; None for a policy without one."""
    if not hasattr(model, "peft_config"):
        return None
    active = list(model.active_adapters)
    if len(active) != 1:
        return ServedAdapter(0, f"it has {len(active)} active adapters, and vLLM applies one")
    config = model.peft_config[active[0]]
    if getattr(config.peft_type, "value", config.peft_type) != "LORA":
        return ServedAdapter(0, f"it is of type {getattr(config.peft_type, 'value', config.peft_type)}, not LoRA")
    rank = max([config.r, *(config.rank_pattern or {}).values()])
    return ServedAdapter(rank, _obstacle(model, config))


def _obstacle(model: Any, config: Any) -> str | None:
    init = config.init_lora_weights
    refused = {
        "it uses DoRA": config.use_dora,
        "it has biases": config.bias != "none" or getattr(config, "lora_bias", False),
        "it trains whole modules beside the adapter (modules_to_save)": config.modules_to_save,
        "it trains single tokens of the embedding": getattr(config, "trainable_token_indices", None),
        "it adapts parameters that belong to no linear layer (target_parameters)": getattr(
            config, "target_parameters", None
        ),
        "it repeats layers (layer_replication)": getattr(config, "layer_replication", None),
        "it is applied to a part of the prompt (alora_invocation_tokens)": getattr(
            config, "alora_invocation_tokens", None
        ),
        "it is block-diagonal (use_bdlora)": getattr(config, "use_bdlora", None),
        "it is a QALoRA": getattr(config, "use_qalora", False),
        f"its initialisation {init!r} changes the base weights": isinstance(init, str)
        and init.lower() not in _PLAIN_INITS,
    }
    for reason, found in refused.items():
        if found:
            return f"{reason}, which vLLM does not serve"
    for name, module in _adapted(model):
        if not hasattr(module, "lora_A") or not module.lora_A:
            return f"{name} is adapted by {type(module).__name__}, which vLLM does not serve"
        for variant in getattr(module, "lora_variant", {}).values():  # PEFT's word for more than A and B
            return f"{name} is a {type(variant).__name__}, which vLLM does not serve"
    return None


def save_adapter(model: Any, folder: Path, *, write: bool = True) -> Path:
    """Write the active adapter under `folder` and return where exactly.

    Where weights are sharded every rank calls it, and one of them with `write`.

    Raises:
        ConfigError: there is nothing to write.
    """
    (name,) = model.active_adapters
    frozen = outside_text_model(causal_model(model))  # of a vision tower: the server has no use for it
    prefix = _prefix(model)
    state = {
        key: _full(parameter.detach())
        for key, parameter in model.named_parameters()
        if ".lora_" in key and f".{name}." in key and key.removeprefix(prefix) not in frozen
    }
    if not state:
        raise ConfigError(f"The adapter {name!r} has no weights.", "Check its target_modules.")
    place = folder if name == "default" else folder / name
    if not write:
        return place
    # save_embedding_layers="auto" would ask the hub about the base model
    model.save_pretrained(folder, selected_adapters=[name], state_dict=state, save_embedding_layers=False)
    return place


class ProbeWeights:
    """Replaces the adapter's weights by random numbers for a moment; where they are sharded, on every rank alike."""

    def __init__(self, model: Any) -> None:
        (self._name,) = model.active_adapters
        self._modules = [module for _, module in _adapted(model) if self._name in module.lora_A]
        self._saved: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def set(self, share: float) -> None:
        """Weights whose change of each layer's weight has `share` of its size; 0.0 switches the adapter off."""
        if not self._saved:
            self._saved = [(a.detach().clone(), b.detach().clone()) for a, b in self._pairs()]
        for index, module in enumerate(self._modules):
            _randomise(module, self._name, share, seed=_PROBE_SEED + index)

    @torch.no_grad()
    def restore(self) -> None:
        """The weights as they were. Idempotent."""
        saved, self._saved = self._saved, []
        for (a, b), (old_a, old_b) in zip(self._pairs(), saved, strict=True) if saved else ():
            a.copy_(old_a)
            b.copy_(old_b)

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        return [(module.lora_A[self._name].weight, module.lora_B[self._name].weight) for module in self._modules]


def _randomise(module: Any, name: str, share: float, seed: int) -> None:
    """Random A and B, so that scaling * B A is `share` of the weight's own size (root mean square)."""
    a, b = module.lora_A[name].weight, module.lora_B[name].weight
    generator = torch.Generator().manual_seed(seed)
    for factor in (a, b):
        _assign(factor, torch.randn(factor.shape, generator=generator))
    # an element of B A is a sum of r products of unit normals: its root mean square is sqrt(r)
    size = abs(module.scaling[name]) * b.shape[1] ** 0.5
    weight = _full(module.get_base_layer().weight.detach())
    spread = float(weight.float().pow(2).mean().sqrt()) if weight.is_floating_point() else _USUAL_SPREAD
    b.mul_(share * spread / max(size, 1e-12))


def _assign(parameter: Any, value: Tensor) -> None:
    value = value.to(device=parameter.device, dtype=parameter.dtype)
    if hasattr(parameter, "full_tensor"):  # sharded (FSDP2)
        from torch.distributed.tensor import distribute_tensor

        value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
    parameter.copy_(value)


def _adapted(model: Any) -> list[tuple[str, Any]]:
    """The text model's layers that carry an adapter."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    base = causal_model(model)
    frozen = outside_text_model(base)
    found: list[tuple[str, Any]] = [
        (n, module) for n, module in base.named_modules() if isinstance(module, BaseTunerLayer)
    ]
    return [(name, m) for name, m in found if not any(f"{name}.{key}" in frozen for key, _ in m.named_parameters())]


def _prefix(model: nn.Module) -> str:
    """What PEFT puts before the names of the model's own parameters."""
    base = causal_model(model)
    return next(f"{name}." for name, module in model.named_modules() if module is base)


def _full(tensor: Tensor) -> Tensor:
    """A sharded tensor (FSDP2, a collective) in full; any other as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
