"""Which samples go into which row: samples in arrival order -> micro-batches of one row per rank.

Pure bookkeeping, no torch. A row is a prefix trie of at most `token_budget` forwarded tokens and as many loss terms; a
micro-batch holds one row per rank and closes when the next sample has no place in its rows (`trie.place`).

    planner = RowPlanner(token_budget=4096, world_size=2)
    placement = planner.add(sample)      # .closed: a finished MicroBatch or None; .oversize: sample refused
    last = planner.flush()               # what is still open, or None
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from asyncgrpo_core.packing.trie import PrefixTrie, RowOffer, place
from asyncgrpo_core.types import TrainingSample


@dataclass(frozen=True)
class CostModel:
    """Time of one sample's forward and backward in arbitrary units, for balancing ranks.

    A transformer layer spends about `24 d^2` operations per token on its matrices and `2 d` per (query, key) pair
    of causal attention, so a sample of n tokens costs `n (n + 12 d)` up to a constant, d being the hidden size.
    """

    hidden_size: int = 1024

    @classmethod
    def of_model(cls, config: Any) -> CostModel:
        """From a transformers config; of a vision-language model the text part counts."""
        return cls(config.get_text_config().hidden_size)

    def sample_cost(self, num_tokens: int) -> float:
        return float(num_tokens) * (num_tokens + 12 * self.hidden_size)


@dataclass
class RowFill:
    """The samples of one row, with the row's tokens and cost kept up to date."""

    trie: PrefixTrie = field(default_factory=PrefixTrie)
    cost: float = 0.0
    groups: set[int] = field(default_factory=set)  # group ids

    @property
    def samples(self) -> list[TrainingSample]:
        return self.trie.samples

    @property
    def num_tokens(self) -> int:
        """Forwarded tokens: shared ones once."""
        return self.trie.num_tokens

    def offer(self, sample: TrainingSample, token_budget: int, cost: CostModel) -> RowOffer:
        """What the row says about taking `sample`."""
        return RowOffer(
            holds_group=sample.group_id in self.groups,
            has_room=self.trie.fits(sample, token_budget),
            empty=not self.trie.samples,
            cost=self.cost,
            cost_with=self.cost + self.trie.added_cost(sample, cost),
        )

    def add(self, sample: TrainingSample, cost: CostModel) -> None:
        self.cost += self.trie.added_cost(sample, cost)
        self.trie.add(sample)
        self.groups.add(sample.group_id)


@dataclass(frozen=True)
class MicroBatch:
    """One row per rank, in rank order. A rank's row may be empty at the end of the data (`pack_row([])`)."""

    rows: tuple[tuple[TrainingSample, ...], ...]
    row_tokens: tuple[int, ...]  # forwarded tokens of each row
    row_costs: tuple[float, ...]  # CostModel units

    @property
    def samples(self) -> list[TrainingSample]:
        """All samples of the micro-batch, rank by rank."""
        return [sample for row in self.rows for sample in row]

    @property
    def num_tokens(self) -> int:
        """Forwarded tokens, over all ranks."""
        return sum(self.row_tokens)

    @property
    def num_trained(self) -> int:
        """Trained tokens, over all ranks: the loss's normalizer."""
        return sum(sample.sequence.num_trained for sample in self.samples)


@dataclass(frozen=True)
class Placement:
    """What became of one added sample."""

    closed: MicroBatch | None = None  # the micro-batch that the sample no longer fitted into
    oversize: bool = False  # longer than token_budget: fits into no row, was not taken


class RowPlanner:
    """Forms micro-batches from samples in arrival order.

    Args:
        token_budget: largest number of tokens of a row, at least 1.
        world_size: number of ranks, so rows per micro-batch.
        cost: what the ranks are balanced by.

    Raises:
        ValueError: a budget or world size below 1.
    """

    def __init__(self, token_budget: int, world_size: int = 1, cost: CostModel | None = None) -> None:
        if token_budget < 1 or world_size < 1:
            raise ValueError(
                f"RowPlanner needs token_budget >= 1 and world_size >= 1, got {token_budget} and {world_size}"
            )
        self.token_budget = token_budget
        self.world_size = world_size
        self._cost = cost or CostModel()
        self._rows = self._empty_rows()

    def _empty_rows(self) -> list[RowFill]:
        return [RowFill() for _ in range(self.world_size)]

    @property
    def open_samples(self) -> list[TrainingSample]:
        """Samples taken and not yet in a closed micro-batch."""
        return [sample for row in self._rows for sample in row.samples]

    @property
    def open_tokens(self) -> int:
        """Tokens that the open micro-batch forwards, over all ranks."""
        return sum(row.num_tokens for row in self._rows)

    def add(self, sample: TrainingSample) -> Placement:
        """Place one sample; it may close the open micro-batch and start the next one."""
        if sample.sequence.num_tokens > self.token_budget:
            return Placement(oversize=True)
        row = self._best_row(sample, self._rows)
        closed = None
        if row is None:
            closed = self.flush()
            row = self._rows[0]
        row.add(sample, self._cost)
        return Placement(closed=closed)

    def flush(self) -> MicroBatch | None:
        """Close the open micro-batch (None when it is empty) and start a new one."""
        rows, self._rows = self._rows, self._empty_rows()
        if not any(row.samples for row in rows):
            return None
        rows = self._rebalanced(rows)
        return MicroBatch(
            rows=tuple(tuple(row.samples) for row in rows),
            row_tokens=tuple(row.num_tokens for row in rows),
            row_costs=tuple(row.cost for row in rows),
        )

    def _best_row(self, sample: TrainingSample, rows: list[RowFill]) -> RowFill | None:
        at = place([row.offer(sample, self.token_budget, self._cost) for row in rows])
        return None if at is None else rows[at]

    def _rebalanced(self, rows: list[RowFill]) -> list[RowFill]:
        """The same samples, largest first onto the cheapest row, when that lowers the most loaded row.

        In arrival order a long sample may come last and land on a full rank; the closed set can be spread better.
        """
        if self.world_size == 1:
            return rows
        spread = self._empty_rows()
        samples = [sample for row in rows for sample in row.samples]
        for sample in sorted(samples, key=lambda s: s.sequence.num_tokens, reverse=True):
            row = self._best_row(sample, spread)
            if row is None:  # the greedy order found a packing that this one does not
                return rows
            row.add(sample, self._cost)
        return spread if max(r.cost for r in spread) < max(r.cost for r in rows) else rows
