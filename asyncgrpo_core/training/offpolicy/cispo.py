"""CISPO: the importance weight is clipped, the update is not.

    l = - A sg(clamp(r, 1 - epsilon, 1 + epsilon_high)) log p_y

The gradient is A times the clipped weight times the score, for every token and both signs of A: unlike the clipped
surrogate, which drops the gradient of a token outside the trust region. The paper sets no lower bound (epsilon = 1
here) and tunes the upper one, so epsilon_high of several units is usual. With epsilon = 1 it is token-level TIS with
C = 1 + epsilon_high. The paper's r is taken against the policy before the update; here against the sampler.

Source: MiniMax-M1, arXiv 2506.13585, equations 4 and 5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from asyncgrpo_core.training.offpolicy.tokens import TokenLoss, TrainedTokens

if TYPE_CHECKING:
    from asyncgrpo_core.training.loss import LossSettings


def cispo(tokens: TrainedTokens, settings: LossSettings) -> TokenLoss:
    """The loss of the module docstring; reads `epsilon` and `epsilon_high`."""
    ratio = tokens.log_ratio.detach().exp()
    low, high = max(0.0, 1 - settings.epsilon), 1 + settings.epsilon_upper
    per_token = -tokens.advantages * ratio.clamp(low, high) * tokens.logprobs
    truncated = (ratio < low) | (ratio > high)
    return TokenLoss(per_token, torch.ones_like(truncated), ratio, truncated)
