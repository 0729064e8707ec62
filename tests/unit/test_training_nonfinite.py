"""A step whose loss or gradient is not finite is skipped whole, its rows are kept, a series ends the run."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from asyncgrpo_core.errors import NonFiniteError
from asyncgrpo_core.training.loss import async_grpo_loss
from asyncgrpo_core.training.nonfinite import NonFiniteGuard, load_bad_rows
from tests.ranks.rank_parts import PER_STEP, make_trainer, parameters_of
from tests.tiny_model import write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("nonfinite") / "model")


def run(model: Path, out: Path, *, poison=None, keep=None, callbacks=None, **settings: Any):
    """A trainer that went through its steps; `poison(steps)` changes them before, `keep` leaves some out."""
    trainer = make_trainer(model, out, callbacks=callbacks, **settings)
    if keep is not None:
        trainer.pipeline.steps = [trainer.pipeline.steps[i] for i in keep]
    if poison is not None:
        poison(trainer.pipeline.steps)
    trainer.train()
    return trainer


def trained_samples(step, microbatch):
    return [sample for sample in step[microbatch].rows[0] if sample.sequence.num_trained]


def nan_advantage(number, microbatch=1):
    def poison(steps):
        trained_samples(steps[number], microbatch)[0].advantage = float("nan")

    return poison


def nan_top_logprobs(number):
    def poison(steps):
        trained_samples(steps[number], 0)[1].sequence.top.logprobs[0, 2] = float("nan")

    return poison


def logs_of(trainer):
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def same_weights(a, b):
    theirs = parameters_of(b)
    return all(torch.equal(value, theirs[name]) for name, value in parameters_of(a).items())


def same_moments(a, b):
    """Adam's moments and step counts."""
    x, y = (t.optimizer.state_dict()["state"] for t in (a, b))
    return x.keys() == y.keys() and all(torch.equal(x[p][name], y[p][name]) for p in x for name in x[p])


@pytest.mark.parametrize(
    ("poison", "bad", "optim"),
    [
        (nan_advantage(0, microbatch=0), 0, "adamw_torch_fused"),
        (nan_top_logprobs(1), 1, "adamw_torch"),
    ],
)
def test_a_skipped_step_leaves_weights_and_optimizer_as_if_it_had_not_been(model, tmp_path, poison, bad, optim):
    """One bad micro-batch of two. The run without that step ends with the same bits, weight decay included."""
    got = run(model, tmp_path / "a", poison=poison, optim=optim)
    others = [i for i in range(3) if i != bad]
    expected = run(model, tmp_path / "b", keep=others, max_steps=2, optim=optim)
    assert same_weights(got, expected) and same_moments(got, expected)
    assert got.pipeline.skipped == [bad + 1] and got.pipeline.finished == [i + 1 for i in others]
    assert len(got.pipeline.sent) == 1 + 2  # nothing is sent for a step that changed nothing
    assert got.state.global_step == 3


def test_a_skipped_step_is_counted_and_in_no_mean(model, tmp_path):
    got = run(model, tmp_path / "a", poison=nan_advantage(1))
    logs = logs_of(got)
    assert ["batch/skipped_nonfinite_count" in entry for entry in logs] == [False, True, False]
    assert "entropy" not in logs[1] and "batch/trained_tokens_per_step" not in logs[1] and "reward_kept" not in logs[1]
    assert logs[1]["perf/fwd_bwd_s"] > 0 and logs[1]["perf/wall_clock_trained_tokens_per_s"] == 0
    numbers = [v for entry in logs for name, v in entry.items() if name != "grad_norm"]
    assert all(abs(value) < float("inf") for value in numbers)
    steps = got.pipeline.steps
    assert got.pipeline.counters.num_tokens == sum(m.num_tokens for step in steps for m in step)
    assert got.pipeline.counters.trained_tokens == sum(m.num_trained for step in (steps[0], steps[2]) for m in step)
    logged_once = run(model, tmp_path / "b", poison=nan_advantage(1), logging_steps=3)
    (entry,) = logs_of(logged_once)
    assert entry["batch/skipped_nonfinite_count"] == 1
    assert entry["entropy"] == pytest.approx(
        sum(logs[i]["entropy"] * logs[i]["batch/trained_tokens_per_step"] for i in (0, 2))
        / sum(logs[i]["batch/trained_tokens_per_step"] for i in (0, 2))
    )


def test_the_schedule_counts_the_steps_of_the_run(model, tmp_path):
    got = run(model, tmp_path, poison=nan_advantage(1), lr_scheduler_type="linear")
    assert [entry["learning_rate"] for entry in logs_of(got)] == pytest.approx([1e-2, 2e-2 / 3, 1e-2 / 3])


class InfiniteGradient(TrainerCallback):
    """A gradient that overflows in the second step, while the loss is finite."""

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        weight = model.get_output_embeddings().weight
        if state.global_step == 1:
            self.handle = weight.register_hook(lambda grad: grad * float("inf"))
        elif state.global_step == 2:
            self.handle.remove()


def test_a_gradient_that_overflows_skips_the_step_and_saves_all_its_rows(model, tmp_path):
    got = run(model, tmp_path / "a", callbacks=[InfiniteGradient()])
    expected = run(model, tmp_path / "b", keep=[0, 2], max_steps=2)
    assert got.pipeline.skipped == [2]
    assert same_weights(got, expected) and same_moments(got, expected)
    about = json.loads((tmp_path / "a" / "bad_rows" / "step-2.json").read_text())
    assert about["cause"] == "gradient" and about["grad_norm"] == "nan"
    assert len(load_bad_rows(tmp_path / "a" / "bad_rows" / "step-2-rank-0.safetensors")) == PER_STEP


