"""Metrics that carry their own reduction over a logging window (reference, 'Logged metrics').

A `MetricEvent` is `(name, kind, a, b)`, plain data, so that it can cross process boundaries:

    ("reward", "mean", total, count)                 mean over items: sum of totals / sum of counts
    ("rollout/generated_tokens_per_s", "rate", tokens, seconds)
    ("sample/dropped_stale_count", "count", n, 0)    summed over the window
    ("completions/max_length", "max", value, 0)      largest value; "min" likewise
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

MetricEvent = tuple[str, str, float, float]

_WORD = re.compile(r"[a-z0-9]+")


def kind_of(name: str) -> str:
    """The reduction that the reference's naming rule gives a metric: count, max, min or mean.

    The *words* of the name's last part decide: "dropped_stale_count" is a count, "counter" is not.
    """
    words = set(_WORD.findall(name.rsplit("/", 1)[-1].lower()))
    for kind in ("count", "max", "min"):
        if kind in words:
            return kind
    return "mean"


class MetricWindow:
    """Everything recorded since the previous log, reduced once per logging window."""

    def __init__(self) -> None:
        self._pairs: dict[str, list[float]] = {}
        self._kinds: dict[str, str] = {}

    def add(self, name: str, value: float, weight: float = 1.0) -> None:
        """Record one value; its name decides the reduction. `weight` counts items for a mean."""
        kind = kind_of(name)
        if kind == "mean":
            self.event((name, "mean", float(value) * weight, float(weight)))
        else:
            self.event((name, kind, float(value), 0.0))

    def add_many(self, name: str, values: Iterable[float]) -> None:
        for value in values:
            self.add(name, value)

    def rate(self, name: str, amount: float, seconds: float) -> None:
        """Record one chunk of a rate; the window's value is total amount / total seconds."""
        self.event((name, "rate", float(amount), float(seconds)))

    def event(self, event: MetricEvent) -> None:
        name, kind, a, b = event
        known = self._kinds.setdefault(name, kind)
        if known != kind:
            raise ValueError(f"metric {name!r} was recorded as {known!r} and now as {kind!r}")
        pair = self._pairs.get(name)
        if pair is None:
            self._pairs[name] = [a, b]
        elif kind in ("mean", "rate"):
            pair[0] += a
            pair[1] += b
        elif kind == "count":
            pair[0] += a
        elif kind == "max":
            pair[0] = max(pair[0], a)
        else:
            pair[0] = min(pair[0], a)

    def drain(self) -> list[MetricEvent]:
        """Everything recorded, as events for another window; empties this one."""
        events = [(name, self._kinds[name], a, b) for name, (a, b) in self._pairs.items()]
        self._pairs.clear()
        return events

    def extend(self, events: Iterable[MetricEvent]) -> None:
        for event in events:
            self.event(event)

    def reduce(self) -> dict[str, float]:
        """The window's values, and start a new window."""
        out = {}
        for name, (a, b) in self._pairs.items():
            if self._kinds[name] in ("mean", "rate"):
                out[name] = a / b if b else math.nan
            else:
                out[name] = a
        self._pairs.clear()
        return out
