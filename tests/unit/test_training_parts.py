"""What the trainer's constructor makes of its arguments."""

from __future__ import annotations

import logging

import peft
import pytest
import torch
from safetensors import safe_open

from asyncgrpo_core.errors import ConfigError
from asyncgrpo_core.quickstart import POLICY_DIR
from asyncgrpo_core.training.config import AsyncGRPOConfig
from asyncgrpo_core.training.trainer_parts import keep_to_one_gpu, load_parts, training_dtype
from tests.ranks.rank_parts import make_trainer
from tests.tiny_model import write_model


@pytest.mark.parametrize("visible", [1, 4])
def test_several_visible_gpus_are_not_made_copies_of_the_policy(tmp_path, caplog, visible):
    """transformers wraps a model in DataParallel where it sees several GPUs; a packed row cannot be split over them."""
    args = AsyncGRPOConfig(output_dir=str(tmp_path), use_cpu=True)
    assert args.n_gpu <= 1
    args._n_gpu = visible
    with caplog.at_level(logging.WARNING):
        keep_to_one_gpu(args)
    assert args.n_gpu == 1
    assert ("CUDA_VISIBLE_DEVICES" in caplog.text) == (visible > 1)


def test_the_configs_seed_decides_how_an_adapter_begins(tmp_path):
    """Whatever the process drew before: the ranks of a run and a run that is repeated begin alike."""

    def beginning(seed: int, drawn_before: int) -> list[torch.Tensor]:
        torch.manual_seed(drawn_before)
        args = AsyncGRPOConfig(output_dir=str(tmp_path), use_cpu=True, seed=seed)
        policy, _ = load_parts(str(POLICY_DIR), args, None, peft.LoraConfig(r=2, target_modules="all-linear"))
        return [value.detach() for name, value in policy.named_parameters() if "lora_A" in name]

    first = beginning(3, drawn_before=1)
    assert len(first) > 10 and all(map(torch.equal, first, beginning(3, drawn_before=2)))
    assert not any(map(torch.equal, first, beginning(4, drawn_before=1)))


@pytest.mark.parametrize("backend", ["varlen", "flex", "hub"])
def test_a_back_end_that_does_not_fit_is_refused_when_the_policy_is_loaded(tmp_path, backend):
    """Before a server is waited for, not at the first row."""
    args = AsyncGRPOConfig(output_dir=str(tmp_path), use_cpu=True, attention_backend=backend)
    with pytest.raises(ConfigError, match=f"attention_backend='{backend}'"):
        load_parts(str(POLICY_DIR), args, None, None)


@pytest.mark.parametrize(("fields", "dtype"), [({}, torch.float32), ({"bf16": True}, torch.bfloat16)])
def test_layers_compute_in_autocasts_dtype_where_it_is_on(tmp_path, fields, dtype):
    args = AsyncGRPOConfig(output_dir=str(tmp_path), use_cpu=True, **fields)
    assert training_dtype(torch.nn.Linear(2, 2), args) == dtype


def test_f208_without_fsdp_nothing_is_upcast(tmp_path):
    """bf16 weights under bf16=True are trained, kept in the optimizer and saved in bf16."""
    settings = {"weights": torch.bfloat16, "bf16": True, "max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer = make_trainer(write_model(tmp_path / "model"), tmp_path / "run", **settings)
    trainer.train()
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.bfloat16}
    moments = [value for state in trainer.optimizer.state_dict()["state"].values() for value in state.values()]
    assert {moment.dtype for moment in moments if moment.ndim} == {torch.bfloat16}
    with safe_open(tmp_path / "run" / "checkpoint-1" / "model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118
