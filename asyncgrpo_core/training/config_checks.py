"""What `AsyncGRPOConfig` refuses: values out of range, and values that contradict each other."""

from __future__ import annotations

import logging
import math
import os
from typing import TYPE_CHECKING, Any

from asyncgrpo_core.errors import ConfigError
from asyncgrpo_core.models.attention import BACKENDS
from asyncgrpo_core.models.trunk import TRUNK_KERNELS
from asyncgrpo_core.training.offpolicy import LOSS_TYPES, REFERENCE_LOSS

if TYPE_CHECKING:
    from asyncgrpo_core.training.config import AsyncGRPOConfig

logger = logging.getLogger(__name__)

# transformers' schedules that do not look at the number of steps of the whole run.
_SCHEDULES_WITHOUT_HORIZON = ("constant_with_warmup", "inverse_sqrt", "reduce_lr_on_plateau", "greedy")


def check_training(config: AsyncGRPOConfig) -> None:
    if config.remove_unused_columns:
        raise ConfigError(
            "remove_unused_columns=True would take away the dataset columns that reward functions need.",
            "Leave it at False.",
        )
    if config.use_liger_kernel:
        raise ConfigError("use_liger_kernel=True is not supported.", "Leave it at False.")
    if config.neftune_noise_alpha or config.label_smoothing_factor:
        raise ConfigError(
            f"neftune_noise_alpha={config.neftune_noise_alpha!r}, label_smoothing_factor="
            f"{config.label_smoothing_factor!r}: noise in the forward would bias every importance ratio, and the loss "
            "smooths no labels.",
            "Leave them at None and 0.",
        )
    _check_sharding(config)
    _check_schedule(config)
    _check_intervals(config)
    _require(config.ddp_timeout >= 1, "ddp_timeout", config.ddp_timeout, ">= 1 (seconds)")
    coefficient = config.router_aux_loss_coef
    _require(coefficient is None or coefficient >= 0, "router_aux_loss_coef", coefficient, ">= 0")
    if config.dtype not in ("auto", "bfloat16", "float16", "float32"):
        raise ConfigError(f"dtype={config.dtype!r} is unknown.", 'Use "auto", "bfloat16", "float16" or "float32".')
    _one_of("attention_backend", config.attention_backend, *BACKENDS)
    _one_of("trunk_kernels", config.trunk_kernels, *TRUNK_KERNELS)
    if config.score_centering_tail not in ("model", "head"):
        raise ConfigError(f"score_centering_tail={config.score_centering_tail!r} is unknown.", 'Use "model" or "head".')


def _check_sharding(config: AsyncGRPOConfig) -> None:
    """Refuse what an argument asks for, and what `accelerate launch` asks for through the environment."""
    if config.deepspeed or _switched_on("ACCELERATE_USE_DEEPSPEED"):
        raise ConfigError("DeepSpeed is not supported.", "Use FSDP2 (fsdp, fsdp_config) for sharded training.")
    from_environment = _switched_on("ACCELERATE_USE_PARALLELISM_CONFIG")
    for name in ("cp_size", "sp_size"):
        given: Any = config.parallelism_config
        size = given.get(name) if isinstance(given, dict) else getattr(given, name, None)  # a dict from a config file
        if config.parallelism_config is None and from_environment:
            size = int(os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}", "1"))
        if (size or 1) > 1:
            raise ConfigError(f"parallelism_config.{name}={size} is not supported.", f"Set {name}=1.")


def check_fsdp(config: AsyncGRPOConfig) -> None:
    """Once transformers has read `fsdp_config`, and before accelerate is asked for what it says."""
    if (getattr(config, "fsdp_plugin_args", None) or {}).get("fsdp_version", 2) != 2:
        raise ConfigError("FSDP1 is not supported.", "Use FSDP2: fsdp_config={'version': 2}, the default.")


def _check_schedule(config: AsyncGRPOConfig) -> None:
    """Without max_steps the number of steps is a ceiling far above what is run: nothing can be a share of it."""
    schedule = _word(config.lr_scheduler_type)
    if config.max_steps > 0 or schedule == "constant":
        return
    if 0 < config.warmup_steps < 1:
        raise ConfigError(
            f"warmup_steps={config.warmup_steps} is a share of all steps, and their number is not known beforehand: "
            "the learning rate would stay near zero.",
            "Set max_steps, or give warmup_steps as a number of steps.",
        )
    if schedule not in _SCHEDULES_WITHOUT_HORIZON:
        logger.warning(
            "lr_scheduler_type=%r decays over max_steps, which is not set: the number of steps is not known "
            "beforehand, so the learning rate will hardly decay. Set max_steps.",
            schedule,
        )


def _check_intervals(config: AsyncGRPOConfig) -> None:
    """transformers counts shares of its ceiling and ends of its own, endless epoch: neither comes in time."""
    for what in ("logging", "save", "eval"):
        steps, strategy = getattr(config, f"{what}_steps"), _word(getattr(config, f"{what}_strategy"))
        if strategy == "steps" and config.max_steps <= 0 and steps is not None and 0 < steps < 1:
            raise ConfigError(
                f"{what}_steps={steps} is a share of all steps, and their number is not known beforehand: the time for "
                "it would never come.",
                f"Set max_steps, or give {what}_steps as a number of steps.",
            )
        if strategy == "epoch":
            logger.warning(
                "%s_strategy='epoch' acts once, when training ends: the passes over the prompts are not transformers' "
                "epochs. Set %s_strategy='steps' and %s_steps.",
                *(what, what, what),
            )


