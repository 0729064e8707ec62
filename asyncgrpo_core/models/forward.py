"""`model(**row, temperature=...)` -> per-trained-token log-probabilities, inside the model's own forward.

Everything happens inside `forward`, so that wrappers which hook it (DDP, FSDP, autocast, PEFT) see one ordinary call.
The parameters, their names, `state_dict` and `save_pretrained` stay as they were, and a call without the row's
`target_positions` is the model's original forward.
"""

from __future__ import annotations

import inspect
import logging
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from asyncgrpo_core.errors import ConfigError
from asyncgrpo_core.models import deltanet
from asyncgrpo_core.models.attention import PACKED_ATTENTION, choose_backend, compute_dtype, plan_is_lost
from asyncgrpo_core.models.attention_backends import flex
from asyncgrpo_core.models.head import LogitTransform, chunked_log_probs
from asyncgrpo_core.models.moe import router_balance, router_loss
from asyncgrpo_core.models.row_plan import RowPlan
from asyncgrpo_core.models.support import (
    current_device_traits,
    dense_attention_layers,
    head_dims,
    longest_sample,
)

logger = logging.getLogger(__name__)


class PolicyOutput(NamedTuple):
    """The trainer's view of N trained tokens, float32 (float64 for a float64 model)."""

    logprobs: Tensor  # [N], of the sampled token at the sampling temperature, over its candidate set where it has one
    entropy: Tensor  # [N], of the distribution over the full vocabulary; no gradient
    top_logprobs: Tensor | None  # [N, k], of the row's top_ids, -inf at padding; None when k = 0
    aux_loss: Tensor | None = None  # scalar with gradient, unscaled: the row's load-balancing loss (moe.py)


def causal_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model under DDP, compile and PEFT wrappers."""
    inner: Any = model
    while True:
        if hasattr(inner, "get_base_model"):  # PEFT
            inner = inner.get_base_model()
        elif isinstance(getattr(inner, "module", None), nn.Module):  # DDP
            inner = inner.module
        elif hasattr(inner, "_orig_mod"):  # torch.compile
            inner = inner._orig_mod
        else:
            return inner


def install_packed_forward(model: nn.Module, attention_backend: str = "auto") -> nn.Module:
    """Make `model(**row, temperature=t)` return a `PolicyOutput` (module docstring). Idempotent.

    Args:
        model: a transformers causal language model, or a PEFT model around one. Call it before DDP or FSDP wrap it.
        attention_backend: "auto" or a name of `attention.BACKENDS`; resolved and logged at the first packed forward,
            when device and dtype are known.

    Returns:
        The same object.

    Raises:
        ConfigError: a model without a decoder and a linear head, with an adapter on its head, or whose attention
            cannot be switched to packed rows.

    A row raises ConfigError when a sample in it is longer than `support.longest_sample`.
    """
    base = causal_model(model)
    _output_head(base)
    deltanet.install(_decoder(base), base.config.get_text_config())
    base.set_attn_implementation(PACKED_ATTENTION)
    if base.config.get_text_config()._attn_implementation != PACKED_ATTENTION:
        raise ConfigError(
            f"{type(base).__name__} does not let its attention be switched, so it cannot be trained on packed rows.",
            "Use a model whose code follows transformers' AttentionInterface.",
        )
    limit = base.__dict__["_longest_sample"] = longest_sample(base.config.get_text_config())
    if limit is not None:
        logger.warning(
            "The rotary frequencies of %s change with samples of more than %d tokens, so rows that hold one "
            "are refused: start the server with --max-model-len %d or less.",
            type(base).__name__,
            limit,
            limit,
        )
    base.__dict__["_attention_backend"] = attention_backend
    base.__dict__["_attention_choices"] = {}
    if "_unpacked_forward" not in base.__dict__:
        base.__dict__["_unpacked_forward"] = base.forward
        base.forward = types.MethodType(_dispatch(type(base).forward), base)
    return model


def _dispatch(original: Any) -> Any:
    def forward(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("target_positions") is None:
            return self.__dict__["_unpacked_forward"](*args, **kwargs)
        return _packed_forward(self, **kwargs)

    # The signature that Trainer and PEFT look at. Not functools.wraps: accelerate unwraps a forward along
    # `__wrapped__` and would put the class's own forward back.
    forward.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    return forward


def _packed_forward(
    model: PreTrainedModel,
    *,
    input_ids: Tensor,
    position_ids: Tensor,
    cu_segments: Tensor,
    target_positions: Tensor,
    target_ids: Tensor,
    temperature: float,
    parents: Tensor | None = None,
    top_ids: Tensor | None = None,
    candidate_ids: Tensor | None = None,
    candidate_offsets: Tensor | None = None,
    **_rest: Any,  # what only the loss reads, and the defaults that PEFT's forward adds
) -> PolicyOutput:
    plan = RowPlan.from_segments(cu_segments, parents, _backend(model, input_ids.device))
    _check_lengths(model, plan)
    fillable = dense_attention_layers(model.config.get_text_config()) and router_balance(model) is None
    if plan.backend == "flex" and fillable:
        input_ids, position_ids = _filled(input_ids, position_ids)
    with router_loss(model) as aux_loss_of_row:
        hidden = run_decoder(_decoder(model), input_ids, position_ids, plan)
        aux_loss = aux_loss_of_row()
    if not plan.used:
        raise plan_is_lost(type(model).__name__)
    head = _output_head(model)
    if top_ids is None:
        top_ids = target_ids.new_empty((len(target_ids), 0))
    logprobs, entropy, top = chunked_log_probs(
        hidden[0].index_select(0, target_positions),
        head.weight,
        target_ids,
        top_ids,
        LogitTransform.from_config(model.config.get_text_config(), temperature),
        bias=head.bias,
        candidates=None if candidate_ids is None or candidate_offsets is None else (candidate_ids, candidate_offsets),
    )
    return PolicyOutput(logprobs, entropy, top if top_ids.shape[1] else None, aux_loss)


def _check_lengths(model: PreTrainedModel, plan: RowPlan) -> None:
    limit = model.__dict__["_longest_sample"]
    if limit is not None and plan.max_path > limit:
        raise ConfigError(
            f"A sample has {plan.max_path} tokens; above {limit} the rotary frequencies of {type(model).__name__} "
            "change, for all samples of a row.",
            f"Start the server with --max-model-len {limit} or less (it then has the trainer's frequencies, too).",
        )


def run_decoder(decoder: Callable[..., Any], input_ids: Tensor, position_ids: Tensor, plan: RowPlan) -> Tensor:
    """The hidden states [1, T, D] of one row, every layer told by `plan` who sees whom."""
    hidden: Tensor = decoder(
        input_ids=input_ids,
        position_ids=position_ids,
        # A four-dimensional mask is "already prepared" to transformers: without it, it would find the packed
        # sequences again and build a [T, T] mask that the packed attention does not read.
        attention_mask=torch.ones((1, 1, 1, 1), dtype=torch.bool, device=input_ids.device),
        use_cache=False,
        packed_attention=plan,
    ).last_hidden_state
    return hidden


def _filled(input_ids: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The row with filler tokens up to the length that FlexAttention computes at; nobody reads them."""
    missing = flex.padded_length(input_ids.shape[1]) - input_ids.shape[1]
    return nn.functional.pad(input_ids, (0, missing)), nn.functional.pad(position_ids, (0, missing))


