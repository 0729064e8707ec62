"""Whether a model's own code does what packed rows rely on, found out when it is loaded and not at the first row.

By then a server has been started and waited for. Two questions that no config answers, asked without the weights, so
that they cost the same for every size and give every rank the same answer (also where its weights are still empty):

    attention   Do the layers tell their attention who sees whom? The first of them run over a row of two tokens without
                data (device "meta"), up to whatever in them needs data; gated DeltaNet, which was checked when it was
                installed, is passed by.
    head        Are the logits what `LogitTransform` makes of the head's output? The model's forward runs with its
                decoder replaced by given hidden states and its head by a small one.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from asyncgrpo_core.errors import ConfigError
from asyncgrpo_core.models import deltanet
from asyncgrpo_core.models.attention import plan_is_lost
from asyncgrpo_core.models.forward import causal_model, run_decoder
from asyncgrpo_core.models.head import LogitTransform
from asyncgrpo_core.models.row_plan import Bucket, RowPlan

logger = logging.getLogger(__name__)

_LAYERS = 8  # with attention: the kinds of layers of a model repeat sooner, and each costs tens of milliseconds
_VOCABULARY = 16


@torch.no_grad()
def check_packed_forward(model: nn.Module) -> None:
    """Refuse a model that the packed forward would compute wrongly; after `install_packed_forward`, before a wrapper.

    What cannot be asked (a router wants data, a head lies deeper in the model) is left to the first row and to the
    comparison with the server. Random numbers, gradients, buffers and the compiler are left as they were.

    Raises:
        ConfigError: a layer keeps the row's plan from its attention or asks it for something that packed rows cannot
            give, or the model makes its logits in a way of its own.
    """
    base: Any = causal_model(model)
    with torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False):
        _check_attention(base)
        _check_head(base)


def _check_attention(base: Any) -> None:
    decoder = base.get_decoder()
    ghosts = {
        name: torch.empty_like(tensor, device="meta")
        for name, tensor in (*decoder.named_parameters(), *decoder.named_buffers())
    }
    plan = _ProbedPlan()
    ids, positions = (torch.empty((1, plan.num_tokens), dtype=torch.int64, device="meta") for _ in range(2))

    def call(*args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(decoder, ghosts, args, kwargs)

    try:
        with _without_triton(), _without_recurrence(decoder):
            run_decoder(call, ids, positions, plan)
    except ConfigError:
        raise
    except _EnoughError:
        return
    except Exception as error:  # whatever an operation raises that needs data, or mixes tensors with and without
        logger.debug("%s was not probed to its end: %r", type(base).__name__, error)
        return
    if not plan.used:
        raise plan_is_lost(type(base).__name__)


@contextlib.contextmanager
def _without_triton() -> Iterator[None]:
    """No Triton kernel starts: given a tensor without data one reads from address 0, and the process loses its GPU.

    For all threads of the process: nothing else computes on a GPU while a policy is loaded.
    """
    try:
        from triton.runtime.jit import JITFunction
    except ImportError:  # then there is none
        yield
        return
    launch = JITFunction.run

    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise _EnoughError("a Triton kernel needs data")

    JITFunction.run = refuse
    try:
        yield
    finally:
        JITFunction.run = launch


@contextlib.contextmanager
def _without_recurrence(decoder: nn.Module) -> Iterator[None]:
    """Gated DeltaNet layers give back what they get; their kernels, of several libraries, want data."""
    names = deltanet.LAYER_CLASSES.values()
    layers = [m for m in decoder.modules() if type(m).__name__ in names and "forward" not in vars(m)]
    for layer in layers:
        layer.forward = functools.partial(_unchanged, type(layer).__name__)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _unchanged(
    name: str, hidden_states: Tensor, *_args: Any, packed_attention: RowPlan | None = None, **_kwargs: Any
) -> Tensor:
    """In the place of a gated DeltaNet layer's forward. Raises ConfigError when the row's plan does not come to it."""
    if packed_attention is None:
        raise plan_is_lost(f"The decoder layer around {name}")
    packed_attention.once("probed", lambda: True)  # enough in a model without attention
    return hidden_states


def _check_head(base: Any) -> None:
    head = base.get_output_embeddings()
    names = [name for name, module in base._modules.items() if module is head]
    prefix = base.base_model_prefix
    if not names or prefix not in base._modules:
        logger.debug("The head of %s was not probed: it lies deeper in the model.", type(base).__name__)
        return
    generator = torch.Generator().manual_seed(0)
    known: Any = {"generator": generator, "device": "cpu", "dtype": torch.float32}
    hidden = torch.randn((1, 3, head.in_features), **known)
    small = nn.Linear(head.in_features, _VOCABULARY, bias=False, device="meta")
    # Logits of up to about 30, where a soft cap of a usual size bends them.
    weight = torch.randn((_VOCABULARY, head.in_features), **known) * (10 / head.in_features**0.5)
    small.weight = nn.Parameter(weight, requires_grad=False)
    stand_in = copy.copy(base)
    stand_in.__dict__["_modules"] = {**base._modules, prefix: _GivenHidden(hidden), names[0]: small}
    try:
        # The class's forward: the instance's own is the packed one.
        own = type(base).forward(stand_in, input_ids=torch.zeros((1, 3), dtype=torch.int64)).logits
    except Exception as error:  # it wants more of its decoder than hidden states
        logger.debug("The head of %s was not probed: %r", type(base).__name__, error)
        return
    ours = LogitTransform.from_config(base.config.get_text_config(), 1.0)(small(hidden))
    if not torch.allclose(own.float().log_softmax(-1), ours.log_softmax(-1), rtol=1e-3, atol=1e-3):
        raise ConfigError(
            f"{type(base).__name__} makes its logits in a way of its own (another scale, cap or layer after the head), "
            "which the trainer's head does not know, so its log-probabilities would be wrong.",
            "Train a model of another architecture.",
        )


class _EnoughError(Exception):
    """Ends the decoder's forward."""


class _ProbedPlan(RowPlan):
    """One root of two tokens, which the first layers are given and the next one is not."""

    def __init__(self) -> None:
        super().__init__(torch.empty(2, dtype=torch.int32, device="meta"), [-1], [2], [0])
        self._asked = 0

    def buckets(self) -> tuple[list[Bucket], Tensor]:
        self._asked += 1
        if self._asked > _LAYERS:
            raise _EnoughError
        return super().buckets()


class _GivenHidden(nn.Module):
    """In a decoder's place: the same hidden states whatever it is asked."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, *_args: Any, **_kwargs: Any) -> _Output:
        return _Output(self.hidden)


class _Output:
    """A decoder's output: hidden states by name and by index, None for whatever else an architecture may ask of it."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None
