"""Dr. GRPO: the sum over tokens is divided by a constant per sample, not by the number of tokens.

    L = (sum over trained tokens of l) / (samples * budget)        budget = max_completion_length

Dividing by the number of tokens makes a token of a short micro-batch weigh more than one of a long micro-batch;
here a token weighs the same whatever was sampled beside it. It replaces the `normalizer` of any loss; the paper
combines it with advantages that are not divided by the group's standard deviation.

Source: Liu et al., "Understanding R1-Zero-like training: a critical perspective", arXiv 2503.20783.
"""

from __future__ import annotations

import torch
from torch import Tensor


def dr_grpo_normalizer(num_samples: int, budget: int) -> float:
    """The divisor of a micro-batch.

    Args:
        num_samples: samples with trained tokens in the micro-batch, over all ranks.
        budget: most tokens that a sample is granted, the same for every sample (`max_completion_length`).

    Raises:
        ValueError: either is not positive.
    """
    if num_samples < 1 or budget < 1:
        raise ValueError(f"num_samples and budget must be at least 1, got {num_samples} and {budget}")
    return float(num_samples) * budget


def num_trained_samples(sample_index: Tensor) -> int:
    """Samples of a row that have trained tokens; `sample_index` as in the row, int64 [N]."""
    return len(torch.unique(sample_index))
