"""GSPO: one clipped ratio for a whole sample.

    l = - min(s A, clamp(s, 1 - epsilon, 1 + epsilon_high) A),    s = (product of r over the sample)^(1 / T)

dropped where s is outside [clip_min, clip_max], as the clipped surrogate drops tokens. All T tokens of a sample carry
the same l, so a sample's contribution is T l and its gradient, where it is not clipped, A s (sum of the scores). The
paper's mean over samples weighs every sample alike whatever its length; under this package's token normalisation a
sample counts by its trained tokens. Its ratios lie very near 1: the paper clips with epsilon 3e-4 and epsilon_high
4e-4, and with the default 0.2 nothing is clipped.

Source: Zheng et al., "Group sequence policy optimization", arXiv 2507.18071, equations 5 to 7.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from asyncgrpo_core.training.offpolicy.tokens import (
    TokenLoss,
    TrainedTokens,
    clipped_surrogate,
    masked_exp,
    mean_log_ratio,
)

if TYPE_CHECKING:
    from asyncgrpo_core.training.loss import LossSettings


def gspo(tokens: TrainedTokens, settings: LossSettings) -> TokenLoss:
    """The loss of the module docstring; reads `epsilon`, `epsilon_high`, `clip_min` and `clip_max`."""
    log_s, of_sample = mean_log_ratio(tokens)
    trust_ratio = log_s.detach().exp()
    kept = settings.in_range(trust_ratio)
    surrogate = clipped_surrogate(masked_exp(log_s, kept), tokens.advantages, settings.epsilon, settings.epsilon_upper)
    # a masked sample's ratio of 0 would otherwise count as clipped from below: (1 - epsilon) |A|
    per_token = torch.where(kept, surrogate, torch.zeros_like(surrogate))
    return TokenLoss(per_token, kept, trust_ratio, sequence_log_ratio=of_sample)
