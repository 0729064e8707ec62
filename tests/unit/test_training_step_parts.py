"""One step of the trainer itself: its loss is the formula's (F013), its seconds are those of its parts (F089, F090)."""

from __future__ import annotations

import gc
import math
import time

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, TrainerCallback

from tests.ranks.rank_parts import NUM_STEPS, PER_STEP, make_trainer
from tests.tiny_model import write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("steps") / "model")


def logs_of(trainer):
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def clipped_surrogate_of(policy, microbatch, temperature):
    """The reference's formula, token by token: no term but the masked, clipped ratio. There is no reference policy."""
    total, count = 0.0, 0
    for sample in microbatch.samples:
        ids = torch.tensor(sample.sequence.token_ids, dtype=torch.int64)
        with torch.no_grad():
            logp = (policy(ids[None]).logits[0] / temperature).log_softmax(-1)
        for t in range(len(ids)):
            if not sample.sequence.loss_mask[t]:
                continue
            ratio = math.exp(float(logp[t - 1, ids[t]]) - float(sample.sequence.sampler_logprobs[t]))
            clipped = min(max(ratio, 0.8), 1.2)
            if 0.5 <= ratio <= 5.0:
                total -= min(ratio * sample.advantage, clipped * sample.advantage)
            count += 1
    return total / count


def models_in_memory():
    gc.collect()
    models = [thing for thing in gc.get_objects() if issubclass(type(thing), PreTrainedModel)]
    return sum(hasattr(model, "lm_head") for model in models)


@pytest.mark.parametrize("temperature", [1.0, 0.7])  # the sampler's log-probabilities are of the tempered policy
def test_f013_the_loss_is_the_policys_alone_and_one_model_is_in_memory(model, tmp_path, temperature):
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, attn_implementation="eager").eval()
    before = models_in_memory()
    settings = {"learning_rate": 0.0, "weight_decay": 0.0, "score_centering": False, "temperature": temperature}
    trainer = make_trainer(model, tmp_path, **settings)
    trainer.train()
    assert models_in_memory() - before == 1
    for step, entry in zip(trainer.pipeline.steps, logs_of(trainer), strict=True):
        expected = sum(clipped_surrogate_of(policy, microbatch, temperature) for microbatch in step) / PER_STEP
        assert entry["loss"] == pytest.approx(expected, rel=1e-5)
        assert not any("kl" in name for name in entry)


