"""The trainer's metrics of one finished step (reference, sample / batch / performance metrics)."""

from __future__ import annotations

import math
from collections import defaultdict

from asyncgrpo_core.metrics import MetricWindow
from asyncgrpo_core.rollout.group_metrics import GENERATED_SAMPLE_TOKENS
from asyncgrpo_core.training.mfu import segments_of, visible_pairs
from asyncgrpo_core.training.source import Step


def record_samples(window: MetricWindow, step: Step, version: int, taken_at: float) -> None:
    """`sample/*`, `reward_kept`, `reward_group_std` and `rewards/{func}/group_std`, one item per sample.

    Args:
        version: policy version that trained them (before this step's own sync).
        taken_at: when they left the queue to be trained, wall-clock seconds as in `TrainingSample.queued_at`.
    """
    for sample in (s for microbatch in step for s in microbatch.samples):
        staleness = version - sample.model_version
        window.add("sample/forwarded_tokens_mean", sample.sequence.num_tokens)
        window.add("sample/forwarded_tokens_max", sample.sequence.num_tokens)
        window.add("sample/trained_tokens_mean", sample.sequence.num_trained)
        window.add("sample/time_in_queue_s", taken_at - sample.queued_at)
        window.add("sample/staleness_mean", staleness)
        window.add("sample/staleness_max", staleness)
        if not math.isnan(sample.reward):  # no function scored its rollout: advantage 0, in no mean
            window.add("reward_kept", sample.reward)
        window.add("reward_group_std", sample.group_reward_std)
        for name, std in sample.func_group_stds.items():
            window.add(f"rewards/{name}/group_std", std)


def add_length_bias(values: dict[str, float]) -> None:
    """Add `sample/length_bias` to a window's values: trained tokens per sample that was trained / that was generated.

    1.0 means that dropping (stale, failed, equal rewards) does not select by length; below 1, long rollouts are thinned
    out. Both means cover the same window, so with a deep queue the trained one is of somewhat older samples. Beyond
    the reference.
    """
    trained, generated = values.get("sample/trained_tokens_mean"), values.get(GENERATED_SAMPLE_TOKENS)
    if trained is not None and generated:
        values["sample/length_bias"] = trained / generated


def record_batch(window: MetricWindow, step: Step, token_budget: int) -> tuple[int, int]:
    """`batch/*` of one step.

    Returns:
        (forwarded tokens, trained tokens) of the step.
    """
    samples = [s for microbatch in step for s in microbatch.samples]
    total = sum(microbatch.num_tokens for microbatch in step)
    trained = sum(microbatch.num_trained for microbatch in step)
    window.add("batch/forwarded_tokens_per_step", total)
    window.add("batch/trained_tokens_per_step", trained)
    window.add("batch/samples_per_step", len(samples))
    window.add("batch/groups_per_step", len({(s.slot.epoch, s.slot.row, s.generation) for s in samples}))
    window.add("batch/microbatches_per_step", len(step))
    before_packing = sum(s.sequence.num_tokens for s in samples)
    # Of the samples' tokens, not of the row's: there a position that many samples train would count many times.
    window.add("batch/masked_token_frac", 1 - trained / before_packing)
    window.add("batch/packing_ratio", before_packing / total)
    for microbatch in step:
        counts = microbatch.row_tokens
        costs = [visible_pairs(segments_of(row)) for row in microbatch.rows]  # of attention, not of the whole row
        for row, tokens in zip(microbatch.rows, counts, strict=True):
            window.add("batch/samples_per_row", len(row))
            window.add("batch/row_tokens_mean", tokens)
            window.add("batch/row_tokens_max", tokens)
            window.add("batch/row_fill_frac", tokens / token_budget)
        window.add("batch/row_imbalance", max(costs) * len(costs) / sum(costs))
        window.add("batch/pad_frac", 1 - sum(counts) / (max(counts) * len(counts)))
    return total, trained


def record_trained(
    window: MetricWindow, step: Step, version: int, token_budget: int, taken_at: float
) -> tuple[int, int]:
    """`sample/*` and `batch/*` of one step; returns its forwarded and its trained tokens."""
    record_samples(window, step, version, taken_at)
    return record_batch(window, step, token_budget)


def record_skipped(
    window: MetricWindow, step: Step, version: int, token_budget: int, taken_at: float
) -> tuple[int, int]:
    """As `record_trained` for a step that was not finite: it is counted and in no mean (beyond the reference)."""
    window.add("batch/skipped_nonfinite_count", 1)
    return sum(microbatch.num_tokens for microbatch in step), 0


def record_performance(
    window: MetricWindow, wall_s: float, parts: dict[str, float], forwarded: int, trained: int
) -> None:
    """`perf/*` of one step: seconds of its parts, and rates as (tokens, seconds) so that a window adds up right."""
    window.add("perf/step_s", wall_s)
    seconds: dict[str, float] = defaultdict(float, parts)
    for name in ("fwd_bwd", "fwd", "optimizer"):
        window.add(f"perf/{name}_s", seconds[name])
    window.rate("perf/fwd_bwd_forwarded_tokens_per_s", forwarded, seconds["fwd_bwd"])
    window.rate("perf/wall_clock_forwarded_tokens_per_s", forwarded, wall_s)
    window.rate("perf/wall_clock_trained_tokens_per_s", trained, wall_s)
