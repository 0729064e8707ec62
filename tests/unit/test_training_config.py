"""AsyncGRPOConfig against the reference's field list (F202 to F212, F165, F134, F006)."""

from __future__ import annotations

import dataclasses
import logging
import pickle

import pytest
from transformers import TrainingArguments

from asyncgrpo_core import AsyncGRPOConfig
from asyncgrpo_core.errors import ConfigError

# The reference's own fields and defaults, written down from its config page.
OWN = {
    "model_init_kwargs": None,
    "dtype": "float32",
    "trust_remote_code": False,
    "router_aux_loss_coef": None,
    "num_generations": 8,
    "max_completion_length": 2048,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": None,
    "chat_template_kwargs": None,
    "max_tool_calling_iterations": None,
    "vllm_server_base_url": "http://localhost:8000",
    "vllm_server_timeout": 1800.0,
    "epsilon": 0.2,
    "epsilon_high": None,
    "score_centering": True,
    "vllm_importance_sampling_clip_min": 0.5,
    "vllm_importance_sampling_clip_max": 5.0,
    "num_sampler_logprobs": 8,
    "token_budget": None,
    "max_concurrent_rollouts": 512,
    "max_staleness": 4,
    "weight_sync_steps": 1,
    "rollout_worker_timeout": 300.0,
    "log_completions": False,
    "num_completions_to_print": None,
}
# Defaults that differ from TrainingArguments (report_to differs in older transformers only).
CHANGED = {
    "logging_steps": 1,
    "gradient_checkpointing": True,
    "bf16": None,
    "learning_rate": 1e-6,
    "lr_scheduler_type": "constant",
    "ignore_data_skip": True,
    "remove_unused_columns": False,
    "report_to": "none",
}
# Values of inherited fields that the reference prints and that a change of transformers could move.
INHERITED = {
    "per_device_train_batch_size": 8,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "warmup_steps": 0,
    "optim": "adamw_torch_fused",
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "gradient_accumulation_steps": 1,
    "average_tokens_across_devices": True,
    "max_grad_norm": 1.0,
    "fp16": False,
    "use_liger_kernel": False,
    "use_cache": False,
    "logging_strategy": "steps",
    "eval_strategy": "no",
    "save_strategy": "steps",
    "save_steps": 500,
    "save_total_limit": None,
    "save_only_model": False,
    "push_to_hub": False,
    "seed": 42,
    "use_cpu": False,
    "dataloader_num_workers": 0,
    "train_sampling_strategy": "random",
    "ddp_timeout": 1800,
    "skip_memory_metrics": True,
}


def _fields(cls):
    out = {}
    for f in dataclasses.fields(cls):
        out[f.name] = f.default if f.default is not dataclasses.MISSING else f.default_factory
    return out


@pytest.mark.parametrize("name", sorted(OWN | CHANGED | INHERITED))
def test_f202_f203_f206_f210_f211_f212_default_of_every_documented_field(name):
    expected = (OWN | CHANGED | INHERITED)[name]
    assert _fields(AsyncGRPOConfig)[name] == expected


def test_f202_every_other_field_is_that_of_training_arguments():
    ours, theirs = _fields(AsyncGRPOConfig), _fields(TrainingArguments)
    for name, default in theirs.items():
        if name not in CHANGED:
            assert ours[name] == default, name


def test_f202_the_reference_has_139_fields_and_all_are_here():
    beyond = {
        *("score_centering_tail", "weight_sync_backend", "verify_sync_every", "kv_after_sync", "regenerate_dropped"),
        *("tool_timeout", "tool_failure_limit", "tool_failure_window", "max_tool_result_chars", "long_conversation"),
        *("turn_prompts", "reward_timeout", "loss_type", "importance_ratio_cap"),
        *("loss_normalization", "advantage_std", "synchronous", "max_nonfinite_steps"),
        *("attention_backend", "trunk_kernels"),
    }
    ours = set(_fields(AsyncGRPOConfig))
    assert beyond <= ours
    assert set(OWN) | set(_fields(TrainingArguments)) == ours - beyond
    assert len(ours - beyond) >= 139  # transformers may add fields of its own


