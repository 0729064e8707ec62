"""One chunk of the language-model head: its logits, their statistics, and what the gradient needs of them.

Two implementations of the same arithmetic. `EagerChunks` makes a float32 copy of the logits (a CPU's chunk stays in its
caches). `FusedChunks`, on a GPU, compiles two functions that read the 16-bit logits and keep float32 in registers:
eager operations would read and write about 50 bytes per logit, more time than the matrix products; these move 6 in the
forward pass and 4 in the backward pass, which writes over the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from asyncgrpo_core.models.compiler import allow_recompiles, compiler_works

# dtypes x transforms x dynamo's own special cases (one row, equal sizes): beyond the limit a compiled head raises.
_RECOMPILE_LIMIT = 64


@dataclass(frozen=True)
class LogitTransform:
    """What a model does to its head's output before the softmax: scale, then soft cap, then temperature."""

    temperature: float = 1.0
    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def from_config(cls, config: Any, temperature: float) -> LogitTransform:
        """Read the names that transformers' causal models use.

        `logits_scaling` divides (Granite) or multiplies (HyperCLOVA X), `logit_scale` (Cohere) and `lm_head_multiplier`
        (Falcon-H1) multiply, `final_logit_softcapping` caps (Gemma 2 and later). What a model does beside these is
        found out when it is loaded (probe.py).

        Raises:
            ValueError: temperature <= 0 (greedy sampling has no distribution to train on).
        """
        if not temperature > 0:
            raise ValueError(f"temperature must be above 0 to train on sampled tokens, got {temperature}")
        scale = 1.0
        granite = getattr(config, "model_type", None) != "hyperclovax"
        for name, divides in (("logits_scaling", granite), ("logit_scale", False), ("lm_head_multiplier", False)):
            value = getattr(config, name, None)
            if value is not None:
                scale = scale / value if divides else scale * value
        return cls(temperature, scale, getattr(config, "final_logit_softcapping", None) or None)

    def __call__(self, raw: Tensor) -> Tensor:
        """Transformed logits; a new tensor unless there is nothing to do."""
        logits = raw if self.scale == 1.0 else raw * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits if self.temperature == 1.0 else logits / self.temperature

    def apply_(self, logits: Tensor) -> Tensor:
        """In place, on logits in the accumulation dtype."""
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        if self.temperature != 1.0:
            logits.div_(self.temperature)
        return logits

    def slope(self, transformed: Tensor) -> Tensor | float:
        """d(transformed) / d(raw), from the transformed logits; a number without a soft cap."""
        linear = self.scale / self.temperature
        if self.softcap is None:
            return linear
        tanh = transformed * (self.temperature / self.softcap)
        return (1.0 - tanh * tanh) * linear


@dataclass(frozen=True)
class HeadCall:
    """What one call of the head fixes for all of its chunks."""

    transform: LogitTransform
    compute_dtype: torch.dtype  # of the matrix products, as in the model's own head
    chunk_rows: int
    fused: bool

    @property
    def accumulation_dtype(self) -> torch.dtype:
        return torch.float64 if self.compute_dtype == torch.float64 else torch.float32

    def chunks(self, n: int) -> list[slice]:
        return [slice(start, min(start + self.chunk_rows, n)) for start in range(0, n, self.chunk_rows)]

    def picked(self, raw: Tensor) -> Tensor:
        """A few raw logits as the softmax sees them, in the accumulation dtype."""
        return self.transform(raw.to(self.accumulation_dtype))

    def arithmetic(self) -> ChunkArithmetic:
        return FusedChunks(self) if self.fused else EagerChunks(self)


