"""The policy's weights under the names a vLLM server loads: those of its checkpoint, adapters merged, ties once.

Weights are parameters and *saved buffers*: DeepSeek's and GLM's `e_score_correction_bias`, which decides what experts
a token gets, and Gemma 4's `layer_scalar` are no parameters, but a server that starts with random weights (the default)
would keep random ones.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from asyncgrpo_core.errors import ConfigError
from asyncgrpo_core.models.forward import causal_model
from asyncgrpo_core.models.support import outside_text_model, saved_tensors

# Architectures whose published checkpoints hold fused experts as [experts, inputs, outputs]. transformers turns them
# round when it loads them and not when it saves; vLLM wants them as published.
_PUBLISHED_TRANSPOSED = ("qwen3_vl_moe",)
# Names that transformers gives when it saves and vLLM does not know; it wants those that the model itself has.
_NAMES_OF_VLLM = {
    "olmo_hybrid": {"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"},
}


def iter_server_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of everything the server must hold, detached, in the trainer's dtype.

    * Names and layouts are those of the published checkpoint, which are what vLLM loads. They differ from the model's
      own where transformers converts a checkpoint when it loads it (the experts of a Mixture-of-Experts layer are one
      tensor in the model and one tensor each in most checkpoints); its own conversion is reversed, as when it saves.
    * Buffers are yielded where the checkpoint holds them (persistent ones). What training does not change, they and
      frozen parameters, is yielded as `nn.Buffer`.
    * A tied pair (input and output embedding) is yielded once, under the embedding's name.
    * With PEFT, a layer that carries adapters is yielded merged (reference: "merges the adapter into the base model
      and sends the full merged weights"). The merge happens on a copy of that one layer, so the base weights are
      never touched, not even by rounding, and at most one layer is held twice.
    * Of a vision-language model the text model alone is yielded: the rest is frozen, the server has it already.
    * Sharded tensors are gathered; then every rank must iterate.

    At most one decoder layer is gathered or copied at a time. Tensors may alias the live weights: copy or send them
    before the next optimizer step. Those that do for certain, and so cost no memory as long as they are kept, have an
    attribute `live_weight` that is true.

    Raises:
        ConfigError: an adapter that cannot be merged, weights that are stored quantised, or a conversion that reaches
            over several layers.
    """
    base = causal_model(model)
    sources = list(_sources(base))
    shapes = {name: shape for source in sources for name, shape in source.shapes.items()}
    _check_not_quantised(base, shapes)
    saved = _as_published(base, dict(shapes))
    # Not by name alone: a converted tensor may keep its name.
    kept = {name for name, shape in shapes.items() if saved.get(name) is shape}
    yielded = set()
    for _, layer in itertools.groupby(sources, key=lambda source: source.layer):
        converted: dict[str, Tensor] = {}
        for source in layer:
            for name, tensor in source.read():
                if name in kept:
                    yielded.add(name)
                    yield name, tensor
                else:
                    converted[name] = tensor
        constant = all(isinstance(tensor, nn.Buffer) for tensor in converted.values())
        for name, tensor in _as_published(base, converted).items():
            yielded.add(name)
            yield name, nn.Buffer(tensor) if constant else tensor
    if yielded != saved.keys():
        raise ConfigError(
            f"The weights of {type(base).__name__} cannot be sent layer by layer: its checkpoint's "
            f"{sorted(yielded ^ saved.keys())[:4]} are made of several layers.",
            "Train a model of another architecture.",
        )


def _check_not_quantised(base: PreTrainedModel, shapes: dict[str, Tensor]) -> None:
    """Raises ConfigError for matrices of 8 bits or fewer: packed as their library wants them, not as a server loads."""
    for name, tensor in shapes.items():
        if tensor.ndim >= 2 and tensor.dtype.itemsize == 1:
            raise ConfigError(
                f"{type(base).__name__} is quantised ({name} is stored in {str(tensor.dtype).removeprefix('torch.')}), "
                "and full weights cannot be sent from it.",
                "Load the model in bfloat16 or float32; or train a LoRA adapter and send it alone "
                "(server.enable_lora), to a server of the same quantised model.",
            )


