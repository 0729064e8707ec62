"""What reward functions count about themselves (checks that came too late, judge calls, cache hits), as metrics."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncgrpo_core.metrics import MetricEvent
from asyncgrpo_core.rollout.reward_names import reward_names


class RewardCounts:
    """Reads the `counts` attribute of reward functions: a mapping, or a function that returns one.

    A mapping that several functions share (the verifier processes) is reported under the first one's name.
    """

    def __init__(self, reward_funcs: Sequence[Callable[..., Any]]) -> None:
        self._sources: dict[str, Any] = {}
        for name, func in zip(reward_names(reward_funcs), reward_funcs, strict=True):
            counts = _counts_of(func)
            if counts is not None and not any(counts is known for known in self._sources.values()):
                self._sources[name] = counts
        self._before: dict[str, float] = {}

    def events(self) -> list[MetricEvent]:
        """What was counted since the last call, as `rewards/{function}/{what}_count`."""
        out: list[MetricEvent] = []
        for name, source in self._sources.items():
            counts: Mapping[str, float] = source() if callable(source) else source
            for what, total in dict(counts).items():
                metric = f"rewards/{name}/{what}_count"
                new = total - self._before.get(metric, 0.0)
                self._before[metric] = total
                if new:
                    out.append((metric, "count", float(new), 0.0))
        return out


def _counts_of(func: Callable[..., Any]) -> Any:
    counts = getattr(func, "counts", None)
    while counts is None and isinstance(func, functools.partial):
        func = func.func
        counts = getattr(func, "counts", None)
    return counts
