"""The loss's metrics as sums, minima and maxima: they add over micro-batches and over ranks, then become events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from asyncgrpo_core.metrics import MetricEvent, MetricWindow


@dataclass
class LossSums:
    """Detached scalars on the row's device; nothing is copied to the host before `events`.

    A row without trained tokens contributes sum 0, count 0, minimum inf and maximum -inf: neutral in every reduction.
    """

    means: dict[str, Tensor] = field(default_factory=dict)  # name -> float64 [2]: (sum, count)
    minima: dict[str, Tensor] = field(default_factory=dict)  # name -> float64 scalar
    maxima: dict[str, Tensor] = field(default_factory=dict)

    def add_mean(self, name: str, values: Tensor) -> None:
        total = values.detach().double().sum()
        self.means[name] = torch.stack((total, torch.full_like(total, values.numel())))

    def add_min(self, name: str, values: Tensor) -> None:
        values = values.detach().double()
        self.minima[name] = values.min() if values.numel() else values.new_tensor(torch.inf)

    def add_max(self, name: str, values: Tensor) -> None:
        values = values.detach().double()
        self.maxima[name] = values.max() if values.numel() else values.new_tensor(-torch.inf)

    def merge(self, other: LossSums) -> LossSums:
        """The sums of both, as a new object; both must hold the same names (or one of them nothing)."""
        mine, theirs = self._names(), other._names()
        if mine and theirs and mine != theirs:
            raise ValueError(f"cannot add the sums of different losses: {sorted(set(mine) ^ set(theirs))}")
        return LossSums(
            _combine(self.means, other.means, torch.add),
            _combine(self.minima, other.minima, torch.minimum),
            _combine(self.maxima, other.maxima, torch.maximum),
        )

    def all_reduce(self) -> LossSums:
        """The sums over all ranks (every rank must call it with the same names); two collectives."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return self
        sums = torch.stack(list(self.means.values()))
        # a minimum is the negated maximum of negated values: one collective for both
        extremes = torch.stack([*self.maxima.values(), *(-v for v in self.minima.values())])
        torch.distributed.all_reduce(sums, op=torch.distributed.ReduceOp.SUM)
        torch.distributed.all_reduce(extremes, op=torch.distributed.ReduceOp.MAX)
        n = len(self.maxima)
        return LossSums(
            dict(zip(self.means, sums, strict=True)),
            dict(zip(self.minima, -extremes[n:], strict=True)),
            dict(zip(self.maxima, extremes[:n], strict=True)),
        )

    def events(self) -> list[MetricEvent]:
        """As metric events for a `MetricWindow`; one copy to the host. Nothing trained gives no event."""
        if not self.means:
            return []
        parts = [*self.means.values(), *self.minima.values(), *self.maxima.values()]
        flat = iter(torch.cat([part.reshape(-1) for part in parts]).tolist())
        events: list[MetricEvent] = [(name, "mean", next(flat), next(flat)) for name in self.means]
        events += [(name, "min", next(flat), 0.0) for name in self.minima]
        events += [(name, "max", next(flat), 0.0) for name in self.maxima]
        trained = any(kind == "mean" and count for _, kind, _, count in events)
        return events if trained else []

    def record(self, window: MetricWindow) -> None:
        """Add to a logging window."""
        window.extend(self.events())

    def _names(self) -> list[str]:
        return [*self.means, *self.minima, *self.maxima]


def _combine(a: dict[str, Tensor], b: dict[str, Tensor], join: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Tensor]:
    if not a or not b:
        return dict(a or b)
    return {name: join(value, b[name]) for name, value in a.items()}
