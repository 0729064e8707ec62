"""The load-balancing loss of Mixture-of-Experts models on packed rows.

Every router's logits are reduced where they are made, by a hook inside the layer, to two numbers per expert: how often
it was chosen and the sum of its probability. The loss (Switch Transformers, arXiv 2101.03961, equations 4 to 6, as in
transformers' `load_balancing_loss_func`) needs no more:

    aux = E * sum_e (count_e / R) (probability_e / R)       R = tokens x router layers, E experts

so no [tokens, experts] tensor outlives its layer: under gradient checkpointing it is made again in the backward.

The tokens are those that the row forwards, prompt and completion, each once: a token that several samples of a prefix
trie share counts once, as it does in the reference. Where the logits lie in a layer's output is what transformers
itself records as `router_logits`, so the loss is the one that the installed version computes (transformers 5.2 records
probabilities there and takes a second softmax of them, 5.17 and later the logits).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from asyncgrpo_core.errors import ConfigError

_ATTRIBUTE = "_router_balance"


@dataclass
class RouterBalance:
    """Collects the routers' sums of one forward. Made by `install_router_loss`.

    Attributes:
        coefficient: what the trainer multiplies the loss with; at 0 nothing is computed.
        top_k: experts per token.
        num_routers: modules that are expected to call `add` in a forward.
    """

    coefficient: float
    top_k: int
    num_routers: int = 0
    _collected: list[tuple[Tensor, Tensor, int]] | None = field(default=None, repr=False)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """What the routers do inside goes into the next `loss`; a recomputation in the backward goes nowhere."""
        self._collected = []
        try:
            yield
        finally:
            self._collected = None

    def add(self, logits: Tensor) -> None:
        """One router's logits [tokens, E]. Does the same work when nothing is collected.

        A layer that is recomputed in the backward has to save the same tensors as in the forward.
        """
        if self.coefficient and torch.is_grad_enabled():
            sums = (*routing_sums(logits, self.top_k), logits.shape[0])
            if self._collected is not None:
                self._collected.append(sums)

    def loss(self) -> Tensor:
        """Of the forward that is being collected: a scalar, float32 (float64 for a float64 model).

        Raises:
            ConfigError: a router was missed, which is what re-entrant gradient checkpointing does.
        """
        found = self._collected or []
        if len(found) != self.num_routers:
            raise ConfigError(
                f"The load-balancing loss saw {len(found)} of {self.num_routers} routers: re-entrant gradient "
                "checkpointing hides them from it.",
                'Set gradient_checkpointing_kwargs={"use_reentrant": false}, or router_aux_loss_coef=0.0.',
            )
        device = found[0][0].device
        counts = torch.stack([count.to(device) for count, _, _ in found]).sum(dim=0)
        probabilities = torch.stack([total.to(device) for _, total, _ in found]).sum(dim=0)
        rows = sum(n for _, _, n in found)
        return len(counts) * ((counts / rows) * (probabilities / rows)).sum()


def routing_sums(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """(how often each expert was among a token's top k, without gradient; sum of its probability), both [E].

    Float32, or float64 for float64 logits.
    """
    weights = logits.softmax(dim=-1)
    chosen = weights.topk(top_k, dim=-1).indices.flatten()
    wide = torch.promote_types(weights.dtype, torch.float32)
    ones = torch.ones(1, dtype=wide, device=weights.device).expand(len(chosen))
    counts = torch.zeros(weights.shape[-1], dtype=wide, device=weights.device).index_add_(0, chosen, ones)
    return counts, weights.to(wide).sum(dim=0)


def router_coefficient(config: Any, requested: float | None) -> float:
    """The weight of the load-balancing loss: `requested`, or the model config's own value when it is None.

    Args:
        config: transformers config of the whole model; 0.0 for one without experts.
        requested: `router_aux_loss_coef`; 0.0 turns the loss off.

    Raises:
        ConfigError: a nonzero value for a model without experts.
    """
    text = config.get_text_config(decoder=True)
    if not hasattr(text, "output_router_logits"):
        if requested:
            raise ConfigError(
                f"router_aux_loss_coef={requested} was given, but {type(text).__name__} is not a Mixture-of-Experts "
                "model.",
                "Leave router_aux_loss_coef unset.",
            )
        return 0.0
    return float((getattr(text, "router_aux_loss_coef", None) or 0.0) if requested is None else requested)


def install_router_loss(model: PreTrainedModel, requested: float | None) -> float:
    """Make packed forwards of `model` compute the load-balancing loss when its weight is not 0. Idempotent.

    Args:
        model: the transformers model itself, without wrappers.
        requested: `router_aux_loss_coef` (see `router_coefficient`).

    Returns:
        The weight.

    Raises:
        ConfigError: a nonzero value for a model without experts, or for one that does not say where its router logits
            are or whose transformers code computes another loss.
    """
    coefficient = router_coefficient(model.config, requested)
    balance = model.__dict__.get(_ATTRIBUTE)
    if balance is not None:
        balance.coefficient = coefficient
        return coefficient
    if coefficient:
        top_k = _experts_per_token(model)
        _check_loss(model, top_k)
        balance = RouterBalance(coefficient, top_k)
        for module, index in _routers(model):
            module.register_forward_hook(_Hook(balance, index))
            balance.num_routers += 1
        if not balance.num_routers:
            raise _refusal(model, "has no layer with a router")
        model.__dict__[_ATTRIBUTE] = balance
    return coefficient


def router_balance(model: nn.Module) -> RouterBalance | None:
    """What `install_router_loss` put on a model; None when it computes no load-balancing loss."""
    balance: RouterBalance | None = model.__dict__.get(_ATTRIBUTE)
    return balance if balance is not None and balance.coefficient else None


@contextmanager
def router_loss(model: nn.Module) -> Iterator[Callable[[], Tensor | None]]:
    """Around one forward: yields a function that gives its load-balancing loss (None without one, or in inference)."""
    balance = router_balance(model)
    if balance is None or not torch.is_grad_enabled():
        yield lambda: None
        return
    with balance.collecting():
        yield balance.loss


@dataclass(frozen=True)
class _Hook:
    balance: RouterBalance
    index: int

    # Dynamo cannot keep a list that outlives a compiled block.
    @torch.compiler.disable
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.balance.add(output[self.index] if isinstance(output, tuple) else output)


def _routers(model: PreTrainedModel) -> Iterator[tuple[nn.Module, int]]:
    """The modules whose output transformers records as router logits, and where in the output they are."""
    decoder = model.get_decoder()
    recorders = (getattr(type(decoder), "_can_record_outputs", None) or {}).get("router_logits") or []
    for recorder in recorders if isinstance(recorders, list) else [recorders]:
        is_class = isinstance(recorder, type)
        target = recorder if is_class else getattr(recorder, "target_class", None)
        index = 1 if is_class else getattr(recorder, "index", 0)
        within = getattr(recorder, "layer_name", None)
        for name, module in decoder.named_modules():
            if "original_module" in name.split("."):  # an adapter trains a copy of the router, and that one is called
                continue
            inside = within is None or f".{within.strip('.')}." in f".{name}."
            if target is not None and isinstance(module, target) and inside:
                yield module, index


def _experts_per_token(model: PreTrainedModel) -> int:
    for holder in (model, model.config.get_text_config(decoder=True)):
        value = getattr(holder, "num_experts_per_tok", None)
        if isinstance(value, int):
            return value
    raise _refusal(model, "does not say how many experts a token gets (num_experts_per_tok)")


@torch.no_grad()
def _check_loss(model: PreTrainedModel, top_k: int) -> None:
    """Compare with the model's own function on random logits: not every architecture has the same."""
    modules = [sys.modules.get(kind.__module__) for kind in type(model).__mro__]
    theirs = next((f for m in modules if (f := getattr(m, "load_balancing_loss_func", None)) is not None), None)
    if theirs is None:
        raise _refusal(model, "has no load-balancing loss in transformers")
    num_experts = 2 * top_k + 3
    generator = torch.Generator().manual_seed(0)
    logits = tuple(torch.randn(11, num_experts, generator=generator) for _ in range(2))
    balance = RouterBalance(1.0, top_k, num_routers=len(logits))
    with balance.collecting(), torch.enable_grad():
        for layer in logits:
            balance.add(layer)
        ours = balance.loss()
    try:
        same = torch.allclose(torch.as_tensor(theirs(logits, num_experts, top_k)), ours, rtol=1e-4)
    except (TypeError, ValueError, RuntimeError, IndexError):
        same = False
    if not same:
        raise _refusal(model, "has a load-balancing loss of its own, which packed rows do not compute")


def _refusal(model: PreTrainedModel, why: str) -> ConfigError:
    return ConfigError(
        f"router_aux_loss_coef, set for the run or by the model's config, asks for the load-balancing loss, but "
        f"{type(model).__name__} {why}.",
        "Set router_aux_loss_coef=0.0 to train without it.",
    )
