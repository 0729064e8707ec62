"""sample/*, batch/* and perf/* of a step on hand-made steps.

Rows F048, F050, F051, F059, F060, F062, F079, F080, F082, F083, F084, F085, F086, F087, F089, F092.
"""

from __future__ import annotations

import numpy as np
import pytest

from asyncgrpo_core.metrics import MetricWindow, kind_of
from asyncgrpo_core.packing.planner import MicroBatch, RowPlanner
from asyncgrpo_core.training.step_metrics import record_batch, record_performance, record_samples, record_skipped
from tests.unit.samples import make_sample


def microbatch(*samples, world_size=1):
    planner = RowPlanner(100, world_size=world_size)
    for sample in samples:
        assert planner.add(sample).closed is None
    return planner.flush()


@pytest.fixture
def step():
    first = microbatch(make_sample(0, completion_tokens=2), make_sample(0, completion_tokens=4, rollout=1))
    second = microbatch(make_sample(1, prompt_tokens=6, completion_tokens=1, version=3, group_reward_std=0.1))
    return [first, second]


def test_f079_f080_sample_metrics_average_over_samples(step):
    window = MetricWindow()
    record_samples(window, step, version=4, taken_at=10.0)
    values = window.reduce()
    assert values["sample/forwarded_tokens_mean"] == pytest.approx((5 + 7 + 7) / 3)
    assert values["sample/forwarded_tokens_max"] == 7
    assert values["sample/trained_tokens_mean"] == pytest.approx((2 + 4 + 1) / 3)
    assert values["sample/staleness_mean"] == pytest.approx((4 + 4 + 1) / 3)
    assert values["sample/staleness_max"] == 4
    assert values["sample/time_in_queue_s"] == pytest.approx(10.0)


def test_f048_f050_f051_group_metrics_weigh_every_trained_sample_the_same(step):
    step[1].samples[0].func_group_stds = {"accuracy": 0.2}
    for sample in step[0].samples:
        sample.func_group_stds = {"accuracy": 0.8}
    step[1].samples[0].reward = 4.0
    window = MetricWindow()
    record_samples(window, step, version=0, taken_at=0.0)
    values = window.reduce()
    assert values["reward_group_std"] == pytest.approx((0.5 + 0.5 + 0.1) / 3)
    assert values["rewards/accuracy/group_std"] == pytest.approx((0.8 + 0.8 + 0.2) / 3)
    assert values["reward_kept"] == pytest.approx((1 + 1 + 4) / 3)


def test_f082_f083_f084_f085_batch_metrics_by_hand(step):
    window = MetricWindow()
    assert record_batch(window, step, token_budget=20) == (19, 7)
    values = window.reduce()
    assert values["batch/forwarded_tokens_per_step"] == 19
    assert values["batch/trained_tokens_per_step"] == 7
    assert values["batch/samples_per_step"] == 3
    assert values["batch/groups_per_step"] == 2
    assert values["batch/microbatches_per_step"] == 2
    assert values["batch/masked_token_frac"] == pytest.approx(12 / 19)
    assert values["batch/samples_per_row"] == pytest.approx(1.5)
    assert values["batch/row_tokens_mean"] == pytest.approx((12 + 7) / 2)
    assert values["batch/row_tokens_max"] == 12
    assert values["batch/row_fill_frac"] == pytest.approx((12 / 20 + 7 / 20) / 2)
    assert values["batch/packing_ratio"] == 1.0


def test_f085_f086_rows_of_two_ranks():
    step = [microbatch(make_sample(0, completion_tokens=5), make_sample(1, completion_tokens=3), world_size=2)]
    window = MetricWindow()
    record_batch(window, step, token_budget=20)
    values = window.reduce()
    assert values["batch/pad_frac"] == pytest.approx(2 / 16)  # rows of 8 and 6 tokens
    pairs = (8 * 9 / 2, 6 * 7 / 2)  # token p of a sample sees p + 1
    assert values["batch/row_imbalance"] == pytest.approx(pairs[0] / (sum(pairs) / 2))


def test_f086_imbalance_is_of_the_attention_and_counts_idle_ranks():
    """Two tokens cost 1 + 2, one token costs 1: 3 over their mean. A rank without samples halves the mean."""
    two, one = (
        make_sample(0, prompt_tokens=1, completion_tokens=1),
        make_sample(1, prompt_tokens=1, completion_tokens=0),
    )
    for rows, expected in (((two,), (one,)), 1.5), (((two,), ()), 2.0):
        window = MetricWindow()
        record_batch(window, [MicroBatch(rows=rows, row_tokens=(2, 1), row_costs=(1.0, 1.0))], token_budget=20)
        assert window.reduce()["batch/row_imbalance"] == pytest.approx(expected)


def test_f082_f086_f087_the_reference_s_picture_of_two_rollouts_with_one_prompt():
    """p1 p2 p3 a1 a2 and p1 p2 p3 b1 b2: 10 tokens before packing, 8 forwarded, 4 trained; p3 is not shared."""
    a, b = make_sample(0), make_sample(0, rollout=1)
    a.sequence.token_ids = np.array([1, 2, 3, 4, 5], np.int32)
    b.sequence.token_ids = np.array([1, 2, 3, 6, 7], np.int32)
    window = MetricWindow()
    assert record_batch(window, [microbatch(a, b)], token_budget=16) == (8, 4)
    values = window.reduce()
    assert values["batch/packing_ratio"] == 10 / 8
    assert values["batch/masked_token_frac"] == pytest.approx(6 / 10)
    assert values["batch/row_fill_frac"] == 8 / 16
    assert values["batch/row_imbalance"] == 1.0 and values["batch/pad_frac"] == 0.0


