"""Group-standardised advantages and what a group's rewards decide about it. float64 throughout."""

from __future__ import annotations

import numpy as np

# Rewards closer than this are equal: 0.1 + 0.2 and 0.3 must not make a gradient (shared contract, loss page).
EQUAL_WITHIN = 1e-9
_STD_FLOOR = 1e-8


def standardised_advantages(rewards: np.ndarray) -> np.ndarray:
    """A = (r - mean) / (std + 1e-8) with population std, both over the scored rollouts.

    Args:
        rewards: float64 [G], NaN where no reward source scored the rollout.

    Returns:
        float64 [G]; 0 where the reward is NaN, and everywhere when no rollout was scored.
    """
    return centred_advantages(rewards) / (group_std(rewards) + _STD_FLOOR)


def centred_advantages(rewards: np.ndarray) -> np.ndarray:
    """A = r - mean over the scored rollouts: not divided by the group's standard deviation (`advantage_std=False`).

    Dividing makes a group that nearly always or nearly never succeeds weigh more than one that succeeds half the
    time; without it a group weighs by the spread of its rewards, and the scale of the rewards is that of the loss.
    Source: Dr. GRPO, arXiv 2503.20783.

    Args:
        rewards: float64 [G], NaN where no reward source scored the rollout.

    Returns:
        float64 [G]; 0 where the reward is NaN, and everywhere when no rollout was scored.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    scored = ~np.isnan(rewards)
    advantages = np.zeros_like(rewards)
    if scored.any():
        advantages[scored] = rewards[scored] - rewards[scored].mean()
    return advantages


def group_outcome(rewards: np.ndarray) -> str:
    """What becomes of a group, from its rewards alone (never from the advantages a hook returned).

    "no_reward": no rollout was scored. "zero_std": fewer than two were, or all scored rewards are equal within 1e-9.
    "scored": the group is trained on. The first two are dropped and both count in `frac_reward_zero_std`.
    """
    scored = np.asarray(rewards, dtype=np.float64)
    scored = scored[~np.isnan(scored)]
    if len(scored) == 0:
        return "no_reward"
    if len(scored) == 1 or scored.max() - scored.min() <= EQUAL_WITHIN:
        return "zero_std"
    return "scored"


def group_std(rewards: np.ndarray) -> float:
    """Population standard deviation over the scored rollouts; 0.0 when there is none."""
    scored = np.asarray(rewards, dtype=np.float64)
    scored = scored[~np.isnan(scored)]
    return float(scored.std()) if len(scored) else 0.0
