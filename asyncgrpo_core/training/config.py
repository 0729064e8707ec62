"""AsyncGRPOConfig: the reference's fields, names and defaults, plus ours (reference, AsyncGRPOConfig)."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import TrainingArguments

from asyncgrpo_core.errors import ConfigError
from asyncgrpo_core.training.offpolicy import LOSS_TYPES, REFERENCE_LOSS

logger = logging.getLogger(__name__)

# transformers' schedules that do not look at the number of steps of the whole run.
_SCHEDULES_WITHOUT_HORIZON = ("constant_with_warmup", "inverse_sqrt", "reduce_lr_on_plateau", "greedy")


def _help(text: str, default: Any, **kwargs: Any) -> Any:
    return field(default=default, metadata={"help": text}, **kwargs)


@dataclass
class AsyncGRPOConfig(TrainingArguments):
    """Configuration of `AsyncGRPOTrainer`. Every `TrainingArguments` field is accepted too.

    Defaults that differ from `TrainingArguments`: logging_steps=1, gradient_checkpointing=True, bf16=True if
    fp16 is not set, learning_rate=1e-6, lr_scheduler_type="constant", ignore_data_skip=True (always),
    remove_unused_columns=False (must stay so), report_to="none". Without an accelerator use_cpu=True,
    bf16=False and gradient_checkpointing=False are resolved unless they were passed, with one message.

    `per_device_train_batch_size` has no role: `token_budget` says how many tokens a row holds, and
    `gradient_accumulation_steps` rows per rank make a step.

    Raises:
        ConfigError: values that contradict each other or that this trainer does not support.
    """

    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "model_init_kwargs", "chat_template_kwargs"]  # noqa: RUF012

    # -- defaults that differ from TrainingArguments
    logging_steps: float = _help("Optimizer steps per logging window.", 1)
    gradient_checkpointing: bool = _help("Recompute activations in the backward pass.", True)
    bf16: bool | None = _help(  # type: ignore[assignment]
        "bf16 mixed precision; None means True unless fp16 is set.", None
    )
    learning_rate: float = _help("Initial learning rate.", 1e-6)
    lr_scheduler_type: str = _help("A decaying schedule needs an explicit max_steps.", "constant")
    ignore_data_skip: bool = _help("Always True: a live rollout queue cannot be replayed.", True)
    remove_unused_columns: bool = _help("Must stay False: reward functions get every column.", False)
    report_to: str | list[str] | None = _help("Trackers of transformers' own callbacks.", "none")

    # -- model
    model_init_kwargs: dict[str, Any] | str | None = _help(
        "Keyword arguments for from_pretrained; `revision` also selects the tokenizer, `dtype` wins over `dtype`.",
        None,
    )
    dtype: str = _help('Type the weights are loaded in: "auto", "bfloat16", "float16" or "float32".', "float32")
    trust_remote_code: bool = _help("Allow models and tokenizers that ship their own code.", False)
    router_aux_loss_coef: float | None = _help("Weight of a MoE model's auxiliary loss.", None)

    # -- generation
    num_generations: int = _help("Rollouts per prompt (the group size), at least 2.", 8)
    max_completion_length: int = _help("Most tokens generated per vLLM request, so per turn.", 2048)
    temperature: float = _help("Sampling temperature.", 1.0)
    top_p: float = _help("Nucleus mass in (0, 1]; below 1 needs top_k.", 1.0)
    top_k: int = _help("Candidates kept by top-k filtering; 0 keeps all.", 0)
    min_p: float | None = _help("Least token probability relative to the most likely one; needs top_k.", None)
    chat_template_kwargs: dict | str | None = _help("Keyword arguments for apply_chat_template.", None)
    max_tool_calling_iterations: int | None = _help("Most tool-calling turns; None means no limit.", None)

    # -- server
    vllm_server_base_url: str | list[str] = _help(
        "Base URL of the vLLM server; a list names several servers of the same policy.", "http://localhost:8000"
    )
    vllm_server_timeout: float = _help("Seconds for the server's start, a request, or a sync call.", 1800.0)

    # -- loss
    epsilon: float = _help("Lower clip of the trust region.", 0.2)
    epsilon_high: float | None = _help("Upper clip; None means epsilon.", None)
    score_centering: bool = _help("Score centering instead of the clipped surrogate.", True)
    vllm_importance_sampling_clip_min: float = _help("Tokens with a smaller ratio are masked.", 0.5)
    vllm_importance_sampling_clip_max: float = _help("Tokens with a larger ratio are masked.", 5.0)
    num_sampler_logprobs: int = _help("Top log-probabilities asked of the sampler per token.", 8)

    # -- pipeline
    token_budget: int | None = _help("Most tokens in a row; None means the server's max_model_len.", None)
    max_concurrent_rollouts: int = _help("Most rollouts running at once.", 512)
    max_staleness: int = _help("Most weight updates a sample may lag behind when it is pulled.", 4)
    weight_sync_steps: int = _help("Steps between weight syncs.", 1)
    rollout_worker_timeout: float = _help("Seconds without a heartbeat after which the worker is hung.", 300.0)

    # -- logging
    log_completions: bool = _help("Print completions of the step at every log.", False)
    num_completions_to_print: int | None = _help("How many; None prints all of the step.", None)

    # -- beyond the reference (keyword, defaults keep the reference's meaning except where docs say so)
    score_centering_tail: str = _help(
        'Mass outside the reported top-k: "model" (exactly zero on policy) or "head" (the reference).',
        "model",
    )
    loss_type: str = _help(
        '"async_grpo": the reference\'s losses (score_centering says which); "tis", "sequence_mask", "geometric_mask", '
        '"cispo", "gspo" and "decoupled_ppo" need score_centering=False.',
        "async_grpo",
    )
    importance_ratio_cap: float | None = _help(
        "Largest importance weight of a token with loss_type tis and geometric_mask; None means no cap.", 2.0
    )
    loss_normalization: str = _help(
        '"tokens": trained tokens of the micro-batch; "constant": its samples times max_completion_length (Dr. GRPO).',
        "tokens",
    )
    advantage_std: bool = _help("Divide advantages by the group's standard deviation.", True)
    weight_sync_backend: str | None = _help('"shm", "nccl", "ipc" or None (chosen from the devices).', None)
    verify_sync_every: int = _help("Prove delivery by a canary every this many syncs.", 1)
    kv_after_sync: str = _help(
        '"recompute": caches are reset by a sync; "keep": running requests keep them.', "recompute"
    )
    regenerate_dropped: bool = _help(
        "Generate stale and failed groups again, at most twice; False drops them at once (the reference).",
        True,
    )

    # -- tools, environments, rewards (beyond the reference)
    tool_timeout: float = _help("Seconds a tool, reset() or get_reward() may take; then it counts as failed.", 300.0)
    tool_failure_limit: float = _help(
        "Share of a tool's last calls that may raise or time out before the run stops: the tool is down, not the "
        "policy bad. 1.0 never stops.",
        0.95,
    )
    tool_failure_window: int = _help("Calls of one tool that tool_failure_limit looks back on.", 200)
    max_tool_result_chars: int = _help("Longer tool results are cut, and the model is told so.", 32768)
    long_conversation: str = _help(
        'A later turn that does not fit max_model_len: "stop" ends the run with the server\'s text (the reference), '
        '"end" ends the rollout there.',
        "stop",
    )
    turn_prompts: str = _help(
        '"render": every turn renders the whole conversation (the reference); "append": sampled tokens are kept as '
        "they are and only what follows them is rendered, so no turn forks.",
        "render",
    )
    reward_timeout: float = _help("Seconds one reward function may take for one group.", 600.0)

    def __new__(cls, *args: Any, **kwargs: Any):
        # Remember what was passed: `gradient_checkpointing=True` said by the user and by the default must
        # resolve differently without an accelerator. (A subclass's generated __init__ would hide it.)
        self = super().__new__(cls)
        object.__setattr__(self, "_passed", frozenset(kwargs))
        return self

    def __post_init__(self) -> None:
        self._resolve_device()
        self._check_training()
        self._check_sampling()
        self._check_pipeline()
        if not self.ignore_data_skip:
            logger.warning("ignore_data_skip=False has no meaning for a live rollout queue; using True.")
            self.ignore_data_skip = True
        super().__post_init__()

    @property
    def server_urls(self) -> list[str]:
        """`vllm_server_base_url` as a list, without trailing slashes."""
        urls = self.vllm_server_base_url
        return [url.rstrip("/") for url in ([urls] if isinstance(urls, str) else urls)]

    def _resolve_device(self) -> None:
        passed: frozenset[str] = self.__dict__.get("_passed", frozenset())
        accelerator = torch.accelerator.is_available() and not self.use_cpu
        if self.bf16 is None:
            self.bf16 = accelerator and not self.fp16
        if accelerator:
            return
        changed = []
        if "use_cpu" not in passed and not self.use_cpu:
            self.use_cpu = True
            changed.append("use_cpu=True")
        if "bf16" not in passed:
            changed.append("bf16=False")
        if "gradient_checkpointing" not in passed and self.gradient_checkpointing:
            self.gradient_checkpointing = False
            changed.append("gradient_checkpointing=False")
        if changed:
            logger.info("No accelerator in use: %s (pass them to decide yourself).", ", ".join(changed))

    def _check_training(self) -> None:
        if self.remove_unused_columns:
            raise ConfigError(
                "remove_unused_columns=True would take away the dataset columns that reward functions need.",
                "Leave it at False.",
            )
        if self.use_liger_kernel:
            raise ConfigError("use_liger_kernel=True is not supported.", "Leave it at False.")
        self._check_sharding()
        self._check_schedule()
        coefficient = self.router_aux_loss_coef
        _require(coefficient is None or coefficient >= 0, "router_aux_loss_coef", coefficient, ">= 0")
        if self.dtype not in ("auto", "bfloat16", "float16", "float32"):
            raise ConfigError(f"dtype={self.dtype!r} is unknown.", 'Use "auto", "bfloat16", "float16" or "float32".')
        if self.score_centering_tail not in ("model", "head"):
            raise ConfigError(
                f"score_centering_tail={self.score_centering_tail!r} is unknown.", 'Use "model" or "head".'
            )

    def _check_sharding(self) -> None:
        """Refuse what an argument asks for, and what `accelerate launch` asks for through the environment."""
        if self.deepspeed or _switched_on("ACCELERATE_USE_DEEPSPEED"):
            raise ConfigError("DeepSpeed is not supported.", "Use FSDP2 (fsdp, fsdp_config) for sharded training.")
        from_environment = _switched_on("ACCELERATE_USE_PARALLELISM_CONFIG")
        for name in ("cp_size", "sp_size"):
            size = getattr(self.parallelism_config, name, None)
            if self.parallelism_config is None and from_environment:
                size = int(os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}", "1"))
            if (size or 1) > 1:
                raise ConfigError(f"parallelism_config.{name}={size} is not supported.", f"Set {name}=1.")

    def _check_schedule(self) -> None:
        """Without max_steps the number of steps is a ceiling far above what is run: nothing can be a share of it."""
        schedule = str(getattr(self.lr_scheduler_type, "value", self.lr_scheduler_type))
        if self.max_steps > 0 or schedule == "constant":
            return
        if 0 < self.warmup_steps < 1:
            raise ConfigError(
                f"warmup_steps={self.warmup_steps} is a share of all steps, and their number is not known beforehand: "
                "the learning rate would stay near zero.",
                "Set max_steps, or give warmup_steps as a number of steps.",
            )
        if schedule not in _SCHEDULES_WITHOUT_HORIZON:
            logger.warning(
                "lr_scheduler_type=%r decays over max_steps, which is not set: the number of steps is not known "
                "beforehand, so the learning rate will hardly decay. Set max_steps.",
                schedule,
            )

    def _check_sampling(self) -> None:
        if self.num_generations < 2:
            raise ConfigError(
                f"num_generations={self.num_generations}: an advantage needs at least two rollouts of a prompt.",
                "Set num_generations to 2 or more (the default is 8).",
            )
        _require(self.max_completion_length >= 1, "max_completion_length", self.max_completion_length, ">= 1")
        _require(self.temperature > 0, "temperature", self.temperature, "> 0 (0 gives copies of one rollout)")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        _require(self.top_k >= 0, "top_k", self.top_k, ">= 0 (0 keeps the whole vocabulary)")
        _require(self.min_p is None or 0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        if (self.top_p < 1 or (self.min_p or 0) > 0) and self.top_k == 0:
            raise ConfigError(
                f"top_p={self.top_p}, min_p={self.min_p} need top_k: vLLM bounds the candidate set with it.",
                "Set top_k, for example top_k=512.",
            )
        _require(self.num_sampler_logprobs >= 1, "num_sampler_logprobs", self.num_sampler_logprobs, ">= 1")

    def _check_pipeline(self) -> None:
        _require(self.epsilon >= 0, "epsilon", self.epsilon, ">= 0")
        _require(self.epsilon_high is None or self.epsilon_high >= 0, "epsilon_high", self.epsilon_high, ">= 0")
        low, high = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        if not 0 <= low < high:
            raise ConfigError(
                f"vllm_importance_sampling_clip_min={low} and _max={high} leave no ratio.",
                "Use 0 <= min < max.",
            )
        _one_of("loss_type", self.loss_type, *LOSS_TYPES)
        if self.loss_type != REFERENCE_LOSS and self.score_centering:
            raise ConfigError(
                f"loss_type={self.loss_type!r} takes the place of score centering, which is on.",
                "Set score_centering=False beside it.",
            )
        cap = self.importance_ratio_cap
        _require(cap is None or cap > 0, "importance_ratio_cap", cap, "> 0, or None for no cap")
        _one_of("loss_normalization", self.loss_normalization, "tokens", "constant")
        _require(self.token_budget is None or self.token_budget >= 1, "token_budget", self.token_budget, ">= 1")
        _require(self.max_concurrent_rollouts >= 1, "max_concurrent_rollouts", self.max_concurrent_rollouts, ">= 1")
        _require(self.max_staleness >= 0, "max_staleness", self.max_staleness, ">= 0")
        _require(self.weight_sync_steps >= 1, "weight_sync_steps", self.weight_sync_steps, ">= 1")
        _require(self.verify_sync_every >= 1, "verify_sync_every", self.verify_sync_every, ">= 1")
        _require(self.rollout_worker_timeout > 0, "rollout_worker_timeout", self.rollout_worker_timeout, "> 0")
        if self.weight_sync_backend not in (None, "shm", "nccl", "ipc"):
            raise ConfigError(
                f"weight_sync_backend={self.weight_sync_backend!r} is unknown.",
                'Use "shm", "nccl", "ipc" or None.',
            )
        _require(self.tool_timeout > 0, "tool_timeout", self.tool_timeout, "> 0")
        _require(0 < self.tool_failure_limit <= 1, "tool_failure_limit", self.tool_failure_limit, "in (0, 1]")
        _require(self.tool_failure_window >= 1, "tool_failure_window", self.tool_failure_window, ">= 1")
        _require(self.max_tool_result_chars >= 1, "max_tool_result_chars", self.max_tool_result_chars, ">= 1")
        _require(self.reward_timeout > 0, "reward_timeout", self.reward_timeout, "> 0")
        rounds = self.max_tool_calling_iterations
        _require(rounds is None or rounds >= 0, "max_tool_calling_iterations", rounds, ">= 0, or None for no limit")
        _one_of("long_conversation", self.long_conversation, "stop", "end")
        _one_of("turn_prompts", self.turn_prompts, "render", "append")
        if not self.server_urls or len(set(self.server_urls)) != len(self.server_urls):
            raise ConfigError(
                f"vllm_server_base_url={self.vllm_server_base_url!r} names no server, or one twice.",
                "Give one base URL, or a list of different ones.",
            )
        if self.kv_after_sync not in ("recompute", "keep"):
            raise ConfigError(f"kv_after_sync={self.kv_after_sync!r} is unknown.", 'Use "recompute" or "keep".')


def _switched_on(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "true", "yes", "on", "y", "t")


def _require(ok: bool, name: str, value: Any, wanted: str) -> None:
    if not ok:
        raise ConfigError(f"{name}={value!r} is out of range.", f"It must be {wanted}.")


def _one_of(name: str, value: str, *allowed: str) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}={value!r} is unknown.", f"Use {' or '.join(map(repr, allowed))}.")
