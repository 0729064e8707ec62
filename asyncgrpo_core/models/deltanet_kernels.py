"""Whether the kernels which transformers chose for gated DeltaNet work on this device, found out at load.

The libraries (`fla`, `causal_conv1d`) are chosen by transformers when they can be imported. Whether they compute is
another question: `fla` needs a GPU, refuses the backward pass on Hopper GPUs with Triton 3.4 to 3.7.0, where older ones
computed wrong gradients, and what else a new GPU or compiler breaks is seen in the numbers alone. So one layer like the
policy's, with random weights, goes forward and backward over a small trie, and its output and gradients are held
against transformers' PyTorch code in float32, segment by segment. A kernel that fails there is not used.

The first use of a Triton kernel tries its settings, which takes minutes for `fla`; for the same heads they are not
tried again in this process, so the time is spent here instead of in the first step.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from asyncgrpo_core.errors import ConfigError
from asyncgrpo_core.models import deltanet
from asyncgrpo_core.models.forward import causal_model
from asyncgrpo_core.models.row_plan import RowPlan

logger = logging.getLogger(__name__)

# A trie with segments of several chunks of 64 tokens and of one token, where siblings start from one state and segments
# of one depth from different ones.
_LENGTHS = (130, 70, 1, 65, 20)
_PARENTS = (-1, 0, 1, 0, 3)
_RUNS = 2  # the first of a process searches settings, and is not what the others run
# A segment may be this far from float32, relative to its norm (or to a tenth of what its length lets expect, where it
# is smaller), or this many times as far as PyTorch's code is at the same precision.
_TOLERANCE = {torch.bfloat16: 0.05}
_TOLERANCE_ELSE = 0.02  # kernels for float32 may multiply in TF32
_TIMES_AS_FAR = 4.0
_DEVICE_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError)  # full, or of no more use in this process
_INPUTS = ("hidden_states", "query", "key", "value", "g", "beta")  # of the two functions, by their parameters' names


def keep_working_kernels(model: nn.Module, *, device: torch.device, dtype: torch.dtype) -> None:
    """Put transformers' PyTorch code in the place of each kernel that fails on `device`, with a warning that says why.

    Does nothing for a model without gated DeltaNet layers, or without kernels. Random numbers and gradients stay as
    they were. What was put away is tried again by the next call, which may be for another device or dtype.

    Args:
        model: after `install_packed_forward`, before a wrapper.
        device: where it will train.
        dtype: what its layers compute in (`trainer_parts.training_dtype`).

    Raises:
        ConfigError: a model that was loaded with `use_kernels`: which kernels those are changes when it is moved or
            its mode is, so a trial would be of others than the ones that train.
        torch.OutOfMemoryError, torch.AcceleratorError: the device is full, or of no more use in this process.
    """
    base: Any = causal_model(model)
    layers = {type(m).__module__: m for m in base.modules() if type(m).__name__ in deltanet.LAYER_CLASSES.values()}
    if layers and getattr(base, "_use_kernels", False):
        raise ConfigError(
            "The kernel hub's kernels for gated DeltaNet (use_kernels) cannot be tried before they are used.",
            "Load the model without use_kernels; flash-linear-attention is used where it is installed.",
        )
    for name, layer in layers.items():
        module = sys.modules[name]
        chosen = {f: deltanet.chosen_by_transformers(getattr(module, f)) for f in deltanet.MIXING_FUNCTIONS}
        kernels = {f: kernel for f, kernel in chosen.items() if deltanet.uses_kernel(kernel)}
        if not kernels:
            continue
        gpus = list(range(torch.cuda.device_count())) if device.type == "cuda" else []
        with torch.random.fork_rng(devices=gpus), torch.inference_mode(False), torch.enable_grad():
            torch.manual_seed(0)
            _try_kernels(module, kernels, _Trial(layer, base.config.get_text_config(), device, dtype))


def _try_kernels(module: Any, kernels: Mapping[str, Callable[..., Any]], trial: _Trial) -> None:
    own = {f: deltanet.transformers_own(getattr(module, f)) for f in deltanet.MIXING_FUNCTIONS}
    try:
        with _functions(module, own):
            exact = trial.run(module, exactly=True)
            noise = trial.run(module)
    except _DEVICE_ERRORS:
        raise
    except RuntimeError as error:  # then there is nothing to compare with, nor to use instead
        logger.warning("The kernels for gated DeltaNet were not tried: PyTorch's code raises %r.", error)
        return
    logger.info("Trying the kernels for gated DeltaNet (%s); the first time can take minutes.", ", ".join(kernels))
    for name, kernel in kernels.items():
        start = time.monotonic()
        with _functions(module, {**own, name: kernel}):
            trouble = _trouble(module, trial, exact, noise)
        if trouble is None:
            deltanet.set_function(module, name, kernel)
            logger.info("The kernel for %s computes what it should (%.0f s).", name, time.monotonic() - start)
            continue
        deltanet.set_function(module, name, own[name], instead_of=kernel)
        logger.warning(
            "The kernel that transformers chose for %s cannot be used on %s; its PyTorch code computes instead, which "
            "is right but slower (many times for the delta rule). %s",
            name,
            trial.device,
            trouble,
        )


def _trouble(module: Any, trial: _Trial, exact: dict[str, Tensor], noise: dict[str, Tensor]) -> str | None:
    """What is wrong with the kernel that the module has now, in words."""
    try:
        troubles = [_difference(trial.run(module), exact, noise, trial.tolerance) for _ in range(_RUNS)]
    except _DEVICE_ERRORS:
        raise
    except Exception as error:  # whatever a library raises that does not fit the device
        return f"{type(error).__name__}: {str(error).strip()[:400] or 'no message'}"
    return next((trouble for trouble in troubles if trouble is not None), None)


@contextlib.contextmanager
def _functions(module: Any, functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """The module computes by these meanwhile."""
    before = {name: getattr(module, name) for name in functions}
    for name, function in functions.items():
        deltanet.set_function(module, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)


class _Trial:
    """A layer like one of the policy's, with weights of its own, and a row for it."""

    def __init__(self, like: nn.Module, text_config: Any, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.tolerance = _TOLERANCE.get(dtype, _TOLERANCE_ELSE)
        high = torch.float64 if dtype == torch.float64 else torch.float32
        held = next((p.dtype for p in like.parameters() if p.dim() > 1 and p.is_floating_point()), high)
        layer_class: Any = type(like)
        with torch.device(device):
            layer = layer_class(text_config, like.layer_idx).to(high)
        _decay_in_every_way(layer)
        shape = (1, sum(_LENGTHS), text_config.hidden_size)
        hidden = torch.randn(shape, device=device, dtype=high)
        # As the policy holds its weights, and the same values at full precision.
        self._layer, self._hidden = layer.to(held), hidden.to(held).requires_grad_()
        self._exact = copy.deepcopy(self._layer).to(high), self._hidden.detach().to(high).requires_grad_()
        self._autocast = dtype in (torch.bfloat16, torch.float16) and held != dtype
        self._weights = torch.randn(shape, device=device, dtype=high)
        bounds = torch.tensor([sum(_LENGTHS[:i]) for i in range(len(_LENGTHS) + 1)], dtype=torch.int32, device=device)
        self._plan = RowPlan.from_segments(bounds, torch.tensor(_PARENTS, device=device), "sdpa")

    def run(self, module: Any, *, exactly: bool = False) -> dict[str, Tensor]:
        """Output and gradients, each [tokens, ...] in float64; `exactly`: computed at full precision.

        The gradients are those of the layer's input and of what goes into the two functions. (The weights' would hide
        one of several that share a projection, and are sums over all tokens.)
        """
        layer, hidden = self._exact if exactly else (self._layer, self._hidden)
        low = self._autocast and not exactly
        with _inputs_of(module) as inputs, torch.autocast(self.device.type, self.dtype if low else None, enabled=low):
            out = layer(hidden, packed_attention=self._plan)
        leaves = {"its input": hidden, **inputs}
        gradients = torch.autograd.grad((out * self._weights).sum(), tuple(leaves.values()))
        found = {f"the gradient of {name}": g for name, g in zip(leaves, gradients, strict=True)}
        found["the output"] = out.detach()
        by_token = {name: x.transpose(1, 2) if "hidden_states" in name else x for name, x in found.items()}
        return {name: x[0].flatten(1).double() for name, x in by_token.items()}


def _decay_in_every_way(layer: nn.Module) -> None:
    """Every second head forgets within tokens, as at the start of training; the others carry their state far."""
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.endswith("A_log"):  # of the decay's speed
                parameter[::2].uniform_(-5, -2)
                parameter[1::2].uniform_(1, 2.7)
            elif name.endswith("dt_bias"):
                parameter[1::2].fill_(1.0)


@contextlib.contextmanager
def _inputs_of(module: Any) -> Iterator[dict[str, Tensor]]:
    """Collects what goes into the two functions meanwhile, by the parameters' names."""
    found: dict[str, Tensor] = {}

    def recording(function: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            arguments = inspect.signature(function).bind(*args, **kwargs).arguments
            found.update({name: arguments[name] for name in _INPUTS if name in arguments})
            return function(*args, **kwargs)

        return recorded

    before = {name: getattr(module, name) for name in deltanet.MIXING_FUNCTIONS}
    for name, function in before.items():
        setattr(module, name, recording(function))
    try:
        yield found
    finally:
        for name, function in before.items():
            setattr(module, name, function)


def _difference(
    found: dict[str, Tensor], exact: dict[str, Tensor], noise: dict[str, Tensor], tolerance: float
) -> str | None:
    """The segment of a tensor that is farthest from what it should be, in words; None when all are near enough."""
    worst, words = 1.0, None
    for name, value in found.items():
        apart, usual = _apart(value, exact[name]), _apart(noise[name], exact[name])
        for segment, (off, own) in enumerate(zip(apart, usual, strict=True)):
            excess = off / max(tolerance, _TIMES_AS_FAR * own)
            if math.isfinite(own) and excess > worst:
                worst = excess
                words = (
                    f"It computes {name} wrong: a segment of {_LENGTHS[segment]} tokens is off by {off:.2g} of its "
                    f"size (PyTorch's code by {own:.2g})."
                )
    return words


def _apart(value: Tensor, exact: Tensor) -> list[float]:
    """Of every segment, the norm of the difference relative to the norm; infinite when something is not finite."""
    usual = exact.norm() / len(exact) ** 0.5  # of a token
    found = []
    for part, right in zip(value.split(_LENGTHS), exact.split(_LENGTHS), strict=True):
        size = torch.maximum(right.norm(), 0.1 * usual * len(right) ** 0.5).clamp_min(1e-30)
        found.append(((part - right).norm() / size).nan_to_num(torch.inf, torch.inf).item())
    return found
