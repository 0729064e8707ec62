"""Whether the kernels which transformers chose for gated DeltaNet work on this device, found out at load.

The libraries (`fla`, `causal_conv1d`, the kernel hub) are chosen by transformers when they can be imported. Whether
they compute is another question: `fla` needs a GPU, refuses the backward pass on Hopper GPUs with Triton 3.4 to 3.7.0,
where older ones computed wrong gradients, and what else a new GPU or compiler breaks is seen in the numbers alone. So
one layer of the policy, with random weights, goes forward and backward over a small trie, and its outputs and
gradients are held against transformers' PyTorch code in float32. A kernel that fails there is not used.

The first use of a Triton kernel tries its settings, which takes minutes for `fla`; for the same heads they are not
tried again in this process, so the time is spent here instead of in the first step.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from asyncgrpo_core.models import deltanet
from asyncgrpo_core.models.forward import causal_model
from asyncgrpo_core.models.row_plan import RowPlan

logger = logging.getLogger(__name__)

# A trie with states to hand on, several chunks of 64 tokens, and segments of one token: lengths and parents.
_LENGTHS = (130, 70, 65, 20, 1)
_PARENTS = (-1, 0, 1, 1, 0)
# A kernel may be this far from float32, relative to a tensor's norm, or this many times as far as PyTorch's code is at
# the same precision. Wrong gradients are off by their own size.
_TOLERANCE = 0.05
_TIMES_AS_FAR = 4.0


def keep_working_kernels(model: nn.Module, *, device: torch.device, dtype: torch.dtype) -> None:
    """Put transformers' PyTorch code in the place of each kernel that fails on `device`, with a warning that says why.

    Does nothing for a model without gated DeltaNet layers, or without kernels. Random numbers and gradients stay as
    they were.

    Args:
        model: after `install_packed_forward`, before a wrapper.
        device: where it will train.
        dtype: what its layers compute in (`trainer_parts.training_dtype`).
    """
    base: Any = causal_model(model)
    layers = {type(m).__module__: m for m in base.modules() if type(m).__name__ in deltanet.LAYER_CLASSES.values()}
    for name, layer in layers.items():
        module = sys.modules[name]
        kernels = [f for f in deltanet.MIXING_FUNCTIONS if deltanet.uses_kernel(getattr(module, f))]
        if kernels:
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                torch.manual_seed(0)
                _try_kernels(module, kernels, _Trial(layer, base.config.get_text_config(), device, dtype))


def _try_kernels(module: Any, kernels: list[str], trial: _Trial) -> None:
    own = {f: deltanet.transformers_own(getattr(module, f)) for f in deltanet.MIXING_FUNCTIONS}
    with _functions(module, own):
        exact = trial.run(exactly=True)
        noise = {name: _distance(value, exact[name]) for name, value in trial.run().items()}
    logger.info("Trying the kernels for gated DeltaNet (%s); the first time can take minutes.", ", ".join(kernels))
    for name in kernels:
        kernel, start = getattr(module, name).unplanned, time.monotonic()
        try:
            with _functions(module, {**own, name: kernel}):
                found = trial.run()
            trouble = _difference(found, exact, noise)
        except Exception as error:  # whatever a library raises that does not fit the device
            trouble = f"{type(error).__name__}: {str(error).strip()[:400] or 'no message'}"
        if trouble is None:
            logger.info("The kernel for %s computes what it should (%.0f s).", name, time.monotonic() - start)
            continue
        deltanet.set_function(module, name, own[name])
        logger.warning(
            "The kernel that transformers chose for %s cannot be used on %s, so its PyTorch code is: right, but many "
            "times slower. %s",
            name,
            trial.device,
            trouble,
        )


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
        layer_class: Any = type(like)
        with torch.device(device):
            self.layer = layer_class(text_config, like.layer_idx).float()
        with torch.no_grad():
            for name, parameter in self.layer.named_parameters():
                if name.endswith("A_log"):  # what a layer starts with forgets its state within a token or two
                    parameter.uniform_(-5, -2)
        bounds = torch.tensor((0, *_LENGTHS)).cumsum(0, dtype=torch.int32)
        shape = (1, int(bounds[-1]), text_config.hidden_size)
        self.hidden = torch.randn(shape, device=device).requires_grad_()
        self.weights = torch.randn(shape, device=device)
        self.plan = RowPlan.from_segments(bounds.to(device), torch.tensor(_PARENTS, device=device), "sdpa")

    def run(self, *, exactly: bool = False) -> dict[str, Tensor]:
        """Output and gradients, float32; `exactly`: computed in float32 as well.

        Without those of the decay's offsets: sums over all tokens of a head, mostly rounding in 16 bits. What is wrong
        with them is also wrong with the projection of the decay.
        """
        low = self.dtype in (torch.bfloat16, torch.float16) and not exactly
        with torch.enable_grad(), torch.autocast(self.device.type, self.dtype if low else None, enabled=low):
            out = self.layer(self.hidden, packed_attention=self.plan)
        leaves = {"its input": self.hidden}
        leaves |= {name: parameter for name, parameter in self.layer.named_parameters() if parameter.dim() > 1}
        gradients = torch.autograd.grad((out.float() * self.weights).sum(), tuple(leaves.values()))
        named = {f"the gradient of {name}": g for name, g in zip(leaves, gradients, strict=True)}
        return {"the output": out.detach().float(), **named}


def _difference(found: dict[str, Tensor], exact: dict[str, Tensor], noise: dict[str, float]) -> str | None:
    """The tensor that is farthest from what it should be, in words; None when all are near enough."""
    excess = {
        name: _distance(value, exact[name]) / max(_TOLERANCE, _TIMES_AS_FAR * noise[name])
        for name, value in found.items()
    }
    worst = max(excess, key=lambda name: excess[name])
    if excess[worst] <= 1:
        return None
    off = _distance(found[worst], exact[worst])
    return f"It computes {worst} wrong: {off:.2g} of its norm away from float32 (PyTorch's code: {noise[worst]:.2g})."


def _distance(value: Tensor, exact: Tensor) -> float:
    """Norm of the difference relative to the norm; infinite when something is not finite."""
    off = (value.double() - exact.double()).norm() / exact.double().norm().clamp_min(1e-30)
    return off.nan_to_num(torch.inf, torch.inf).item()