def check_sampling(config: AsyncGRPOConfig) -> None:
    if config.train_sampling_strategy not in ("random", "sequential"):
        raise ConfigError(
            f"train_sampling_strategy={config.train_sampling_strategy!r}: prompts are taken one by one.",
            "Use 'random' or 'sequential'.",
        )
    if config.num_generations < 2:
        raise ConfigError(
            f"num_generations={config.num_generations}: an advantage needs at least two rollouts of a prompt.",
            "Set num_generations to 2 or more (the default is 8).",
        )
    _require(config.max_completion_length >= 1, "max_completion_length", config.max_completion_length, ">= 1")
    _require(
        0 < config.temperature < math.inf,
        "temperature",
        config.temperature,
        "finite and > 0 (0 gives copies of one rollout)",
    )
    _require(0 < config.top_p <= 1, "top_p", config.top_p, "in (0, 1]")
    _require(config.top_k >= 0, "top_k", config.top_k, ">= 0 (0 keeps the whole vocabulary)")
    _require(config.min_p is None or 0 <= config.min_p <= 1, "min_p", config.min_p, "in [0, 1]")
    if (config.top_p < 1 or (config.min_p or 0) > 0) and config.top_k == 0:
        raise ConfigError(
            f"top_p={config.top_p}, min_p={config.min_p} need top_k: vLLM bounds the candidate set with it.",
            "Set top_k, for example top_k=512.",
        )
    _require(config.num_sampler_logprobs >= 1, "num_sampler_logprobs", config.num_sampler_logprobs, ">= 1")


def check_pipeline(config: AsyncGRPOConfig) -> None:
    _require(config.epsilon >= 0, "epsilon", config.epsilon, ">= 0")
    _require(config.epsilon_high is None or config.epsilon_high >= 0, "epsilon_high", config.epsilon_high, ">= 0")
    low, high = config.vllm_importance_sampling_clip_min, config.vllm_importance_sampling_clip_max
    if not 0 <= low < high:
        raise ConfigError(
            f"vllm_importance_sampling_clip_min={low} and _max={high} leave no ratio.",
            "Use 0 <= min < max.",
        )
    _one_of("loss_type", config.loss_type, *LOSS_TYPES)
    if config.loss_type != REFERENCE_LOSS and config.score_centering:
        raise ConfigError(
            f"loss_type={config.loss_type!r} takes the place of score centering, which is on.",
            "Set score_centering=False beside it.",
        )
    cap = config.importance_ratio_cap
    _require(cap is None or cap > 0, "importance_ratio_cap", cap, "> 0, or None for no cap")
    _one_of("loss_normalization", config.loss_normalization, "tokens", "constant")
    _require(config.token_budget is None or config.token_budget >= 1, "token_budget", config.token_budget, ">= 1")
    _require(config.max_concurrent_rollouts >= 1, "max_concurrent_rollouts", config.max_concurrent_rollouts, ">= 1")
    _require(config.max_staleness >= 0, "max_staleness", config.max_staleness, ">= 0")
    _require(config.weight_sync_steps >= 1, "weight_sync_steps", config.weight_sync_steps, ">= 1")
    _require(config.verify_sync_every >= 1, "verify_sync_every", config.verify_sync_every, ">= 1")
    _require(config.max_nonfinite_steps >= 1, "max_nonfinite_steps", config.max_nonfinite_steps, ">= 1")
    _require(config.rollout_worker_timeout > 0, "rollout_worker_timeout", config.rollout_worker_timeout, "> 0")
    if config.weight_sync_backend not in (None, "shm", "nccl", "ipc", "lora"):
        raise ConfigError(
            f"weight_sync_backend={config.weight_sync_backend!r} is unknown.",
            'Use "shm", "nccl", "ipc", "lora" or None.',
        )
    _require(config.tool_timeout > 0, "tool_timeout", config.tool_timeout, "> 0")
    _require(0 < config.tool_failure_limit <= 1, "tool_failure_limit", config.tool_failure_limit, "in (0, 1]")
    _require(config.tool_failure_window >= 1, "tool_failure_window", config.tool_failure_window, ">= 1")
    _require(config.max_tool_result_chars >= 1, "max_tool_result_chars", config.max_tool_result_chars, ">= 1")
    _require(config.reward_timeout > 0, "reward_timeout", config.reward_timeout, "> 0")
    rounds = config.max_tool_calling_iterations
    _require(rounds is None or rounds >= 0, "max_tool_calling_iterations", rounds, ">= 0, or None for no limit")
    _one_of("long_conversation", config.long_conversation, "stop", "end")
    _one_of("turn_prompts", config.turn_prompts, "render", "append")
    if not config.server_urls or len(set(config.server_urls)) != len(config.server_urls):
        raise ConfigError(
            f"vllm_server_base_url={config.vllm_server_base_url!r} names no server, or one twice.",
            "Give one base URL, or a list of different ones.",
        )
    if config.kv_after_sync not in ("recompute", "keep"):
        raise ConfigError(f"kv_after_sync={config.kv_after_sync!r} is unknown.", 'Use "recompute" or "keep".')


def _word(value: Any) -> str:
    """Of a setting that may be a member of one of transformers' enumerations."""
    return str(getattr(value, "value", value))


def _switched_on(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "true", "yes", "on", "y", "t")


def _require(ok: bool, name: str, value: Any, wanted: str) -> None:
    if not ok:
        raise ConfigError(f"{name}={value!r} is out of range.", f"It must be {wanted}.")


def _one_of(name: str, value: str, *allowed: str) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}={value!r} is unknown.", f"Use {' or '.join(map(repr, allowed))}.")
