"""Which architectures can be trained on packed rows, and which attention kernel fits a device.

Packed rows change two things that a model may rely on: only `packed_attention_forward` says which token sees which
(masks are not read), and no layer but gated DeltaNet (deltanet.py) may carry a state along the sequence, because the
next token can belong to another sample. Everything here reads configs and class attributes, so a model is refused
before its weights are loaded (reference, 'Compatibility and constraints').
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

from asyncgrpo_core.errors import ConfigError
from asyncgrpo_core.models.deltanet import LAYER_CLASSES as GATED_DELTANET_CLASSES

MIN_TRANSFORMERS = "5.2.0"
MIN_TRANSFORMERS_GATED_DELTANET = "5.15.0"

# Layers whose whole behaviour is in the attention call: causal, or causal inside a window ("attention" is the name
# that configs with their own list of blocks use).
_PACKED_LAYERS = ("full_attention", "sliding_attention", "attention")
# Models with a learned sink per head whose config says nothing about it; `check_model` finds the others' parameters.
_SINK_MODEL_TYPES = ("gpt_oss", "granite_swa", "granitemoe_swa", "hy_v4", "mimo_v2_flash", "deepseek_v4")
# Models that apply their sliding window through the mask alone: on the layers of a list, or on all of them.
_WINDOW_IN_MASK_MODEL_TYPES = ("qwen2_moe", "phimoe", "doge")


@dataclass(frozen=True)
class DeviceTraits:
    """What the choice of an attention kernel depends on."""

    rocm: bool
    major: int  # CUDA compute capability, first number; of no meaning on ROCm

    @property
    def blackwell(self) -> bool:
        return not self.rocm and self.major >= 10

    @property
    def name(self) -> str:
        if self.rocm:
            return "an AMD GPU (ROCm)"
        return "an NVIDIA Blackwell GPU" if self.blackwell else "an NVIDIA GPU"


def device_traits(properties: Any, hip_version: str | None) -> DeviceTraits:
    """From `torch.cuda.get_device_properties(...)` and `torch.version.hip` (None on a CUDA build)."""
    return DeviceTraits(rocm=hip_version is not None, major=int(properties.major))


def current_device_traits() -> DeviceTraits | None:
    """Of the device that torch would train on now; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    return device_traits(torch.cuda.get_device_properties(torch.cuda.current_device()), torch.version.hip)


def hub_attention_kernel(device: DeviceTraits) -> str:
    """The repository that the `kernels` library loads attention from on this device (reference, line 38)."""
    if device.rocm:
        return "kernels-community/aiter-flash-attn"
    return "kernels-community/flash-attn4" if device.blackwell else "kernels-community/flash-attn3"


