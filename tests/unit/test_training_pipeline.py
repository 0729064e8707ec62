"""A sync that fails while the run is being stopped costs no checkpoint; any other failed sync ends the run."""

from __future__ import annotations

import pytest

from asyncgrpo_core.errors import WeightSyncError
from asyncgrpo_core.training import pipeline as module
from asyncgrpo_core.training.pipeline import Pipeline
from asyncgrpo_core.training.run_context import count_one_more


class Source:
    def __init__(self):
        self.finished = []

    def finish_step(self, step, number):
        self.finished.append(number)


def pipeline(stop_requested, weight_sync_steps=1):
    made = object.__new__(Pipeline)  # only what a finished step touches
    made.source = Source()
    made.args = type("Args", (), {"weight_sync_steps": weight_sync_steps})
    made._stop_requested = stop_requested
    made._unsynced_steps = 0
    made.syncs = 0

    def sync():
        made.syncs += 1
        raise WeightSyncError("the server is gone")

    made.sync = sync
    return made


def test_a_failed_sync_ends_the_run(monkeypatch):
    monkeypatch.setattr(module, "_STOP_MAY_FOLLOW_S", 0.05)
    made = pipeline(lambda: False)
    with pytest.raises(WeightSyncError, match="gone"):
        made.finish_step([], 1)


def test_a_failed_sync_of_a_run_that_is_stopping_does_not():
    made = pipeline(lambda: True)
    made.finish_step([], 7)
    assert made.source.finished == [7] and made._unsynced_steps == 1


def test_the_stop_may_arrive_just_after_the_server_is_gone():
    asked = iter([False, False, True])
    made = pipeline(lambda: next(asked))
    made.finish_step([], 7)
    assert made.syncs == 1


def test_f018_syncs_are_due_every_weight_sync_steps():
    made = pipeline(lambda: True, weight_sync_steps=3)
    counts = []
    for number in range(1, 4):
        made.finish_step([], number)
        counts.append(made.syncs)
    assert counts == [0, 0, 1]


def test_the_first_sync_after_a_resume_counts_when_it_sends_steps_that_were_never_sent():
    assert count_one_more({"count": 3, "verified": 3, "unverified": 0, "mean_s": 0.2}) == {
        "count": 4,
        "verified": 4,
        "unverified": 0,
        "mean_s": 0.2,
    }
