"""The load-balancing loss of a micro-batch: the mean over its rows (reference, router_aux_loss_coef and aux_loss).

A row is what one rank forwards, and its loss (models/moe.py) is over the tokens of that row, each once. Rows are not
weighted by their length, as in the reference, which averages over the ranks. A rank without work forwards a filler
token: its row counts neither in the loss nor in the metric, so the mean is over the rows that hold samples. Micro-
batches of a step are averaged by the Trainer, with the policy's loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from asyncgrpo_core.models.forward import PolicyOutput
from asyncgrpo_core.training.loss_sums import LossSums


def add_router_loss(
    loss: Tensor, sums: LossSums, policy: PolicyOutput, row: Mapping[str, Any], coefficient: float
) -> Tensor:
    """`loss` of a row with its share of the micro-batch's load-balancing loss; ranks' losses still add up.

    Args:
        loss, sums: of `async_grpo_loss`; `sums` gets the metric `aux_loss`, unscaled.
        policy: of that row; without an `aux_loss` nothing is added.
        row: `row_weight`, 1 / the rows of the micro-batch that hold samples, or 0 for a rank without any.
        coefficient: the weight of the load-balancing loss.
    """
    if policy.aux_loss is None:
        return loss
    weight = row["row_weight"]
    sums.add_mean("aux_loss", policy.aux_loss.reshape(1)[: 1 if weight else 0])
    return loss + (coefficient * weight) * policy.aux_loss
