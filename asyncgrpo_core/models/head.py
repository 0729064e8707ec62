"""The chunked language-model head: log-probabilities at trained positions, never a [tokens, vocabulary] matrix.

For hidden states h [N, D] of trained positions and the head's weight W [V, D]:

    z = cap(scale * (h W^T + b)) / temperature        logits as the sampler sees them
    logprobs     = z[y] - logsumexp(z)                 of the sampled token y
    entropy      = logsumexp(z) - sum_v p_v z_v        of the full-vocabulary distribution, no gradient
    top_logprobs = z[top_ids] - logsumexp(z)           of the sampler's top tokens

Chunks of positions are visited one after another; the backward pass computes a chunk's logits again from h and the
saved logsumexp, so the memory is one chunk's logits in either direction. The gradient is closed form:
d logp_v / d z = onehot(v) - p.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Elements of one chunk's logits. A CPU chunk should stay near its caches, a GPU chunk should fill the device.
_CHUNK_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 26}


@dataclass(frozen=True)
class LogitTransform:
    """What a model does to its head's output before the softmax: scale, then soft cap, then temperature."""

    temperature: float = 1.0
    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def from_config(cls, config: Any, temperature: float) -> LogitTransform:
        """Read the names that transformers' causal models use.

        `logits_scaling` divides (Granite), `logit_scale` (Cohere) and `lm_head_multiplier` (Falcon-H1) multiply,
        `final_logit_softcapping` caps (Gemma 2 and later).

        Raises:
            ValueError: temperature <= 0 (greedy sampling has no distribution to train on).
        """
        if not temperature > 0:
            raise ValueError(f"temperature must be above 0 to train on sampled tokens, got {temperature}")
        scale = 1.0
        for name, divides in (("logits_scaling", True), ("logit_scale", False), ("lm_head_multiplier", False)):
            value = getattr(config, name, None)
            if value is not None:
                scale = scale / value if divides else scale * value
        return cls(temperature, scale, getattr(config, "final_logit_softcapping", None) or None)

    def apply_(self, logits: Tensor) -> Tensor:
        """In place, on logits in the accumulation dtype."""
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        if self.temperature != 1.0:
            logits.div_(self.temperature)
        return logits

    def backward_(self, grad: Tensor, transformed: Tensor | None) -> Tensor:
        """Turn d/d(transformed logits) into d/d(raw logits), in place. `transformed` is read only with a cap."""
        if self.softcap is not None and transformed is not None:
            ratio = transformed * (self.temperature / self.softcap)  # tanh of the capped logit
            grad.mul_(1.0 - ratio.square_())
        if self.temperature != 1.0 or self.scale != 1.0:
            grad.mul_(self.scale / self.temperature)
        return grad


@dataclass(frozen=True)
class _Call:
    transform: LogitTransform
    compute_dtype: torch.dtype  # of the matrix products, as in the model's own head
    chunk_rows: int


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, target_ids, top_ids, call):
        n = hidden.shape[0]
        acc = _accumulation_dtype(call.compute_dtype)
        logprobs, entropy, log_z = (torch.empty(n, dtype=acc, device=hidden.device) for _ in range(3))
        top = torch.empty(top_ids.shape, dtype=acc, device=hidden.device)
        cast = _cast_head(weight, bias, call.compute_dtype)
        safe_top = top_ids.clamp_min(0)
        for rows in _chunks(n, call.chunk_rows):
            z = _logits(hidden[rows], *cast, call, acc)
            lse = torch.logsumexp(z, dim=-1)
            log_z[rows] = lse
            logprobs[rows] = z.gather(1, target_ids[rows, None])[:, 0] - lse
            top[rows] = z.gather(1, safe_top[rows]) - lse[:, None]
            # sum_v p_v z_v with z first shifted, so that the large part cancels exactly
            z.sub_(lse[:, None])
            entropy[rows] = torch.linalg.vecdot(z.exp(), z).neg_()
        top.masked_fill_(top_ids < 0, -torch.inf)
        ctx.save_for_backward(hidden, weight, bias, target_ids, top_ids, log_z)
        ctx.call = call
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy, top

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs, _grad_entropy, grad_top):
        hidden, weight, bias, target_ids, top_ids, log_z = ctx.saved_tensors
        call, acc = ctx.call, log_z.dtype
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=acc, device=weight.device) if need_weight else None
        grad_bias = torch.zeros(bias.shape, dtype=acc, device=bias.device) if need_bias else None
        cast = _cast_head(weight, bias, call.compute_dtype)
        grad_top = torch.where(top_ids < 0, 0.0, grad_top)
        safe_top = top_ids.clamp_min(0)
        total = grad_logprobs + grad_top.sum(dim=1)
        for rows in _chunks(hidden.shape[0], call.chunk_rows):
            z = _logits(hidden[rows], *cast, call, acc)
            kept = z.clone() if call.transform.softcap is not None else None
            grad = z.sub_(log_z[rows, None]).exp_().mul_(total[rows, None].neg())
            grad.scatter_add_(1, target_ids[rows, None], grad_logprobs[rows, None])
            grad.scatter_add_(1, safe_top[rows], grad_top[rows])
            grad = call.transform.backward_(grad, kept)
            low = grad.to(call.compute_dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = (low @ cast[0]).to(hidden.dtype)
            if grad_weight is not None:
                _add_product(grad_weight, low, hidden[rows].to(call.compute_dtype))
            if grad_bias is not None:
                grad_bias += grad.sum(dim=0)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
        )


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _add_product(total: Tensor, low: Tensor, hidden: Tensor) -> None:
    """total += low^T hidden, in place without a temporary when the dtypes agree."""
    if total.dtype == low.dtype:
        total.addmm_(low.T, hidden)
    else:
        total += low.T @ hidden


def _cast_head(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    return weight.to(dtype), None if bias is None else bias.to(dtype)


def _chunks(n: int, rows: int) -> list[slice]:
    return [slice(start, min(start + rows, n)) for start in range(0, n, rows)]


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, call: _Call, acc: torch.dtype) -> Tensor:
    raw = torch.nn.functional.linear(hidden.to(weight.dtype), weight, bias).to(acc)
    return call.transform.apply_(raw)


def _compute_dtype(weight: Tensor) -> torch.dtype:
    """The dtype that the model's own head would multiply in: autocast's when it is on, else the weight's."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def chunked_log_probs(
    hidden: Tensor,
    weight: Tensor,
    target_ids: Tensor,
    top_ids: Tensor,
    transform: LogitTransform,
    *,
    bias: Tensor | None = None,
    chunk_elements: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities and entropy at N trained positions (module docstring).

    Args:
        hidden: [N, D], any float dtype.
        weight: [V, D]; bias: [V] or None.
        target_ids: int64 [N].
        top_ids: int64 [N, k]; -1 entries are ignored (their result is -inf and takes no gradient). k may be 0.
        transform: from `LogitTransform.from_config`.
        chunk_elements: bound on the elements of the logits that exist at a time; None picks by device.

    Returns:
        logprobs [N], entropy [N] (no gradient), top_logprobs [N, k], in float32 (float64 for float64 weights).
    """
    elements = chunk_elements or _CHUNK_ELEMENTS.get(weight.device.type, 1 << 24)
    call = _Call(transform, _compute_dtype(weight), max(1, elements // weight.shape[0]))
    with torch.autocast(weight.device.type, enabled=False):
        return _ChunkedHead.apply(hidden, weight, bias, target_ids, top_ids, call)
