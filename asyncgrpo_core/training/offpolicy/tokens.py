"""What a choice of off-policy loss reads and returns, as flat tensors over the N trained tokens of a row."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class TrainedTokens(NamedTuple):
    """The trained tokens of one row, in any order: a token's sample is said by `sample_index`, not by its place."""

    logprobs: Tensor  # [N], log p_y of the trainer, with gradient
    sampler_logprobs: Tensor  # [N], log q_y of the sampler
    advantages: Tensor  # [N], no gradient
    sample_index: Tensor  # int64 [N], 0 .. S - 1; some of the S samples may have no trained token

    @property
    def log_ratio(self) -> Tensor:
        """log r = log p_y - log q_y, [N], with gradient."""
        return self.logprobs - self.sampler_logprobs


class TokenLoss(NamedTuple):
    """A choice's result. The row's loss is `per_token.sum() / normalizer`."""

    per_token: Tensor  # [N], with gradient
    kept: Tensor  # bool [N], False where the mask took the token out; it still counts in the normalizer
    trust_ratio: Tensor  # [N], no gradient: the ratio that clip_ratio/* compares with the trust region
    truncated: Tensor | None = None  # bool [N], the importance weight was cut to a bound; None: no such bound
    sequence_log_ratio: Tensor | None = None  # [S'], one per sample with trained tokens; None: judged per token


def sample_sums(values: Tensor, sample_index: Tensor) -> tuple[Tensor, Tensor]:
    """Sum and number of the trained tokens of every sample.

    Accumulated in float64: the log-ratios of 10,000 tokens then add up to the same number in any order, also where
    the device adds them in no fixed order. Differentiable in `values`.

    Args:
        values: [N].
        sample_index: int64 [N].

    Returns:
        (sums, counts): float64 [S], S the largest index + 1; both 0 for a sample without trained tokens.
    """
    size = int(sample_index.max()) + 1 if len(sample_index) else 0
    zeros = torch.zeros(size, dtype=torch.float64, device=values.device)
    sums = zeros.index_add(0, sample_index, values.double())
    counts = zeros.index_add(0, sample_index, torch.ones_like(values, dtype=torch.float64))
    return sums, counts


def mean_log_ratio(tokens: TrainedTokens) -> tuple[Tensor, Tensor]:
    """Per sample the mean of log r, the logarithm of the ratios' geometric mean.

    Returns:
        ([N], [S']): for every token that of its sample (with gradient), and one per sample with trained tokens.
    """
    sums, counts = sample_sums(tokens.log_ratio, tokens.sample_index)
    means = sums / counts.clamp_min(1)
    return means[tokens.sample_index].to(tokens.logprobs.dtype), means.detach()[counts > 0]


def masked_exp(log_ratio: Tensor, kept: Tensor) -> Tensor:
    """exp(log_ratio) where kept, else 0; a masked ratio that overflows gives no inf * 0 in the backward pass."""
    ratio = torch.where(kept, log_ratio, torch.zeros_like(log_ratio)).exp()
    return torch.where(kept, ratio, torch.zeros_like(ratio))


def clipped_surrogate(ratio: Tensor, advantages: Tensor, epsilon: float, epsilon_high: float) -> Tensor:
    """-min(ratio A, clamp(ratio, 1 - epsilon, 1 + epsilon_high) A), elementwise (PPO, arXiv 1707.06347, equation 7)."""
    clamped = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    return -torch.minimum(ratio * advantages, clamped * advantages)