class SlowParts(TrainerCallback):
    """Pauses in the forward (20 ms), the backward (30 ms) and beside the optimizer (60 ms)."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        model.get_decoder().norm.register_forward_pre_hook(lambda *_: time.sleep(0.02))
        model.get_decoder().norm.register_full_backward_hook(lambda *_: time.sleep(0.03))

    def on_optimizer_step(self, args, state, control, **kwargs):
        time.sleep(0.06)


def test_f089_f090_f092_every_phase_of_a_step_has_its_seconds(model, tmp_path):
    """Two micro-batches per step; 50 ms until the rows are there, 80 ms for a sync."""
    trainer = make_trainer(model, tmp_path, callbacks=[SlowParts()])
    trainer.pipeline.on_plan = lambda number: time.sleep(0.05)
    trainer.pipeline.on_sync = lambda number, link: time.sleep(0.08)
    trainer.train()
    logs = logs_of(trainer)
    assert len(logs) == NUM_STEPS
    for entry in logs:
        assert 0.04 <= entry["perf/fwd_s"] < entry["perf/fwd_bwd_s"]
        assert entry["perf/fwd_bwd_s"] >= 0.1
        assert entry["perf/optimizer_s"] >= 0.06
        parts = entry["perf/fwd_bwd_s"] + entry["perf/optimizer_s"]
        assert entry["perf/step_s"] >= parts + 0.05 + 0.08 - 1e-3
        tokens, trained = (entry[f"batch/{kind}_tokens_per_step"] for kind in ("forwarded", "trained"))
        assert entry["perf/fwd_bwd_forwarded_tokens_per_s"] == pytest.approx(tokens / entry["perf/fwd_bwd_s"])
        assert entry["perf/wall_clock_forwarded_tokens_per_s"] == pytest.approx(tokens / entry["perf/step_s"])
        assert entry["perf/wall_clock_trained_tokens_per_s"] == pytest.approx(trained / entry["perf/step_s"])


def test_f080_samples_age_until_their_step_begins_and_under_the_version_that_trains_them(model, tmp_path):
    """Queued 100 s before their step is planned; forward, backward, optimizer and sync (0.2 s) are no waiting."""
    trainer = make_trainer(model, tmp_path, callbacks=[SlowParts()])
    pipeline = trainer.pipeline

    def plan(number):
        for age, microbatch in enumerate(pipeline.steps[number]):
            for sample in microbatch.samples:
                sample.queued_at, sample.model_version = time.time() - 100.0, number - age

    def sync(number, link):
        pipeline.policy_version = number  # that of the start is 0, that after step n is n
        time.sleep(0.08)

    pipeline.on_plan, pipeline.on_sync = plan, sync
    trainer.train()
    for entry in logs_of(trainer):
        assert 100.0 <= entry["sample/time_in_queue_s"] < 100.15
        assert (entry["sample/staleness_mean"], entry["sample/staleness_max"]) == (0.5, 1)


def test_f093_no_utilization_is_logged_on_a_cpu(model, tmp_path):
    trainer = make_trainer(model, tmp_path, max_steps=1)
    trainer.train()
    assert not any("mfu" in name for entry in logs_of(trainer) for name in entry)


def test_f093_with_a_declared_peak_both_are_logged_every_step(model, tmp_path):
    trainer = make_trainer(model, tmp_path)
    trainer.mfu.peak = 1e9
    trainer.train()
    for step, entry in zip(trainer.pipeline.steps, logs_of(trainer), strict=True):
        done = sum(trainer.mfu.flops.of_row(row) for microbatch in step for row in microbatch.rows)
        assert entry["perf/fwd_bwd_mfu"] == pytest.approx(done / entry["perf/fwd_bwd_s"] / 1e9)
        assert entry["perf/wall_clock_mfu"] == pytest.approx(done / entry["perf/step_s"] / 1e9)


def test_f054_f056_f057_metrics_of_a_step_weigh_every_trained_token_of_its_micro_batches_the_same(model, tmp_path):
    """Entropy over both micro-batches against a dense softmax; the ratio's extremes over all tokens."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, attn_implementation="eager").eval()
    trainer = make_trainer(model, tmp_path, learning_rate=0.0, weight_decay=0.0)
    trainer.train()
    for step, entry in zip(trainer.pipeline.steps, logs_of(trainer), strict=True):
        entropies, ratios, low_shares = [], [], []
        for sample in (sample for microbatch in step for sample in microbatch.samples):
            sequence = sample.sequence
            at = torch.tensor(sequence.loss_mask.nonzero()[0])
            if not len(at):
                continue
            ids = torch.tensor(sequence.token_ids, dtype=torch.int64)
            with torch.no_grad():
                logp = policy(ids[None]).logits[0].log_softmax(-1)
            entropies += (-(logp.exp() * logp).sum(-1)[at - 1]).tolist()
            own = (logp[at - 1, ids[at]] - torch.tensor(sequence.sampler_logprobs)[at]).exp()
            ratios += own.tolist()
            low_shares.append(float((own < 0.8).float().mean()) if sample.advantage < 0 else 0.0)
        assert entry["entropy"] == pytest.approx(sum(entropies) / len(entropies), rel=1e-5)
        assert entry["sampling/importance_sampling_ratio/min"] == pytest.approx(min(ratios), rel=1e-4)
        assert entry["sampling/importance_sampling_ratio/mean"] == pytest.approx(sum(ratios) / len(ratios), rel=1e-4)
        assert entry["sampling/importance_sampling_ratio/max"] == pytest.approx(max(ratios), rel=1e-4)
        assert entry["clip_ratio/low_min"] == pytest.approx(min(low_shares), abs=1e-6)
        assert "aux_loss" not in entry  # a dense model