class ChunkArithmetic(Protocol):
    """A chunk's raw logits [r, V] in the compute dtype -> what forward and backward need.

    `kept` is what `gradient` starts from: from `statistics` in the same call, or from `again` later.
    """

    def statistics(self, raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(log_z [r], entropy [r], kept); may write over `raw`."""
        ...

    def again(self, raw: Tensor, log_z: Tensor) -> Tensor:
        """`kept` of logits that were computed anew; may write over `raw`."""
        ...

    def gradient(self, kept: Tensor, log_z: Tensor, ids: Tensor, grad: Tensor) -> Tensor:
        """d/d(raw logits) of sum(grad * log p[ids]), [r, V] in the compute dtype; may write over `kept`.

        Args:
            ids, grad: [r, m]; an id may be listed twice.
        """
        ...


class EagerChunks:
    """`kept` are the log-probabilities in the accumulation dtype (for float32, in the memory of the logits)."""

    def __init__(self, call: HeadCall) -> None:
        self._call = call

    def statistics(self, raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = self._call.transform.apply_(raw.to(self._call.accumulation_dtype))
        log_z = torch.logsumexp(z, dim=-1)
        # sum_v p_v z_v with z first shifted, so that the large part cancels exactly
        z.sub_(log_z[:, None])
        return log_z, torch.linalg.vecdot(z.exp(), z).neg_(), z

    def again(self, raw: Tensor, log_z: Tensor) -> Tensor:
        return self._call.transform.apply_(raw.to(self._call.accumulation_dtype)).sub_(log_z[:, None])

    def gradient(self, kept: Tensor, log_z: Tensor, ids: Tensor, grad: Tensor) -> Tensor:
        transform = self._call.transform
        slope = transform.slope(kept + log_z[:, None]) if transform.softcap is not None else transform.slope(kept)
        out = kept.exp_().mul_(grad.sum(dim=1, keepdim=True).neg())
        out.scatter_add_(1, ids, grad)
        if isinstance(slope, Tensor) or slope != 1.0:
            out.mul_(slope)
        return out.to(self._call.compute_dtype)


class FusedChunks:
    """`kept` are the raw logits themselves."""

    def __init__(self, call: HeadCall, *, compiled: bool = True) -> None:
        self._call = call
        self._statistics, self._gradient = (_compiled if compiled else fused_functions)(call.transform)

    def statistics(self, raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        log_z, entropy = self._statistics(raw)
        return log_z, entropy, raw

    def again(self, raw: Tensor, log_z: Tensor) -> Tensor:
        del log_z
        return raw

    def gradient(self, kept: Tensor, log_z: Tensor, ids: Tensor, grad: Tensor) -> Tensor:
        # At the tokens of `ids` p and 1 must not be rounded apart in 16 bits: they are added in float32 and then
        # written over what the compiled function wrote. Both places of a token listed twice get the same sum.
        total = grad.sum(dim=1)
        z = self._call.picked(kept.gather(1, ids))
        same = ids[:, :, None] == ids[:, None, :]
        own = torch.where(same, grad[:, None, :], 0.0).sum(dim=-1) - total[:, None] * (z - log_z[:, None]).exp()
        own = (own * self._call.transform.slope(z)).to(kept.dtype)
        self._gradient(kept, log_z, total)
        return kept.scatter_(1, ids, own)


def fused_functions(transform: LogitTransform) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The two functions that `FusedChunks` compiles, uncompiled: statistics(raw), gradient_(raw, log_z, total)."""

    def statistics(raw: Tensor) -> tuple[Tensor, Tensor]:
        z = transform(raw.float())
        log_z = torch.logsumexp(z, dim=-1)
        z = z - log_z[:, None]
        return log_z, -(z.exp() * z).sum(dim=-1)

    def gradient_(raw: Tensor, log_z: Tensor, total: Tensor) -> None:
        z = transform(raw.float())
        grad = (z - log_z[:, None]).exp() * -total[:, None] * transform.slope(z)
        raw.copy_(grad.to(raw.dtype))

    return statistics, gradient_


@cache
def _compiled(transform: LogitTransform) -> tuple[Callable[..., Any], Callable[..., Any]]:
    statistics, gradient_ = fused_functions(transform)
    allow_recompiles(_RECOMPILE_LIMIT)
    compile_ = torch.compile(dynamic=True, fullgraph=True)
    return compile_(statistics), compile_(gradient_)


def can_fuse(device_type: str, dtype: torch.dtype) -> bool:
    """Whether `FusedChunks` works here: a GPU that torch.compile has a compiler for."""
    return device_type == "cuda" and dtype != torch.float64 and compiler_works(device_type)


def raw_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(hidden.to(weight.dtype), weight, bias)


def cast_head(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    return weight.to(dtype), None if bias is None else bias.to(dtype)


def add_product(total: Tensor, low: Tensor, hidden: Tensor) -> None:
    """total += low^T hidden, accumulated in the dtype of `total`, without a temporary where the device can."""
    if total.dtype == low.dtype:
        total.addmm_(low.T, hidden)
    elif total.is_cuda:
        torch.addmm(total, low.T, hidden, out_dtype=total.dtype, out=total)
    else:
        total += low.T @ hidden