def test_the_saved_rows_give_the_loss_again(model, tmp_path):
    """Only the offending micro-batch is there; its loss is that of the file, and the JSON names the culprit."""
    got = run(model, tmp_path, poison=nan_advantage(0, microbatch=1))
    folder = tmp_path / "bad_rows"
    assert sorted(path.name for path in folder.iterdir()) == ["step-1-rank-0.safetensors", "step-1.json"]
    (row,) = load_bad_rows(folder / "step-1-rank-0.safetensors")
    fresh = make_trainer(model, tmp_path / "fresh")
    output = fresh.model(**row, temperature=1.0)
    torch.testing.assert_close(output.logprobs.float(), row["policy_logprobs"])
    loss, _ = async_grpo_loss(output, row, fresh.loss_settings, fresh.loss_settings.normalizer(row))
    assert loss.isnan() and row["loss"].isnan()
    row["advantages"] = torch.nan_to_num(row["advantages"], nan=0.5)
    loss, _ = async_grpo_loss(output, row, fresh.loss_settings, fresh.loss_settings.normalizer(row))
    assert loss.isfinite()

    about = json.loads((folder / "step-1.json").read_text())
    assert about["cause"] == "loss"
    samples = got.pipeline.steps[0][1].rows[0]
    assert [entry["sample_id"] for entry in about["samples"]] == [sample.sample_id for sample in samples]
    culprit = [entry for entry in about["samples"] if entry["advantage"] != entry["advantage"]]
    assert len(culprit) == 1 and culprit[0]["microbatch"] == 1 and culprit[0]["slot"]["epoch"] == 0
    assert got.processing_class.decode(samples[0].sequence.token_ids.tolist()) == about["samples"][0]["text"]


class PoisonWeights(TrainerCallback):
    """From the second step on a weight is not a number: every later forward is spoiled."""

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == 1:
            model.get_decoder().layers[1].mlp.up_proj.weight.data[3, 5] = float("nan")


def test_too_many_in_a_row_end_the_run_and_say_where_to_look(model, tmp_path):
    with pytest.raises(NonFiniteError) as caught:
        run(model, tmp_path, callbacks=[PoisonWeights()], max_nonfinite_steps=2)
    text = str(caught.value)
    assert "2 steps in a row (the last is step 3)" in text and "after step 1" in text
    assert str(tmp_path / "bad_rows") in text and "layers.1.mlp.up_proj.weight" in text and "checkpoint" in text
    assert caught.value.exit_code == 1
    assert str(pickle.loads(pickle.dumps(caught.value))) == text


def test_what_was_wrong_with_the_rows_is_said(model, tmp_path):
    with pytest.raises(NonFiniteError, match=r"advantages of micro-batch 1: \d+ of \d+ are not.*reward function"):
        run(model, tmp_path, poison=nan_advantage(0), max_nonfinite_steps=1)


def test_a_good_step_ends_a_series(model, tmp_path):
    def poison(steps):
        nan_advantage(0)(steps)
        nan_advantage(2)(steps)

    got = run(model, tmp_path, poison=poison, max_nonfinite_steps=2)
    assert got.pipeline.skipped == [1, 3]


def guard_after(tmp_path, *, losses, norm, loss_scale=None, max_in_a_row=1):
    guard = NonFiniteGuard(tmp_path, max_in_a_row)
    guard.begin([{"advantages": torch.ones(1)} for _ in losses])
    for loss in losses:
        guard.saw_loss(torch.tensor(loss, dtype=torch.float64), torch.zeros(1))
    guard.saw_gradient(norm)
    return guard, guard.decide(loss_scale)


@pytest.mark.parametrize(
    ("losses", "norm", "skip"),
    [
        ([0.5, -1.0], 2.0, False),
        ([0.5, float("inf")], 2.0, True),
        ([float("nan"), 0.0], None, True),
        ([0.5, 1.0], float("inf"), True),
        ([0.5, 1.0], torch.tensor(float("nan")), True),
        ([1e300], 1e-300, False),
    ],
)
def test_one_bad_number_decides(tmp_path, losses, norm, skip):
    assert guard_after(tmp_path, losses=losses, norm=norm)[1] == skip


def test_an_overflow_at_a_large_fp16_scale_is_how_the_scaler_finds_its_scale(tmp_path):
    guard, skip = guard_after(tmp_path, losses=[0.5], norm=float("inf"), loss_scale=65536.0)
    guard.save(1)
    guard.check(1)
    assert skip and guard.in_a_row == 0 and list(tmp_path.iterdir()) == []
    guard, _ = guard_after(tmp_path, losses=[0.5], norm=float("inf"), loss_scale=1.0)
    with pytest.raises(NonFiniteError):
        guard.check(1)


def test_the_disk_is_not_filled(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("asyncgrpo_core.training.nonfinite._MOST_STEPS_SAVED", 2)
    guard = NonFiniteGuard(tmp_path, 100)
    for number in range(4):
        guard.begin([{"advantages": torch.ones(1)}])
        guard.saw_loss(torch.tensor(float("nan")), torch.zeros(1))
        guard.decide()
        guard.save(number)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-0-rank-0.safetensors",
        "step-1-rank-0.safetensors",
    ]
    assert caplog.text.count("are not saved") == 2
