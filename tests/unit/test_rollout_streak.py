"""When failures in a row end a run."""

from __future__ import annotations

import pytest

from asyncgrpo_core.errors import RolloutError
from asyncgrpo_core.rollout.streak import FailureStreak


@pytest.mark.parametrize(
    ("events", "stops_at"),
    [
        ([(0, "f"), (1, "f"), (2, "f")], 2),  # nothing has ever succeeded
        ([(0, "o"), (1, "f"), (2, "f"), (3, "f")], None),  # a burst within 10 s of a success
        ([(0, "o"), (5, "f"), (9, "f"), (10, "f")], 10),  # the third, and 10 s after it
        ([(0, "o"), (20, "f"), (21, "f"), (22, "o"), (23, "f"), (40, "f")], None),  # two in a row only
        ([(0, "o"), (20, "f"), (21, "f"), (22, "f")], 22),
    ],
)
def test_a_streak_table(events, stops_at) -> None:
    streak = FailureStreak("Scoring", count=3, seconds=10.0, fix="Repair it.")
    stopped = None
    for now, what in events:
        if what == "o":
            streak.succeeded(now)
            continue
        try:
            streak.failed(now, "too slow")
        except RolloutError as error:
            assert "Scoring failed for 3 groups in a row, last with: too slow" in str(error)
            stopped = now
            break
    assert stopped == stops_at