def _as_published(base: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Under the names and in the layouts of the checkpoint; a tensor that stays as it is comes back as the object."""
    if not tensors:
        return {}
    saved = revert_weight_conversion(base, tensors)
    renamed = _NAMES_OF_VLLM.get(base.config.model_type, {})
    saved = {".".join(renamed.get(part, part) for part in name.split(".")): t for name, t in saved.items()}
    if base.config.model_type not in _PUBLISHED_TRANSPOSED:
        return saved
    fused = (".experts.gate_up_proj", ".experts.down_proj")
    return {n: t.transpose(1, 2).contiguous() if n.endswith(fused) else t for n, t in saved.items()}


@dataclass(frozen=True)
class _Source:
    """Tensors that are read together: one of the model's own, or those of a layer with adapters."""

    layer: str  # sources of one decoder layer follow each other
    shapes: dict[str, Tensor]  # on the meta device, by the name without adapters
    read: Callable[[], Iterator[tuple[str, Tensor]]]


def _sources(base: PreTrainedModel) -> Iterator[_Source]:
    adapted = _adapter_modules(base)
    done: set[str] = set()
    outside = outside_text_model(base)
    for name, tensor in saved_tensors(base):
        if name in outside:
            continue
        owner = _owner(name, adapted)
        if owner is None:
            yield _Source(_layer(name), {name: _meta(tensor)}, _reader(name, tensor))
        elif owner not in done:
            done.add(owner)
            unmerged = saved_tensors(_plain_layer(owner, adapted[owner]))
            shapes = {f"{owner}.{suffix}": _meta(tensor) for suffix, tensor in unmerged}
            yield _Source(_layer(owner), shapes, _merging_reader(owner, adapted[owner]))


def _reader(name: str, tensor: Tensor) -> Callable[[], Iterator[tuple[str, Tensor]]]:
    def read() -> Iterator[tuple[str, Tensor]]:
        whole: Any = _full(tensor.detach())
        if not tensor.requires_grad:
            whole = nn.Buffer(whole)
        whole.live_weight = not _is_sharded(tensor)
        yield name, whole

    return read


def _merging_reader(owner: str, module: Any) -> Callable[[], Iterator[tuple[str, Tensor]]]:
    return lambda: _effective(owner, module)


def _layer(name: str) -> str:
    """Up to the first number ("model.layers.3"); a name without one stands for itself."""
    parts = name.split(".")
    end = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: end + 1])


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


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


def _plain_layer(name: str, module: Any) -> nn.Module:
    """The layer under a wrapped module's adapters, unmerged.

    Raises:
        ConfigError: of a kind that cannot be merged.
    """
    if hasattr(module, "modules_to_save"):  # trained in full, the original is kept beside it
        return module.modules_to_save[module.active_adapters[0]]
    module = _mergeable(module)
    if hasattr(module, "merge"):
        return module.get_base_layer()
    raise ConfigError(
        f"{name} is wrapped in {type(module).__name__}, which cannot be merged into full weights.",
        "Use LoRA on linear layers, or modules_to_save.",
    )


def _mergeable(module: Any) -> Any:
    """The part of a wrapped module that merges: of an embedding some of whose rows are trained, an adapter inside."""
    return getattr(module, "token_adapter", module)


@torch.no_grad()
def _effective(name: str, module: Any) -> Iterator[tuple[str, Tensor]]:
    """The weights that a wrapped module computes with, under the names it has without the wrapper."""
    source = _plain_layer(name, module)
    if not hasattr(module, "modules_to_save"):
        merged = copy.deepcopy(_mergeable(module))
        while hasattr(merged, "merge"):  # PEFT nests one wrapper per parameter when several of a module are adapted
            merged.merge()
            merged = merged.base_layer
        source = merged
    for suffix, tensor in saved_tensors(source):
        yield f"{name}.{suffix}", _full(tensor.detach())


def server_names(model: nn.Module) -> set[str]:
    """What the model calls the tensors of `iter_server_parameters`, before they get their checkpoint's names."""
    return {name for source in _sources(causal_model(model)) for name in source.shapes}


def check_merge(model: nn.Module) -> None:
    """Merge one layer of each kind of adapter, on a copy, so that what cannot be sent is known before a run starts.

    Raises:
        ConfigError: an adapter that cannot be merged.
    """
    smallest: dict[Any, tuple[int, str, nn.Module]] = {}
    for name, module in _adapter_modules(causal_model(model)).items():
        _plain_layer(name, module)
        inner = getattr(_mergeable(module), "lora_variant", {}).values()
        kind = (type(module), *sorted(type(variant).__name__ for variant in inner))
        size = sum(tensor.numel() for _, tensor in saved_tensors(module))
        if kind not in smallest or size < smallest[kind][0]:
            smallest[kind] = (size, name, module)
    for _, name, module in smallest.values():
        try:
            for _ in _effective(name, module):
                pass
        except (NotImplementedError, RuntimeError, ValueError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"The adapter of {name} cannot be merged into full weights: {str(error) or type(error).__name__}.",
                "Use LoRA, or another adapter that PEFT merges.",
            ) from error


def _full(tensor: Tensor) -> Tensor:
    """A sharded tensor (FSDP2, a collective) in full; any other as it is."""
    return tensor.full_tensor() if _is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def _is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")
