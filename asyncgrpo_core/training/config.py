"""AsyncGRPOConfig: the reference's fields, names and defaults, plus ours (reference, AsyncGRPOConfig)."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import TrainingArguments

from asyncgrpo_core.training.config_checks import check_fsdp, check_pipeline, check_sampling, check_training

logger = logging.getLogger(__name__)


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
    weight_sync_backend: str | None = _help(
        '"shm", "nccl", "ipc", "lora" (only the adapter) or None (chosen from the devices and the servers).', None
    )
    verify_sync_every: int = _help("Prove delivery by a canary every this many syncs.", 1)
    kv_after_sync: str = _help(
        '"recompute": caches are reset by a sync; "keep": running requests keep them.', "recompute"
    )
    regenerate_dropped: bool = _help(
        "Generate stale and failed groups again, at most twice; False drops them at once (the reference).",
        True,
    )
    synchronous: bool = _help(
        "Alternate generation and training instead of overlapping them: rollouts are generated only while the trainer "
        "waits for a step's samples. The baseline for what overlapping gains.",
        False,
    )
    attention_backend: str = _help(
        'Attention of packed rows: "auto" (by device, dtype and model; logged), "hub", "varlen", "flex" or "sdpa".',
        "auto",
    )
    trunk_kernels: str = _help(
        'The layers: "eager" (as transformers wrote them), "compile" (each layer compiled) or "auto" (compiled on one '
        "CUDA device where every layer is attention and a dense block).",
        "auto",
    )
    max_nonfinite_steps: int = _help(
        "Steps in a row whose loss or gradient is not finite before the run stops; each of them is skipped.", 3
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

    def __getstate__(self) -> dict[str, Any]:
        # training_args.bin lies in every checkpoint and in what is pushed: the token that writes to the hub must not.
        return self.__dict__ | {"hub_token": None}

    def __post_init__(self) -> None:
        self._resolve_device()
        check_training(self)
        check_sampling(self)
        check_pipeline(self)
        if not self.ignore_data_skip:
            logger.warning("ignore_data_skip=False has no meaning for a live rollout queue; using True.")
            self.ignore_data_skip = True
        super().__post_init__()
        check_fsdp(self)

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