def dense_attention_layers(text_config: Any) -> bool:
    """Whether every layer is attention and a dense block: nothing but attention looks at other tokens of a row, and
    nothing branches on data (routers count tokens, recurrent layers carry a state along them).
    """
    if any(getattr(text_config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        return False
    return set(_layer_types(text_config)) <= set(_PACKED_LAYERS)


def head_dims(text_config: Any) -> tuple[int, int] | None:
    """(of queries and keys, of values), the largest of all layers, which may differ (Gemma 4).

    Multi-head latent attention (DeepSeek) has narrower values; its `head_dim` is that of the rotary part alone. None
    where the config does not say.
    """
    wide, values = [0], [0]
    for layer in getattr(text_config, "per_layer_config", None) or [text_config]:
        heads = getattr(layer, "num_attention_heads", None)
        size = getattr(layer, "head_dim", None) or (layer.hidden_size // heads if heads else 0)
        if getattr(layer, "qk_nope_head_dim", None) is not None:
            size = layer.qk_nope_head_dim + layer.qk_rope_head_dim
        wide.append(size)
        values.append(getattr(layer, "v_head_dim", None) or size)
    return (max(wide), max(values)) if max(wide) else None


def longest_sample(text_config: Any) -> int | None:
    """Above this many tokens a sample changes the rotary frequencies of its whole row; None: it never does.

    transformers takes them from the longest sequence of a forward (longrope of Phi 3 and 4, dynamic NTK), a server
    from its own longest: what a sample is worth would depend on its neighbours.
    """
    rope = getattr(text_config, "rope_parameters", None) or {}
    each = [rope] if "rope_type" in rope else [value for value in rope.values() if isinstance(value, dict)]
    limits = [
        value.get("original_max_position_embeddings") or text_config.max_position_embeddings
        for value in each
        if value.get("rope_type") == "longrope"
    ]
    limits += [text_config.max_position_embeddings for value in each if value.get("rope_type") == "dynamic"]
    return min(limits, default=None)


def check_transformers(version: str | None = None) -> None:
    """Raises ConfigError below `MIN_TRANSFORMERS`. `version` defaults to the installed one."""
    installed = version or transformers.__version__
    if _older(installed, MIN_TRANSFORMERS):
        raise ConfigError(
            f"transformers {installed} is installed; the trainer needs transformers>={MIN_TRANSFORMERS}.",
            f'Run pip install "transformers>={MIN_TRANSFORMERS}".',
        )


def check_config(config: Any, device: DeviceTraits | None, *, transformers_version: str | None = None) -> None:
    """Refuse an architecture that packed rows would compute wrongly, by its transformers config.

    Args:
        config: of the whole model; the text part is what is looked at.
        device: where it will train; None for a CPU.
        transformers_version: defaults to the installed one.

    Raises:
        ConfigError: attention sinks, a layer that is neither causal attention nor gated DeltaNet, capped attention
            logits on AMD or Blackwell, bidirectional attention, an encoder-decoder.
    """
    text = config.get_text_config(decoder=True)
    kind = type(text).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"{kind} is an encoder-decoder; packed rows need a decoder.", "Train a causal model.")
    if text.model_type in _SINK_MODEL_TYPES:
        raise _sinks(kind)
    _check_layers(text, transformers_version or transformers.__version__)
    if getattr(text, "use_bidirectional_attention", None):
        raise ConfigError(
            f"{kind} sets use_bidirectional_attention; packed rows are attended to causally.", "Train a causal model."
        )
    if device is not None and getattr(text, "attn_logit_softcapping", None) and (device.rocm or device.blackwell):
        raise ConfigError(
            f"{kind} caps its attention logits (attn_logit_softcapping={text.attn_logit_softcapping}), which is not "
            f"supported on {device.name}.",
            "Train it on an NVIDIA GPU before Blackwell, or train a model without the cap.",
        )


def check_model(model: nn.Module) -> None:
    """Refuse what only the loaded model shows: a recurrent state, or a parameter that is an attention sink.

    Raises:
        ConfigError: it has one.
    """
    if getattr(model, "_is_stateful", False) and _text_model_type(model) not in GATED_DELTANET_CLASSES:
        raise _recurrent(type(model).__name__)
    for name, _ in model.named_parameters():
        if name.rpartition(".")[2] in ("sink", "sinks", "attention_sink_bias"):
            raise _sinks(f"{type(model).__name__} (parameter {name})")


def saved_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of what a checkpoint of `module` holds: parameters and persistent buffers, a shared one once."""
    seen: set[int] = set()
    for path, inner in module.named_modules():
        buffers = {n: b for n, b in inner._buffers.items() if n not in inner._non_persistent_buffers_set}
        for name, tensor in (*inner._parameters.items(), *buffers.items()):
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{path}.{name}" if path else name, tensor


def outside_text_model(model: PreTrainedModel) -> set[str]:
    """Names of the tensors (`saved_tensors`) outside the text model and its head: vision tower, projector.

    Empty for a text model.
    """
    if model.config.get_text_config(decoder=True) is model.config:
        return set()
    parts = (model.get_decoder(), model.get_output_embeddings())
    inside = {id(tensor) for part in parts if part is not None for _, tensor in saved_tensors(part)}
    return {name for name, tensor in saved_tensors(model) if id(tensor) not in inside}


def freeze_outside_text_model(model: PreTrainedModel) -> None:
    """`requires_grad=False` for `outside_text_model`: text never reaches it (reference, Vision Language Models)."""
    outside = outside_text_model(model)
    for name, parameter in model.named_parameters():
        if name in outside:
            parameter.requires_grad_(False)


def _check_layers(text: Any, version: str) -> None:
    kind = type(text).__name__
    if text.model_type in _WINDOW_IN_MASK_MODEL_TYPES and not getattr(text, "layer_types", None):
        window = getattr(text, "sliding_window", None)
        if window is not None and window < text.max_position_embeddings:
            raise _window_in_mask(kind, "Set sliding_window=None if the model was trained so")
    for i, layer in enumerate(_layer_types(text)):
        if layer == "sliding_attention" and text.model_type in _WINDOW_IN_MASK_MODEL_TYPES:
            raise _window_in_mask(f"Layer {i} of {kind}", "Set use_sliding_window=False if the model was trained so")
        if layer in _PACKED_LAYERS:
            continue
        if layer == "linear_attention" and hasattr(text, "linear_num_value_heads"):
            _check_gated_deltanet(text, i, version)
            continue
        raise ConfigError(
            f"Layer {i} of {kind} is {_layer_name(text, layer)}, not causal attention; of such layers only gated "
            "DeltaNet can be trained on packed rows.",
            "Train a model whose layers are all full or sliding attention.",
        )
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), None)
    if getattr(model_class, "_is_stateful", False) and text.model_type not in GATED_DELTANET_CLASSES:
        raise _recurrent(f"{kind} ({text.model_type})")


def _layer_types(text: Any) -> Iterable[str]:
    for name in ("layer_types", "layers_block_type", "block_types"):
        value = getattr(text, name, None)
        if value:
            return list(value)
    return []


def _layer_name(text: Any, layer: str) -> str:
    """What to call a layer; transformers' "linear_attention" stands for every layer with a recurrent state."""
    is_mamba = any(name.startswith("mamba") or name == "state_size" for name in vars(text))
    if layer == "linear_attention":
        return "a Mamba layer ('linear_attention')" if is_mamba else f"a linear attention layer of {text.model_type}"
    return f"a {layer!r} layer" + (" (attention and Mamba)" if layer == "hybrid" and is_mamba else "")


def _check_gated_deltanet(text: Any, layer: int, version: str) -> None:
    kind = type(text).__name__
    if text.model_type not in GATED_DELTANET_CLASSES:
        raise ConfigError(
            f"Layer {layer} of {kind} is a linear attention layer of {text.model_type}; of such models only "
            f"{', '.join(GATED_DELTANET_CLASSES)} can be trained on packed rows.",
            "Train one of those, or a model whose layers are all full or sliding attention.",
        )
    if _older(version, MIN_TRANSFORMERS_GATED_DELTANET):
        raise ConfigError(
            f"Layer {layer} of {kind} is a gated DeltaNet layer, which needs "
            f"transformers>={MIN_TRANSFORMERS_GATED_DELTANET}; {version} is installed.",
            f'Run pip install "transformers>={MIN_TRANSFORMERS_GATED_DELTANET}".',
        )


def _text_model_type(model: Any) -> str | None:
    config = getattr(model, "config", None)
    return None if config is None else config.get_text_config(decoder=True).model_type


def _recurrent(what: str) -> ConfigError:
    return ConfigError(
        f"{what} keeps a recurrent state, which would run from one sample of a packed row into the next.",
        "Train a model whose layers are all full or sliding attention.",
    )


def _window_in_mask(what: str, remedy: str) -> ConfigError:
    return ConfigError(
        f"{what} applies its sliding window through the mask, which packed rows do not read.",
        f"{remedy}, or train another architecture.",
    )


def _sinks(what: str) -> ConfigError:
    return ConfigError(
        f"{what} has attention sinks, which packed rows do not support.", "Train a model of another architecture."
    )


def _older(version: str, floor: str) -> bool:
    # A pre-release of the floor counts as the floor: it has the code.
    return Version(Version(version).base_version) < Version(floor)