def _backend(model: PreTrainedModel, device: torch.device) -> str:
    return attention_backend(model, device, compute_dtype(next(model.parameters()).dtype, device))


def attention_backend(model: nn.Module, device: torch.device, dtype: torch.dtype) -> str:
    """The attention back end of a model's packed forward on this device, computing in `dtype`; decided and logged once.

    Raises:
        ConfigError: the one that `install_packed_forward` was asked for does not fit them.
    """
    model = causal_model(model)
    choices: dict[Any, str] = model.__dict__["_attention_choices"]
    if (device.type, dtype) not in choices:
        text = model.config.get_text_config()
        choice = choose_backend(
            model.__dict__["_attention_backend"],
            device=device,
            dtype=dtype,
            softcap=getattr(text, "attn_logit_softcapping", None),
            traits=current_device_traits() if device.type == "cuda" else None,
            head_dims=head_dims(text),
        )
        logger.info("Attention of packed rows: %s (%s).", choice.backend, choice.reason)
        choices[device.type, dtype] = choice.backend
    return choices[device.type, dtype]


def _decoder(model: PreTrainedModel) -> nn.Module:
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    if decoder is None or decoder is model or decoder is model.get_output_embeddings():
        raise ConfigError(
            f"{type(model).__name__} has no decoder under a language-model head.",
            "Use a causal language model (AutoModelForCausalLM).",
        )
    return decoder


def _output_head(model: PreTrainedModel) -> nn.Linear:
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear and type(head).__bases__ != (FSDPModule, nn.Linear):  # FSDP2 derives from it
        raise ConfigError(
            f"The head of {type(model).__name__} is {type(head).__name__}, not a plain linear layer.",
            "An adapter on lm_head is not supported: leave it out of target_modules and modules_to_save.",
        )
    return head


@torch.no_grad()
def score_tokens(model: nn.Module, token_ids: list[int], temperature: float = 1.0) -> list[float]:
    """Log-probability of token i given the ones before it, for i = 1 .. n - 1, by the packed forward.

    Used as the trainer's side of the weight-sync canary. Runs in eval mode and restores the mode.

    Raises:
        ValueError: fewer than two tokens.
    """
    if len(token_ids) < 2:
        raise ValueError("score_tokens needs at least two tokens")
    device = next(model.parameters()).device
    ids = torch.tensor(token_ids, device=device)
    n = len(token_ids)
    was_training = model.training
    model.eval()
    try:
        out: PolicyOutput = model(
            input_ids=ids[None],
            position_ids=torch.arange(n, device=device)[None],
            cu_segments=torch.tensor([0, n], dtype=torch.int32, device=device),
            target_positions=torch.arange(n - 1, device=device),
            target_ids=ids[1:],
            temperature=temperature,
        )
    finally:
        model.train(was_training)
    return out.logprobs.tolist()
