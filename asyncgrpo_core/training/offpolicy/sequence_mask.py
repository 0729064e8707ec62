"""Sequence-level masked importance sampling.

    l = - A sg(w) log p_y,    w = rho where clip_min <= rho <= clip_max, else 0,    rho = product of r over the sample

All tokens of a sample carry the weight of the whole sample, and a sample whose rho is out of range gives no gradient.
Without bounds (0 and infinity) the gradient is that of the unbiased estimator - A rho of the sample. rho shrinks and
grows exponentially with the length, so the default bounds drop most long stale samples: see `geometric_mask`.

A sample is the unit that a rollout was cut into (one per conversation that was extended without a fork), and the
product runs over its trained tokens only.

Source: Seq-MIS of Liu, Li et al., "When speed kills stability: demystifying RL collapse from the training-inference
mismatch" (2025, richardli.xyz/rl-collapse), parts 2 and 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from asyncgrpo_core.training.offpolicy.tokens import TokenLoss, TrainedTokens, masked_exp, sample_sums

if TYPE_CHECKING:
    from asyncgrpo_core.training.loss import LossSettings


def sequence_mask(tokens: TrainedTokens, settings: LossSettings) -> TokenLoss:
    """The loss of the module docstring; reads `clip_min` and `clip_max`, which bound the sample's rho."""
    with torch.no_grad():
        log_ratio = tokens.log_ratio
        log_rho, counts = sample_sums(log_ratio, tokens.sample_index)
        # judged in float64: the exponential of a long sample's sum overflows float32 long before it means anything
        kept = settings.in_range(log_rho.exp())[tokens.sample_index]
        weight = masked_exp(log_rho[tokens.sample_index], kept).to(log_ratio.dtype)
    per_token = -tokens.advantages * weight * tokens.logprobs
    return TokenLoss(per_token, kept, log_ratio.exp(), sequence_log_ratio=log_rho[counts > 0])
