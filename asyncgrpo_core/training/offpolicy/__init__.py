"""Losses for off-policy samples beside the reference's two, one file each; `loss_type` chooses.

    tis              truncated importance weight per token                        tis.py
    sequence_mask    importance weight of the whole sample, masked                sequence_mask.py
    geometric_mask   samples masked by their geometric-mean ratio, TIS inside     geometric_mask.py
    cispo            clipped importance weight per token                          cispo.py
    gspo             one clipped ratio per sample                                 gspo.py
    decoupled_ppo    importance weight and trust region apart                     decoupled.py

Each is a pure function (TrainedTokens, LossSettings) -> TokenLoss; `training/loss.py` sums, normalises and measures.
On-policy (r = 1 everywhere) all of them have the gradient of the plain policy gradient.

Not a loss of its own: the asymmetric trust region of DAPO (arXiv 2503.14476) is `epsilon_high`, its overlong shaping
`rewards.get_soft_overlong_punishment`, its token-level mean the normalisation that every loss here has; the constant
divisor of Dr. GRPO is in normalisation.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from asyncgrpo_core.training.offpolicy.cispo import cispo
from asyncgrpo_core.training.offpolicy.decoupled import decoupled_ppo
from asyncgrpo_core.training.offpolicy.geometric_mask import geometric_mask
from asyncgrpo_core.training.offpolicy.gspo import gspo
from asyncgrpo_core.training.offpolicy.normalisation import dr_grpo_normalizer, num_trained_samples
from asyncgrpo_core.training.offpolicy.sequence_mask import sequence_mask
from asyncgrpo_core.training.offpolicy.tis import truncated_importance_sampling
from asyncgrpo_core.training.offpolicy.tokens import TokenLoss, TrainedTokens

if TYPE_CHECKING:
    from asyncgrpo_core.training.loss import LossSettings

OFF_POLICY_LOSSES: dict[str, Callable[[TrainedTokens, LossSettings], TokenLoss]] = {
    "tis": truncated_importance_sampling,
    "sequence_mask": sequence_mask,
    "geometric_mask": geometric_mask,
    "cispo": cispo,
    "gspo": gspo,
    "decoupled_ppo": decoupled_ppo,
}

# `loss_type` of the reference's two losses; `score_centering` says which of them.
REFERENCE_LOSS = "async_grpo"
LOSS_TYPES = (REFERENCE_LOSS, *OFF_POLICY_LOSSES)

__all__ = [
    "LOSS_TYPES",
    "OFF_POLICY_LOSSES",
    "REFERENCE_LOSS",
    "TokenLoss",
    "TrainedTokens",
    "cispo",
    "decoupled_ppo",
    "dr_grpo_normalizer",
    "geometric_mask",
    "gspo",
    "num_trained_samples",
    "sequence_mask",
    "truncated_importance_sampling",
]
