"""Gated DeltaNet layers (Qwen3-Next, Qwen3.5, OLMo Hybrid) on the prefix trie of a packed row.

Such a layer mixes tokens in two places only, each one function of its transformers module: `causal_conv1d_fn`, whose
outputs read the last `kernel_size - 1` tokens, and `torch_chunk_gated_delta_rule`, which carries a state along the
sequence. `install` puts a function of the same name in front of each. With a row's plan, the convolution reads each
token's own predecessors and the delta rule starts each segment from its parent's final state, gradients included
(reference, 'Tree packing'); both do it by calling transformers' own function, thus also the kernels of `fla`,
`causal_conv1d` and the hub where those are in use. Without a plan (generation, an ordinary forward) the call goes
through unchanged. Projections, gates and norms are transformers' code in both cases.

The plan arrives as the keyword `packed_attention`, the same way as in attention: from transformers 5.15.0 on, decoder
layer, DeltaNet layer and both functions hand unknown keywords on. So nothing is kept between calls: gradient
checkpointing, reentrant or not, repeats a layer's forward with the keywords of its first run, whichever row the model
has seen in between, and FSDP, DDP and PEFT wrap a call that has all it needs.

Cost, against the same layer on a plain row of as many tokens:

    convolution   1 call on the whole row, and 1 on S windows of 2 (kernel_size - 1) tokens, with 6 small kernels
    delta rule    1 call per depth of the trie (more where lengths differ much, see `deltanet_schedule`), each with 5
                  gathers, 2 masks, and 1 gather of states; 2 kernels put the outputs back
    state         only final states that a child reads are kept, and only until the next depth is done

Inside transformers' own PyTorch delta rule, each call is a loop over chunks of 64 tokens: a tree runs the longest
segment of each depth in sequence, where a plain sequence runs all its tokens, T / 64 iterations. Counted for a forward
of a layer: 62 kernels and 9 per iteration for one sample, with or without a plan; each further depth adds about 67 and
9 per iteration. With `fla`, the segments of a depth go end to end with `cu_seqlens`, without padding.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from asyncgrpo_core.errors import ConfigError
from asyncgrpo_core.models.deltanet_schedule import Call, conv_patch, recurrence_schedule
from asyncgrpo_core.models.row_plan import RowPlan

# Text config's model_type -> the class of its linear-attention layers.
LAYER_CLASSES = {
    "qwen3_next": "Qwen3NextGatedDeltaNet",
    "qwen3_5_text": "Qwen3_5GatedDeltaNet",
    "qwen3_5_moe_text": "Qwen3_5MoeGatedDeltaNet",
    "olmo_hybrid": "OlmoHybridGatedDeltaNet",
}

_CONVOLUTION, _DELTA_RULE = "causal_conv1d_fn", "torch_chunk_gated_delta_rule"
MIXING_FUNCTIONS = (_CONVOLUTION, _DELTA_RULE)
# Largest chunk of transformers' own delta rule, its default.
_MAX_CHUNK = 64


def install(decoder: nn.Module, text_config: Any) -> None:
    """Make the gated DeltaNet layers of `decoder` follow a row's plan (module docstring). Idempotent.

    Does nothing for a model without linear-attention layers.

    Raises:
        ConfigError: its linear-attention layers are of another kind, or are computed by code that does not pass
            through the two functions (a whole-layer kernel from the hub, a transformers version that changed).
    """
    layer_types = list(getattr(text_config, "layer_types", None) or ())
    wanted = layer_types.count("linear_attention")
    if not wanted:
        return
    name = LAYER_CLASSES.get(text_config.model_type)
    layers = [m for m in decoder.modules() if type(m).__name__ == name]
    if len(layers) != wanted:
        raise ConfigError(
            f"{type(text_config).__name__} has {wanted} linear attention layers, of which {len(layers)} are gated "
            f"DeltaNet layers known here ({name or 'none for model_type ' + repr(text_config.model_type)}).",
            f"Train a model of type {', '.join(LAYER_CLASSES)}, or one with attention layers only.",
        )
    for layer in layers:
        _check_layer(layer)
    for module in {type(layer).__module__ for layer in layers}:
        _hook(sys.modules[module])


def _check_layer(layer: nn.Module) -> None:
    kind = type(layer).__name__
    # accelerate's offloading hooks also replace the forward, and call the layer's own.
    if "forward" in vars(layer) and not hasattr(layer, "_hf_hook"):
        raise ConfigError(
            f"The forward of {kind} is replaced by a kernel for the whole layer, which packed rows cannot go through.",
            "Load the model without use_kernels.",
        )
    codes = [function.__code__ for function in _behind(type(layer).forward)]
    uses_both = [code for code in codes if {_CONVOLUTION, _DELTA_RULE} <= set(code.co_names)]
    if not any(code.co_flags & inspect.CO_VARKEYWORDS for code in uses_both):
        raise ConfigError(
            f"{kind} of transformers {transformers.__version__} does not compute through {_CONVOLUTION} and "
            f"{_DELTA_RULE}, which packed rows rely on.",
            "Install a transformers version from 5.15.0 to 5.19.0, or train a model with attention layers only.",
        )


def _hook(module: Any) -> None:
    for name in MIXING_FUNCTIONS:
        original = getattr(module, name)
        if not hasattr(original, "unplanned"):
            set_function(module, name, original)


def set_function(
    module: Any, name: str, original: Callable[..., Any], instead_of: Callable[..., Any] | None = None
) -> None:
    """Let the gated DeltaNet layers of a transformers module compute one of `MIXING_FUNCTIONS` by `original`.

    `instead_of` is what transformers chose, when that is another one (`chosen_by_transformers`).
    """
    planned: Any = (_planned_convolution if name == _CONVOLUTION else _planned_delta_rule)(original)
    planned.chosen = original if instead_of is None else instead_of
    setattr(module, name, planned)


def chosen_by_transformers(function: Any) -> Callable[..., Any]:
    """What transformers computes one of `MIXING_FUNCTIONS` by, also where `set_function` put another in its place."""
    return getattr(function, "chosen", getattr(function, "unplanned", function))


def transformers_own(function: Any) -> types.FunctionType:
    """The PyTorch code of one of `MIXING_FUNCTIONS`, behind whatever kernel transformers chose for it.

    Raises:
        ConfigError: there is none.
    """
    function = getattr(function, "unplanned", function)
    start = type(function).forward if isinstance(function, nn.Module) else function
    for inner in _behind(start):
        if hasattr(inner, "__wrapped__"):
            return inspect.unwrap(inner)  # type: ignore[return-value]
    if isinstance(start, types.FunctionType):
        return start
    raise ConfigError(
        f"No PyTorch code was found behind {function!r} of transformers {transformers.__version__}.",
        "Install a transformers version from 5.15.0 to 5.19.0.",
    )


def uses_kernel(function: Any) -> bool:
    """Whether one of `MIXING_FUNCTIONS` is computed by other code than transformers' own."""
    function = getattr(function, "unplanned", function)
    return "forward" in vars(function) or _implementation(function) not in (None, transformers_own(function))