def test_f204_without_an_accelerator_precision_and_checkpointing_resolve_and_say_so(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("torch.accelerator.is_available", lambda *a, **k: False)
    with caplog.at_level(logging.INFO, logger="asyncgrpo_core.training.config"):
        config = AsyncGRPOConfig(output_dir=str(tmp_path))
    assert (config.use_cpu, config.bf16, config.gradient_checkpointing) == (True, False, False)
    assert "gradient_checkpointing=False" in caplog.text and "use_cpu=True" in caplog.text


def test_f204_what_the_user_passed_is_kept(tmp_path):
    config = AsyncGRPOConfig(output_dir=str(tmp_path), gradient_checkpointing=True, bf16=True, use_cpu=True)
    assert config.gradient_checkpointing and config.bf16


def test_f204_with_an_accelerator_bf16_is_on_unless_fp16(monkeypatch):
    monkeypatch.setattr("torch.accelerator.is_available", lambda *a, **k: True)
    seen = {}
    monkeypatch.setattr(TrainingArguments, "__post_init__", lambda self: seen.update(bf16=self.bf16, cpu=self.use_cpu))
    AsyncGRPOConfig(output_dir="x")
    assert seen == {"bf16": True, "cpu": False}
    AsyncGRPOConfig(output_dir="x", fp16=True)
    assert seen == {"bf16": False, "cpu": False}


def test_a_dataclass_subclass_with_its_own_field_still_knows_what_was_passed(tmp_path):
    @dataclasses.dataclass
    class Curriculum(AsyncGRPOConfig):
        pass_rate_cap: float = 0.9

    config = Curriculum(output_dir=str(tmp_path), gradient_checkpointing=True, pass_rate_cap=0.5)
    assert config.gradient_checkpointing and config.pass_rate_cap == 0.5


def test_config_survives_pickling(tmp_path):
    config = AsyncGRPOConfig(output_dir=str(tmp_path), num_generations=4)
    copy = pickle.loads(pickle.dumps(config))
    assert copy.num_generations == 4 and copy.to_dict() == config.to_dict()


def test_f165_f205_ignore_data_skip_is_always_true(tmp_path, caplog):
    config = AsyncGRPOConfig(output_dir=str(tmp_path), ignore_data_skip=False)
    assert config.ignore_data_skip is True
    assert "ignore_data_skip" in caplog.text


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({"remove_unused_columns": True}, "remove_unused_columns"),
        ({"num_generations": 1}, "num_generations=1"),
        ({"use_liger_kernel": True}, "use_liger_kernel"),
        ({"neftune_noise_alpha": 5.0}, r"neftune_noise_alpha=5\.0.*importance ratio"),
        ({"train_sampling_strategy": "group_by_length"}, "one by one"),
        ({"label_smoothing_factor": 0.1}, r"label_smoothing_factor=0\.1"),
        ({"deepspeed": "ds.json"}, "DeepSpeed"),
        ({"top_p": 0.9}, "top_k"),
        ({"min_p": 0.1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"temperature": 0.0}, "temperature"),
        ({"dtype": "int8"}, "int8"),
        ({"score_centering_tail": "tail"}, "score_centering_tail"),
        ({"attention_backend": "fast"}, "attention_backend"),
        ({"trunk_kernels": "liger"}, "trunk_kernels"),
        ({"loss_type": "ppo"}, "loss_type"),
        ({"loss_type": "tis"}, "score_centering=False"),
        ({"importance_ratio_cap": 0.0}, "importance_ratio_cap"),
        ({"vllm_importance_sampling_clip_min": 6.0}, "clip_min"),
        ({"max_staleness": -1}, "max_staleness"),
        ({"weight_sync_steps": 0}, "weight_sync_steps"),
        ({"token_budget": 0}, "token_budget"),
        ({"weight_sync_backend": "tcp"}, "weight_sync_backend"),
        ({"kv_after_sync": "drop"}, "kv_after_sync"),
        ({"max_completion_length": 0}, "max_completion_length"),
        ({"num_sampler_logprobs": 0}, "num_sampler_logprobs"),
    ],
)
def test_f006_f134_f205_contradictions_are_refused_by_name(kwargs, named):
    with pytest.raises(ConfigError, match=named):
        AsyncGRPOConfig(output_dir="x", **kwargs)


def test_json_strings_are_parsed_for_dict_fields(tmp_path):
    config = AsyncGRPOConfig(output_dir=str(tmp_path), chat_template_kwargs='{"enable_thinking": false}')
    assert config.chat_template_kwargs == {"enable_thinking": False}
