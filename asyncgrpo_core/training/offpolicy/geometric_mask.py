"""Geometric-mean mask with truncated token weights.

    l = - A g sg(min(r, C)) log p_y,    g = 1 where clip_min <= (product of r over the sample)^(1 / T) <= clip_max

T is the sample's number of trained tokens, C = importance_ratio_cap. The geometric mean does not depend on the length,
so long samples are not dropped for being long; it is a criterion only and no importance weight, which is why the
tokens of a kept sample keep their own weights. Its useful bounds lie near 1 (say 0.99 and 1.01): with the default
0.5 and 5.0 the mask acts on broken samples only, and sampling/masked_mean says so.

Source: geometric rejection sampling with token-level TIS, of Liu, Li et al., "When speed kills stability" (2025,
richardli.xyz/rl-collapse), part 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from asyncgrpo_core.training.offpolicy.tis import truncated_weight
from asyncgrpo_core.training.offpolicy.tokens import TokenLoss, TrainedTokens, mean_log_ratio

if TYPE_CHECKING:
    from asyncgrpo_core.training.loss import LossSettings


def geometric_mask(tokens: TrainedTokens, settings: LossSettings) -> TokenLoss:
    """The loss of the module docstring; reads `clip_min`, `clip_max` and `importance_ratio_cap`."""
    log_ratio = tokens.log_ratio.detach()
    with torch.no_grad():
        of_token, of_sample = mean_log_ratio(tokens)
        kept = settings.in_range(of_token.exp())
    weight, truncated = truncated_weight(log_ratio, settings.importance_ratio_cap)
    weight = torch.where(kept, weight, torch.zeros_like(weight))  # before the product: without a cap it may be inf
    per_token = -tokens.advantages * weight * tokens.logprobs
    return TokenLoss(per_token, kept, log_ratio.exp(), truncated & kept, of_sample)
