"""Decoupled PPO: the sampler only weighs, a proximal policy is what the update stays near.

    l = - w min(u A, clamp(u, 1 - epsilon, 1 + epsilon_high) A),    w = p_prox / q_y,    u = p_y / p_prox

dropped where w is outside [clip_min, clip_max]; w carries no gradient.

What it is here: a sample is forwarded once and updates the weights once, so the policy just before the update *is*
the current one, and its log-probability, detached, is the proximal one. Then u = 1 whatever epsilon is, clip_ratio/*
are 0, w is the masked importance weight of the reference, and the gradient is exactly A w grad log p_y: masked
importance-weighted policy gradient without a trust region, which is score centering without its centring term. The
difference from the clipped surrogate is that a stale token is never clipped for being stale. Another proximal policy
(an average of past weights, or an interpolation between q and p, arXiv 2512.06547) is passed as `proximal_logprobs`.

Sources: Hilton, Cobbe and Schulman, "Batch size-invariance for policy optimization", arXiv 2110.00641; for language
models AReaL, arXiv 2505.24298.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from asyncgrpo_core.training.offpolicy.tokens import TokenLoss, TrainedTokens, clipped_surrogate, masked_exp

if TYPE_CHECKING:
    from asyncgrpo_core.training.loss import LossSettings


def decoupled_ppo(tokens: TrainedTokens, settings: LossSettings, proximal_logprobs: Tensor | None = None) -> TokenLoss:
    """The loss of the module docstring; reads `epsilon`, `epsilon_high`, `clip_min` and `clip_max`.

    Args:
        proximal_logprobs: [N], log p_prox of the sampled tokens; None means the current policy's, detached.
    """
    proximal = (tokens.logprobs if proximal_logprobs is None else proximal_logprobs).detach()
    log_weight = proximal - tokens.sampler_logprobs
    kept = settings.in_range(log_weight.exp())
    log_update = tokens.logprobs - proximal
    surrogate = clipped_surrogate(
        masked_exp(log_update, kept), tokens.advantages, settings.epsilon, settings.epsilon_upper
    )
    return TokenLoss(masked_exp(log_weight, kept) * surrogate, kept, log_update.detach().exp())
