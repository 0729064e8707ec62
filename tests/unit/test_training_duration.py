"""When training stops, and what a learning-rate schedule needs to know about it (F217, F218, F005)."""

from __future__ import annotations

import json
import logging
import sys
from types import SimpleNamespace

import pytest
from accelerate import ParallelismConfig

from asyncgrpo_core import AsyncGRPOConfig, AsyncGRPOTrainer
from asyncgrpo_core.errors import ConfigError


def trainer(*, max_steps, epochs=2.0, rows=10, passes_done=False):
    """What the two methods under test read of a trainer."""
    book = SimpleNamespace(passes_done=lambda num_epochs: passes_done and num_epochs == epochs)
    args = SimpleNamespace(
        max_steps=max_steps, num_train_epochs=epochs, num_generations=4, gradient_accumulation_steps=3
    )
    return SimpleNamespace(args=args, pipeline=SimpleNamespace(book=book, num_rows=rows))


def test_f217_without_max_steps_the_passes_over_the_prompts_decide():
    assert AsyncGRPOTrainer.epochs_are_done(trainer(max_steps=-1, passes_done=True))
    assert not AsyncGRPOTrainer.epochs_are_done(trainer(max_steps=-1, passes_done=False))


def test_f217_max_steps_replaces_the_stop_at_epochs():
    assert not AsyncGRPOTrainer.epochs_are_done(trainer(max_steps=5, passes_done=True))


@pytest.mark.parametrize("max_steps", [1, 7])
def test_f217_max_steps_is_the_number_of_steps(max_steps):
    one = trainer(max_steps=max_steps)
    values = AsyncGRPOTrainer.set_initial_training_values(one, one.args, None)
    assert values[1] == values[-1] == max_steps and values[2] == 3 * max_steps


def test_f217_without_max_steps_the_ceiling_is_above_what_the_epochs_can_take():
    one = trainer(max_steps=-1)
    values = AsyncGRPOTrainer.set_initial_training_values(one, one.args, None)
    # Every sample of every prompt in a step of its own, and every rollout forked into ten rows.
    assert values[-1] > 2 * 10 * 4 * 10
    assert values[0] == sys.maxsize  # transformers' own epochs never end it


DECAYING = ["linear", "cosine", "cosine_with_restarts", "polynomial", "cosine_with_min_lr", "warmup_stable_decay"]


@pytest.mark.parametrize("schedule", DECAYING)
def test_f218_a_decaying_schedule_without_max_steps_warns(schedule, tmp_path, caplog):
    AsyncGRPOConfig(output_dir=str(tmp_path), lr_scheduler_type=schedule)
    assert f"'{schedule}' decays over max_steps" in caplog.text
    caplog.clear()
    AsyncGRPOConfig(output_dir=str(tmp_path), lr_scheduler_type=schedule, max_steps=100)
    assert "decays over" not in caplog.text


@pytest.mark.parametrize("schedule", ["constant", "constant_with_warmup", "inverse_sqrt"])
def test_f218_a_schedule_that_needs_no_horizon_is_quiet(schedule, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        AsyncGRPOConfig(output_dir=str(tmp_path), lr_scheduler_type=schedule, warmup_steps=10)
    assert "max_steps" not in caplog.text


@pytest.mark.parametrize("schedule", ["constant_with_warmup", "linear"])
def test_f218_a_warmup_that_is_a_share_of_unknown_steps_is_refused(schedule, tmp_path):
    kwargs = {"output_dir": str(tmp_path), "lr_scheduler_type": schedule, "warmup_steps": 0.1}
    with pytest.raises(ConfigError, match=r"warmup_steps=0\.1 .*near zero.*Set max_steps"):
        AsyncGRPOConfig(**kwargs)
    assert AsyncGRPOConfig(**kwargs, max_steps=100).get_warmup_steps(100) == 10


@pytest.mark.parametrize("what", ["logging", "save", "eval"])
def test_f217_intervals_that_are_a_share_of_unknown_steps_are_refused(what, tmp_path):
    kwargs = {"output_dir": str(tmp_path), "eval_strategy": "steps", f"{what}_steps": 0.1}
    with pytest.raises(ConfigError, match=rf"{what}_steps=0\.1 .*never come.*Set max_steps"):
        AsyncGRPOConfig(**kwargs)
    AsyncGRPOConfig(**kwargs, max_steps=100)
    AsyncGRPOConfig(**kwargs | {f"{what}_strategy": "no"})  # then nobody reads it


@pytest.mark.parametrize("what", ["logging", "save", "eval"])
def test_f217_epochs_of_transformers_end_only_with_training_and_that_is_said(what, tmp_path, caplog):
    AsyncGRPOConfig(output_dir=str(tmp_path), max_steps=5)
    assert "epoch" not in caplog.text
    AsyncGRPOConfig(output_dir=str(tmp_path), **{f"{what}_strategy": "epoch"})
    assert f"{what}_strategy='epoch' acts once" in caplog.text and f"{what}_steps" in caplog.text


@pytest.mark.parametrize("name", ["cp_size", "sp_size"])
def test_f005_context_and_sequence_parallelism_are_refused(name, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=rf"parallelism_config\.{name}=2 .*Set {name}=1"):
        AsyncGRPOConfig(output_dir=str(tmp_path), parallelism_config=ParallelismConfig(**{name: 2}))
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv(f"PARALLELISM_CONFIG_{name.upper()}", "4")
    with pytest.raises(ConfigError, match=rf"parallelism_config\.{name}=4"):
        AsyncGRPOConfig(output_dir=str(tmp_path))


def test_f005_deepspeed_is_refused_as_an_argument_and_from_accelerates_launcher(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="DeepSpeed.*FSDP2"):
        AsyncGRPOConfig(output_dir=str(tmp_path), deepspeed={"zero_optimization": {"stage": 2}})
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ConfigError, match="DeepSpeed.*FSDP2"):
        AsyncGRPOConfig(output_dir=str(tmp_path))
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "false")
    AsyncGRPOConfig(output_dir=str(tmp_path))


@pytest.mark.parametrize("as_file", [False, True])
def test_f005_fsdp1_is_refused_before_a_device_is_looked_for(as_file, tmp_path):
    for version in (2, 1):
        config = {"version": version}
        if as_file:
            (tmp_path / "fsdp.json").write_text(json.dumps(config))
            config = str(tmp_path / "fsdp.json")
        kwargs = {"output_dir": str(tmp_path), "fsdp": True, "fsdp_config": config}
        if version == 2:
            assert AsyncGRPOConfig(**kwargs).fsdp_plugin_args["fsdp_version"] == 2
            continue
        with pytest.raises(ConfigError, match="FSDP1 .*'version': 2"):
            AsyncGRPOConfig(**kwargs)


def test_f209_a_negative_router_coefficient_is_out_of_range(tmp_path):
    with pytest.raises(ConfigError, match="router_aux_loss_coef"):
        AsyncGRPOConfig(output_dir=str(tmp_path), router_aux_loss_coef=-0.1)