def _planned_convolution(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def causal_conv1d_fn(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        packed_attention: RowPlan | None = None,
        **kwargs: Any,
    ) -> Tensor:
        convolve = functools.partial(original, weight=weight, bias=bias, activation=activation, **kwargs)
        if packed_attention is None:
            return convolve(hidden_states)
        return tree_convolution(convolve, hidden_states, packed_attention, weight.shape[-1])

    causal_conv1d_fn.unplanned = original  # type: ignore[attr-defined]
    return causal_conv1d_fn


def _planned_delta_rule(original: Callable[..., Any]) -> Callable[..., Any]:
    implementation = _implementation(original)
    varlen = (getattr(implementation, "__module__", None) or "").partition(".")[0] == "fla"
    own_chunks = implementation is not None and implementation.__module__.startswith("transformers.")

    def torch_chunk_gated_delta_rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        packed_attention: RowPlan | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if packed_attention is None:
            return original(query, key, value, g=g, beta=beta, **kwargs)
        for name in ("initial_state", "output_final_state", "cu_seqlens"):  # no cache, one row: the plan says it all
            kwargs.pop(name, None)
        rule = functools.partial(original, **kwargs)
        replaced = "forward" in vars(original)  # by a kernel from the hub, of which only the usual arguments are known
        out = tree_delta_rule(
            rule,
            (query, key, value, g, beta),
            packed_attention,
            varlen=varlen and not replaced,
            own_chunks=own_chunks and not replaced,
        )
        return out, None

    torch_chunk_gated_delta_rule.unplanned = original  # type: ignore[attr-defined]
    return torch_chunk_gated_delta_rule


def _implementation(function: Any) -> Any:
    """What transformers chose behind a function of its kernel registry; None when that cannot be told."""
    if isinstance(function, types.FunctionType) and not function.__closure__:
        return function
    start = getattr(type(function), "forward", None) if isinstance(function, nn.Module) else function
    for inner in _behind(start):
        variables = inspect.getclosurevars(inner).nonlocals
        if "implementation" in variables:
            return variables["implementation"]
    return None


def _behind(function: Any) -> Iterator[types.FunctionType]:
    """A function, and what its decorators hold of it."""
    waiting, seen = [function], set()
    while waiting:
        found = waiting.pop(0)
        if not isinstance(found, types.FunctionType) or id(found) in seen:
            continue
        seen.add(id(found))
        yield found
        waiting += [cell.cell_contents for cell in found.__closure__ or ()]


def tree_convolution(
    convolve: Callable[[Tensor], Tensor], hidden_states: Tensor, plan: RowPlan, kernel_size: int
) -> Tensor:
    """[1, C, T] -> [1, C, T]: `convolve`, a causal convolution over the last dimension, along each token's path."""
    out = convolve(hidden_states)
    patch = conv_patch(plan, kernel_size)
    if patch is None:
        return out
    # The last tokens of a segment are read by all its children. In 16 bits, adding up so many gradients loses them.
    wide = torch.promote_types(hidden_states.dtype, torch.float32)
    read = hidden_states[0].transpose(0, 1).index_select(0, patch.sources).to(wide)
    windows = read.index_select(0, patch.windows).view(patch.num_windows, -1, read.shape[1])
    windows = windows.masked_fill(patch.missing, 0).to(hidden_states.dtype)
    fixed = convolve(windows.transpose(1, 2)).transpose(1, 2).flatten(0, 1).index_select(0, patch.results)
    return out.index_copy(2, patch.positions, fixed.transpose(0, 1)[None])


def tree_delta_rule(
    rule: Callable[..., tuple[Tensor, Tensor | None]],
    tensors: tuple[Tensor, ...],
    plan: RowPlan,
    *,
    varlen: bool,
    own_chunks: bool,
) -> Tensor:
    """The gated delta rule along each token's path.

    Args:
        rule: takes query, key, value, g, beta, `initial_state` and `output_final_state`; returns outputs and states.
        tensors: query, key [1, T, H, K], value [1, T, H, V], g (log decay) and beta [1, T, H].
        varlen: `rule` takes `cu_seqlens`.
        own_chunks: `rule` takes `chunk_size` and computes whole chunks.

    Returns:
        [1, T, H, V].
    """
    schedule = recurrence_schedule(plan, padded=not varlen)
    outputs = []
    states: Tensor | None = None  # [kept, H, K, V] of the depth before
    for calls in schedule.depths:
        kept = []
        for call in calls:
            options: dict[str, Any] = {} if call.cu_seqlens is None else {"cu_seqlens": call.cu_seqlens}
            if own_chunks:
                options["chunk_size"] = min(_MAX_CHUNK, 1 << (call.length - 1).bit_length())
            query, key, value, g, beta = (_take(x, call) for x in tensors)
            if call.padding is not None:  # a token with no decay (g = 0) and no update (beta = 0) leaves the state
                g, beta = g.masked_fill(call.padding, 0), beta.masked_fill(call.padding, 0)
            initial = None if states is None or call.initial is None else states.index_select(0, call.initial)
            out, final = rule(
                query,
                key,
                value,
                g=g,
                beta=beta,
                initial_state=initial,
                output_final_state=call.keep is not None,
                **options,
            )
            outputs.append(out.flatten(0, 1))
            if call.keep is not None and final is not None:
                kept.append(final.index_select(0, call.keep))
        states = torch.cat(kept) if kept else None
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return (joined if schedule.restore is None else joined.index_select(0, schedule.restore))[None]


def _take(x: Tensor, call: Call) -> Tensor:
    """The tokens of a call: [1, T, ...] -> [B, length, ...], or [1, length, ...] end to end."""
    if call.index is None:
        return x[:, call.start : call.start + call.length]  # type: ignore[operator]
    rows = 1 if call.cu_seqlens is not None else call.num_segments
    return x[0].index_select(0, call.index).view(rows, call.length, *x.shape[2:])