def test_f082_f083_f084_sums_are_over_the_rows_of_all_ranks():
    """Two ranks, two micro-batches; the group of position 0 is on both ranks and in both micro-batches."""
    rows = [(make_sample(0),), (make_sample(0, rollout=1), make_sample(1)), (make_sample(0, rollout=2),), ()]
    step = [
        MicroBatch(rows=tuple(rows[:2]), row_tokens=(5, 10), row_costs=(1.0, 1.0)),
        MicroBatch(rows=tuple(rows[2:]), row_tokens=(5, 1), row_costs=(1.0, 1.0)),  # an idle rank forwards a filler
    ]
    window = MetricWindow()
    assert record_batch(window, step, token_budget=10) == (21, 8)
    values = window.reduce()
    assert values["batch/forwarded_tokens_per_step"] == 21 and values["batch/trained_tokens_per_step"] == 8
    assert values["batch/masked_token_frac"] == pytest.approx(12 / 20)
    assert (values["batch/samples_per_step"], values["batch/groups_per_step"]) == (4, 2)
    assert values["batch/microbatches_per_step"] == 2
    assert (values["batch/samples_per_row"], values["batch/row_tokens_max"]) == (1.0, 10)
    assert values["batch/row_tokens_mean"] == pytest.approx(21 / 4)
    assert values["batch/pad_frac"] == pytest.approx((5 / 20 + 4 / 10) / 2)


def test_f083_a_group_that_was_generated_again_is_another_group():
    step = [microbatch(make_sample(0), make_sample(0, generation=1), make_sample(0, epoch=1))]
    window = MetricWindow()
    record_batch(window, step, token_budget=20)
    assert window.reduce()["batch/groups_per_step"] == 3


def test_a_skipped_step_counts_its_forwarded_tokens_and_nothing_trained(step):
    window = MetricWindow()
    assert record_skipped(window, step, 0, 20, 0.0) == (19, 0)
    assert window.reduce() == {"batch/skipped_nonfinite_count": 1.0}


def test_f083_a_group_spread_over_two_rows_counts_once():
    step = [microbatch(make_sample(0, rollout=0)), microbatch(make_sample(0, rollout=1))]
    window = MetricWindow()
    record_batch(window, step, token_budget=20)
    assert window.reduce()["batch/groups_per_step"] == 1


def test_f092_rates_of_a_window_are_total_tokens_over_total_seconds():
    window = MetricWindow()
    record_performance(window, 2.0, {"fwd_bwd": 1.0, "fwd": 0.4, "optimizer": 0.1}, forwarded=100, trained=10)
    record_performance(window, 8.0, {"fwd_bwd": 3.0, "fwd": 0.6, "optimizer": 0.3}, forwarded=500, trained=20)
    values = window.reduce()
    assert values["perf/step_s"] == 5.0
    assert values["perf/fwd_bwd_forwarded_tokens_per_s"] == 600 / 4
    assert values["perf/wall_clock_forwarded_tokens_per_s"] == 600 / 10
    assert values["perf/wall_clock_trained_tokens_per_s"] == 30 / 10
    assert values["perf/optimizer_s"] == pytest.approx(0.2)
    assert values["perf/fwd_s"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sample/dropped_stale_count", "count"),
        ("rollout/vllm_retry_count", "count"),
        ("tools/counter", "mean"),
        ("tools/my_account/latency_s", "mean"),
        ("sample/staleness_max", "max"),
        ("completions/min_length", "min"),
        ("clip_ratio/high_max", "max"),
        ("sampling/importance_sampling_ratio/min", "min"),
        ("rollout/maximum", "mean"),
        ("count/share", "mean"),
    ],
)
def test_f062_the_last_part_of_a_name_decides_the_reduction(name, kind):
    assert kind_of(name) == kind


def test_f059_f060_f062_a_window_merges_steps_and_then_starts_anew():
    window = MetricWindow()
    for values in ([1.0, 2.0, 3.0], [10.0]):  # unequal numbers of items per step
        window.add_many("sample/forwarded_tokens_mean", values)
        window.add_many("sample/staleness_max", values)
        window.add_many("completions/min_length", values)
        window.add("sample/dropped_stale_count", len(values))
    assert window.reduce() == {
        "sample/forwarded_tokens_mean": 4.0,
        "sample/staleness_max": 10.0,
        "completions/min_length": 1.0,
        "sample/dropped_stale_count": 4.0,
    }
    assert window.reduce() == {}


def test_a_metric_may_not_change_its_reduction():
    window = MetricWindow()
    window.rate("perf/x_per_s", 1, 1)
    with pytest.raises(ValueError, match="perf/x_per_s"):
        window.add("perf/x_per_s", 1)


def test_f024_a_rollout_that_no_function_scored_is_in_no_mean_of_rewards():
    step = [microbatch(make_sample(0, reward=0.5), make_sample(0, reward=float("nan"), advantage=0.0, rollout=1))]
    window = MetricWindow()
    record_samples(window, step, version=0, taken_at=0.0)
    assert window.reduce()["reward_kept"] == 0.5
