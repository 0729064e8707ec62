"""Truncated importance sampling, per token.

    l = - A sg(min(r, C)) log p_y        r = p_y / q_y, C = importance_ratio_cap (None: no cap)

The gradient is A min(r, C) grad log p_y: every token is trained, a token that became much likelier with a bounded
weight. C = None is plain importance sampling, whose gradient is that of - A r.

Sources: the truncated weight is Ionides, "Truncated importance sampling" (2008) and the rho-bar of IMPALA
(arXiv 1802.01561); for the mismatch of sampler and trainer: Yao et al., "Your efficient RL framework secretly brings
you off-policy RL training" (2025, fengyao.notion.site/off-policy-rl), with C = 2.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from asyncgrpo_core.training.offpolicy.tokens import TokenLoss, TrainedTokens

if TYPE_CHECKING:
    from asyncgrpo_core.training.loss import LossSettings


def truncated_importance_sampling(tokens: TrainedTokens, settings: LossSettings) -> TokenLoss:
    """The loss of the module docstring; reads `importance_ratio_cap`."""
    log_ratio = tokens.log_ratio.detach()
    weight, truncated = truncated_weight(log_ratio, settings.importance_ratio_cap)
    per_token = -tokens.advantages * weight * tokens.logprobs
    return TokenLoss(per_token, torch.ones_like(truncated), log_ratio.exp(), truncated)


@torch.no_grad()
def truncated_weight(log_ratio: Tensor, cap: float | None) -> tuple[Tensor, Tensor]:
    """(min(r, cap), r > cap), both [N]; taken in log space, so that a ratio that overflows gives the cap."""
    if cap is None:
        return log_ratio.exp(), torch.zeros_like(log_ratio, dtype=torch.bool)
    bound = math.log(cap)
    return log_ratio.clamp_max(bound).exp(), log_ratio > bound
