"""What rank 0 sends to every rank for one step: its rows, and what the micro-batches hold over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from asyncgrpo_core.packing.layout import pack_row
from asyncgrpo_core.packing.planner import MicroBatch
from asyncgrpo_core.types import TrainingSample


@dataclass(frozen=True)
class RowShare:
    """One rank's row of one micro-batch.

    Attributes:
        samples: in row order; none when the rank has no work.
        num_trained: trained tokens of the micro-batch, over all ranks.
        num_trained_samples: its samples that have any, over all ranks.
        num_rows: its rows that hold samples.
    """

    samples: tuple[TrainingSample, ...]
    num_trained: int
    num_trained_samples: int
    num_rows: int

    def pack(self, num_sampler_logprobs: int) -> dict[str, Any]:
        """The row's tensors (packing.PackedRow), the two totals that the loss divides by, and the row's own weight.

        `row_weight` is 1 / num_rows, 0 without samples: weighted so, rows sum to their mean over the micro-batch.
        """
        row = cast(dict[str, Any], pack_row(self.samples, num_sampler_logprobs))
        return row | {
            "num_trained": self.num_trained,
            "num_trained_samples": self.num_trained_samples,
            "row_weight": 1 / self.num_rows if self.samples else 0.0,
        }


def shares_of(step: Sequence[MicroBatch], world_size: int) -> list[list[RowShare]]:
    """[rank][micro-batch] of a step."""
    totals = [
        (
            microbatch.num_trained,
            sum(sample.sequence.num_trained > 0 for sample in microbatch.samples),
            sum(len(row) > 0 for row in microbatch.rows),
        )
        for microbatch in step
    ]
    return [
        [RowShare(microbatch.rows[rank], *total) for microbatch, total in zip(step, totals, strict=True)]
        for rank in range(world_size)
    ]
