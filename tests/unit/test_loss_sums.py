"""LossSums: adding over micro-batches and ranks, and the events they become."""

import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from asyncgrpo_core.metrics import MetricWindow, kind_of
from asyncgrpo_core.models.forward import PolicyOutput
from asyncgrpo_core.training.loss import LossSettings, async_grpo_loss
from asyncgrpo_core.training.loss_sums import LossSums


def sums_of(values):
    out, tensor = LossSums(), torch.tensor(values)
    out.add_mean("x/mean", tensor)
    out.add_min("x/min", tensor)
    out.add_max("x/max", tensor)
    return out


def test_merged_sums_are_the_sums_of_the_concatenation():
    a, b = [1.0, -2.0, 4.0], [0.5]
    assert sums_of(a).merge(sums_of(b)).events() == sums_of(a + b).events()
    assert LossSums().merge(sums_of(a)).events() == sums_of(a).merge(LossSums()).events() == sums_of(a).events()


def test_events_are_what_a_window_reduces():
    window = MetricWindow()
    sums_of([1.0, 3.0]).record(window)
    sums_of([8.0]).record(window)
    assert window.reduce() == {"x/mean": 4.0, "x/min": 1.0, "x/max": 8.0}


def test_nothing_trained_gives_no_event():
    assert sums_of([]).events() == [] and LossSums().events() == []
    assert sums_of([]).merge(sums_of([2.0])).events() == sums_of([2.0]).events()


def test_sums_of_different_losses_cannot_be_added():
    other = LossSums()
    other.add_mean("y", torch.ones(1))
    with pytest.raises(ValueError, match="x/mean"):
        sums_of([1.0]).merge(other)


def test_the_names_carry_the_reductions_they_get():
    """The reference reads a metric's reduction off its name; ours must agree."""
    policy = PolicyOutput(torch.zeros(2), torch.zeros(2), torch.zeros(2, 1))
    batch = {
        "sampler_logprobs": torch.zeros(2),
        "advantages": torch.ones(2),
        "sample_index": torch.zeros(2, dtype=torch.int64),
        "top_ids": torch.zeros(2, 1, dtype=torch.int64),
        "top_logprobs": torch.zeros(2, 1),
    }
    _, sums = async_grpo_loss(policy, batch, LossSettings(), 2)
    events = sums.events()
    assert len(events) == 13
    assert all(kind_of(name) == kind for name, kind, _, _ in events)


def test_ranks_are_reduced_by_sum_minimum_and_maximum(monkeypatch):
    """Two ranks as two threads around a stand-in for the collective."""
    parts = {0: [1.0, -2.0, 4.0], 1: [0.5, 9.0]}
    barrier, slots, results = threading.Barrier(2, timeout=10), {}, {}
    rank = threading.local()

    def all_reduce(tensor, op):
        slots[rank.number] = tensor.clone()
        barrier.wait()
        both = torch.stack([slots[0], slots[1]])
        barrier.wait()
        tensor.copy_(both.sum(0) if op == torch.distributed.ReduceOp.SUM else both.max(0).values)

    def run(number):
        rank.number = number
        results[number] = sums_of(parts[number]).all_reduce().events()

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    threads = [threading.Thread(target=run, args=(n,)) for n in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert results[0] == results[1] == sums_of(parts[0] + parts[1]).events()


def test_one_process_needs_no_collective():
    sums = sums_of([1.0])
    assert sums.all_reduce() is sums


@pytest.mark.parametrize(
    "settings",
    [
        LossSettings(),
        LossSettings(score_centering_tail="head"),
        LossSettings(score_centering=False),
    ],
    ids=["model", "head", "clipped"],
)
@pytest.mark.parametrize("restricted", [False, True])
def test_the_loss_and_its_sums_read_nothing_from_the_device(settings, restricted):
    """On tensors without values: whatever has to know one would make every micro-batch wait for the device."""
    with FakeTensorMode():
        policy = PolicyOutput(torch.zeros(5, requires_grad=True), torch.zeros(5), torch.zeros(5, 2, requires_grad=True))
        batch = {
            "sampler_logprobs": torch.zeros(5),
            "advantages": torch.ones(5),
            "sample_index": torch.zeros(5, dtype=torch.int64),
            "top_ids": torch.zeros(5, 2, dtype=torch.int64),
            "top_logprobs": torch.zeros(5, 2),
        }
        if restricted:
            batch["candidate_offsets"] = torch.zeros(6, dtype=torch.int64)
        loss, sums = async_grpo_loss(policy, batch, settings, 5)
        loss.backward()
        sums.merge(sums)
