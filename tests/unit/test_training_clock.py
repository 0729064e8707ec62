"""Where the time of a step goes (F089, F090): pauses put into each phase come out under its name."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from asyncgrpo_core.training import clock as module
from asyncgrpo_core.training.clock import OverlapMeter, StepClock


def test_f089_f090_pauses_come_out_under_the_name_of_their_phase():
    """Two micro-batches: 20 ms forward and 30 ms backward each, 50 ms optimizer, 10 ms of anything else."""
    clock = StepClock()
    for _ in range(2):
        with clock.part("fwd_bwd"):
            with clock.part("fwd"):
                time.sleep(0.02)
            time.sleep(0.03)
        clock.open_optimizer()
    time.sleep(0.05)
    clock.close_optimizer()
    time.sleep(0.01)
    wall, parts = clock.finish_step()
    assert 0.04 <= parts["fwd"] < parts["fwd_bwd"]
    assert parts["fwd_bwd"] >= 0.1
    assert parts["optimizer"] >= 0.05
    assert parts["fwd_bwd"] + parts["optimizer"] + 0.01 <= wall
    assert parts["optimizer"] < wall - parts["fwd_bwd"]  # it starts at the last backward pass, not at the first


def test_f089_a_step_lasts_from_the_end_of_the_one_before():
    clock = StepClock()
    clock.finish_step()
    time.sleep(0.02)
    with clock.part("fwd"):
        pass
    wall, parts = clock.finish_step()
    assert wall >= 0.02 and set(parts) == {"fwd"}
    assert clock.finish_step()[1] == {}


def test_f090_a_phase_that_raises_is_still_timed():
    clock = StepClock()
    with pytest.raises(ValueError), clock.part("fwd"):
        raise ValueError
    assert set(clock.finish_step()[1]) == {"fwd"}


class FakeEvent:
    """A device whose queue takes 2 s per event; only `synchronize` makes the host wait."""

    recorded, waits = 0, 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        FakeEvent.recorded += 1
        self.at_ms = 2000.0 * FakeEvent.recorded

    def synchronize(self):
        FakeEvent.waits += 1

    def elapsed_time(self, end):
        return end.at_ms - self.at_ms


def test_f090_on_a_gpu_the_device_is_timed_and_waited_for_only_at_the_end(monkeypatch):
    monkeypatch.setattr(module.torch.cuda, "Event", FakeEvent)
    clock = StepClock(torch.device("cuda", 0))
    for _ in range(3):
        with clock.part("fwd_bwd"), clock.part("fwd"):
            pass
        clock.open_optimizer()
    clock.close_optimizer()
    assert FakeEvent.waits == 0
    _, parts = clock.finish_step()
    # fwd_bwd: 3 spans of three events' time, fwd: of one, optimizer: from the last backward pass
    assert parts == {"fwd_bwd": 3 * 6.0, "fwd": 3 * 2.0, "optimizer": 2.0}


def test_overlap_is_time_in_which_both_sides_work():
    flying = SimpleNamespace(number=0)
    meter = OverlapMeter(lambda: flying.number)
    meter.start()
    meter.computing = True
    time.sleep(0.15)
    assert meter.overlapped_s == 0.0
    flying.number = 3
    time.sleep(0.3)
    meter.computing = False
    overlapped = meter.overlapped_s
    time.sleep(0.1)
    meter.stop()
    assert 0.1 < overlapped <= meter.overlapped_s < meter.total_s
