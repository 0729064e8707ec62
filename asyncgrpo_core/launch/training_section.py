"""The `training` section: every `AsyncGRPOConfig` field, checked without importing torch.

The fields below are the reference's own, ours, and the `TrainingArguments` fields that runs usually set: their
names, types and defaults are repeated here so that parsing a config and `--help` stay fast (a test holds them to
the dataclass). Any other `AsyncGRPOConfig` field is accepted too; only then is the dataclass imported, to check
its name and type. Only what was set is written out again: the dataclass resolves the rest.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_serializer, model_validator

from asyncgrpo_core.errors import ConfigError
from asyncgrpo_core.launch.explain import nearest


class TrainingSection(BaseModel):
    """Values of `AsyncGRPOConfig`. `output_dir` and `resume_from_checkpoint` belong to the run folder."""

    model_config = ConfigDict(extra="allow", protected_namespaces=(), allow_inf_nan=False)

    # -- model
    model_init_kwargs: dict[str, Any] | None = Field(default=None, description="Keyword arguments for from_pretrained.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(default="float32", description="Weights' type.")
    trust_remote_code: bool = Field(default=False, description="Allow models that ship their own code.")
    router_aux_loss_coef: float | None = Field(
        default=None, ge=0, description="Weight of a MoE model's auxiliary loss; null: the model config's own."
    )

    # -- generation
    num_generations: int = Field(default=8, ge=2, description="Rollouts per prompt (the group size), at least 2.")
    max_completion_length: int = Field(default=2048, ge=1, description="Most tokens generated per turn.")
    temperature: float = Field(default=1.0, gt=0, description="Sampling temperature.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Nucleus mass; below 1 needs top_k.")
    top_k: int = Field(default=0, ge=0, description="Candidates kept by top-k filtering; 0 keeps all.")
    min_p: float | None = Field(default=None, ge=0, le=1, description="Least relative probability; needs top_k.")
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="Passed to apply_chat_template.")
    max_tool_calling_iterations: int | None = Field(default=None, ge=0, description="Most tool turns; null: no limit.")

    # -- server
    vllm_server_base_url: str | list[str] = Field(default="http://localhost:8000", description="As server.url.")
    vllm_server_timeout: float = Field(default=1800.0, gt=0, description="Seconds for start, a request, a sync call.")

    # -- loss
    epsilon: float = Field(default=0.2, ge=0, description="Lower clip of the trust region.")
    epsilon_high: float | None = Field(default=None, ge=0, description="Upper clip; null means epsilon.")
    score_centering: bool = Field(default=True, description="Score centering instead of the clipped surrogate.")
    vllm_importance_sampling_clip_min: float = Field(default=0.5, ge=0, description="Smaller ratios are masked.")
    vllm_importance_sampling_clip_max: float = Field(
        default=5.0, gt=0, allow_inf_nan=True, description="Larger ratios are masked; .inf: none."
    )
    num_sampler_logprobs: int = Field(default=8, ge=1, description="Top log-probabilities asked per token.")
    score_centering_tail: Literal["model", "head"] = Field(default="model", description="Mass outside the top-k.")

    loss_type: Literal["async_grpo", "tis", "sequence_mask", "geometric_mask", "cispo", "gspo", "decoupled_ppo"] = (
        Field(default="async_grpo", description="async_grpo: by score_centering; the others need it false.")
    )
    loss_normalization: Literal["tokens", "constant"] = Field(default="tokens", description="constant: Dr. GRPO.")
    advantage_std: bool = Field(default=True, description="Divide advantages by the group's standard deviation.")
    importance_ratio_cap: float | None = Field(default=2.0, gt=0, description="Of tis, geometric_mask; null: no cap.")

    # -- pipeline
    token_budget: int | None = Field(default=None, ge=1, description="Most tokens in a row; null: max_model_len.")
    max_concurrent_rollouts: int = Field(default=512, ge=1, description="Most rollouts running at once.")
    max_staleness: int = Field(default=4, ge=0, description="Most weight updates a sample may lag behind.")
    weight_sync_steps: int = Field(default=1, ge=1, description="Steps between weight syncs.")
    rollout_worker_timeout: float = Field(default=300.0, gt=0, description="Seconds without heartbeat: hung.")
    regenerate_dropped: bool = Field(default=True, description="Generate stale and failed groups again.")
    attention_backend: Literal["auto", "hub", "varlen", "flex", "sdpa"] = Field(
        default="auto", description="Attention of packed rows; auto: by device, dtype and model."
    )
    trunk_kernels: Literal["auto", "eager", "compile"] = Field(
        default="auto", description="compile: each layer compiled; auto: on one CUDA device where it is safe."
    )
    synchronous: bool = Field(default=False, description="Alternate generation and training.")
    max_nonfinite_steps: int = Field(default=3, ge=1, description="Skipped steps in a row before the run stops.")
    weight_sync_backend: Literal["shm", "nccl", "ipc", "lora"] | None = Field(
        default=None, description="null: by device; lora: only the adapter is sent (see server.enable_lora)."
    )
    verify_sync_every: int = Field(default=1, ge=1, description="Prove delivery every this many syncs.")
    kv_after_sync: Literal["recompute", "keep"] = Field(default="recompute", description="Caches after a sync.")

    # -- tools, environments, rewards
    tool_timeout: float = Field(default=300.0, gt=0, description="Seconds one tool call or reset() may take.")
    tool_failure_limit: float = Field(default=0.95, gt=0, le=1, description="Share of failing calls that stops a run.")
    tool_failure_window: int = Field(default=200, ge=1, description="Calls that tool_failure_limit looks back on.")
    max_tool_result_chars: int = Field(default=32768, ge=1, description="Longer tool results are cut.")
    long_conversation: Literal["stop", "end"] = Field(default="stop", description="A turn that does not fit.")
    turn_prompts: Literal["render", "append"] = Field(default="render", description="How a later turn is built.")
    reward_timeout: float = Field(default=600.0, gt=0, description="Seconds a reward function may take for a group.")

    # -- logging
    log_completions: bool = Field(default=False, description="Print completions at every log.")
    num_completions_to_print: int | None = Field(default=None, ge=1, description="How many; null: all of the step.")
    logging_steps: float = Field(default=1, gt=0, description="Optimizer steps per logging window.")

    # -- the TrainingArguments fields that runs usually set
    max_steps: int = Field(default=-1, description="Optimizer steps; -1: num_train_epochs decides.")
    num_train_epochs: float = Field(default=3.0, gt=0, description="Passes over the prompts.")
    learning_rate: float = Field(default=1e-6, ge=0, description="Initial learning rate.")
    lr_scheduler_type: str = Field(default="constant", description="A decaying one needs max_steps.")
    lr_scheduler_kwargs: dict[str, Any] | None = Field(default=None, description="Arguments of the scheduler.")
    warmup_steps: float = Field(default=0, ge=0, description="Warm-up steps (below 1: a share of all steps).")
    optim: str = Field(default="adamw_torch_fused", description="Optimizer.")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW weight decay.")
    adam_beta1: float = Field(default=0.9, ge=0, lt=1, description="AdamW beta1.")
    adam_beta2: float = Field(default=0.999, ge=0, lt=1, description="AdamW beta2.")
    adam_epsilon: float = Field(default=1e-8, gt=0, description="AdamW epsilon.")
    max_grad_norm: float = Field(default=1.0, ge=0, allow_inf_nan=True, description="Gradient clipping norm; 0: none.")
    gradient_accumulation_steps: int = Field(default=1, ge=1, description="Rows per rank in a step.")
    gradient_checkpointing: bool = Field(default=True, description="Recompute activations in backward.")
    bf16: bool | None = Field(default=None, description="bf16 mixed precision; null: true unless fp16 or CPU.")
    fp16: bool = Field(default=False, description="fp16 mixed precision.")
    use_cpu: bool = Field(default=False, description="Train on the CPU even when there is a GPU.")
    save_strategy: Literal["no", "steps", "epoch", "best"] = Field(default="steps", description="When to save.")
    save_steps: float = Field(default=500, gt=0, description="Steps between checkpoints; see checkpoint.every_steps.")
    save_total_limit: int | None = Field(default=None, ge=1, description="Checkpoints kept on disk.")
    seed: int = Field(default=42, ge=0, lt=2**32, description="Seed of everything in training.")
    train_sampling_strategy: Literal["random", "sequential"] = Field(default="random", description="Prompt order.")

    @model_validator(mode="before")
    @classmethod
    def _refuse_run_folder_fields(cls, data: Any) -> Any:
        if isinstance(data, dict):
            if data.get("hub_token") is not None:  # its value is not repeated
                raise ConfigError(
                    "training.hub_token is a secret, and a config is kept in the run's folder and by its trackers.",
                    "Remove it and set HF_TOKEN in the environment.",
                )
            for key, instead in _OWNED_BY_THE_RUN.items():
                if data.get(key) is not None:
                    raise ConfigError(f"training.{key} = {data[key]!r} is set by the run itself.", instead)
        return data

    @model_validator(mode="after")
    def _check_other_fields(self) -> TrainingSection:
        extra = self.__pydantic_extra__ or {}
        for key, value in list(extra.items()):
            extra[key] = check_other_field(key, value)
        return self

    @model_validator(mode="after")
    def _is_consistent(self) -> TrainingSection:
        self.check_contradictions()
        return self

    def check_contradictions(self) -> None:
        """Values that contradict each other; called again when the other sections have been written into this one."""
        if self.max_steps == 0 or self.max_steps < -1:
            raise ConfigError(
                f"training.max_steps = {self.max_steps} is no number of steps.",
                "Set it above 0, or to -1 (or leave it out) to count passes over the prompts (num_train_epochs).",
            )
        if self.save_strategy == "best":
            raise ConfigError(
                "training.save_strategy = 'best' saves after evaluations of the Trainer, and this one makes none.",
                "Use steps (checkpoint.every_steps says how many).",
            )
        if self.bf16 and self.fp16:
            raise ConfigError("training.bf16 and training.fp16 are both true.", "Remove one of the two.")
        if (self.top_p < 1 or (self.min_p or 0) > 0) and self.top_k == 0:
            raise ConfigError(
                f"training.top_p = {self.top_p} and training.min_p = {self.min_p} need training.top_k: "
                "vLLM bounds the candidate set with it.",
                "Set training.top_k, for example 512.",
            )
        low, high = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        if low >= high:
            raise ConfigError(
                f"training.vllm_importance_sampling_clip_min = {low} and _max = {high} leave no ratio.",
                "Use min < max.",
            )
        if self.loss_type != "async_grpo" and self.score_centering:
            raise ConfigError(
                f"training.loss_type = {self.loss_type!r} takes the place of training.score_centering, which is true.",
                "Set training.score_centering to false beside it.",
            )

    @model_serializer(mode="wrap")
    def _only_what_was_set(self, handler: Any) -> dict[str, Any]:
        return {key: value for key, value in handler(self).items() if key in self.model_fields_set}

    def explicit(self) -> dict[str, Any]:
        """The keyword arguments for `AsyncGRPOConfig`: what was set, nothing else."""
        return {key: getattr(self, key) for key in self.model_fields_set}

    def with_defaults(self) -> dict[str, Any]:
        """Every field above and what was set beside them, for the tracker."""
        return {key: getattr(self, key) for key in type(self).model_fields} | (self.__pydantic_extra__ or {})


_OWNED_BY_THE_RUN = {
    "output_dir": "Remove it: checkpoints go to the run folder (run_dir, or --run-dir on the command line).",
    "resume_from_checkpoint": "Remove it and use `resume: true`, or --resume on the command line.",
}


def check_other_field(key: str, value: Any) -> Any:
    """A field of `AsyncGRPOConfig` that has no line above: check its name and type, return it converted.

    Raises:
        ConfigError: no such field (names the nearest), or a value of the wrong type.
    """
    from asyncgrpo_core.training.config import AsyncGRPOConfig  # imports torch: only when it is needed

    fields = {f.name: f for f in dataclasses.fields(AsyncGRPOConfig) if f.init}
    if key not in fields:
        raise ConfigError(f"training.{key} is no field of AsyncGRPOConfig.", nearest(key, fields, prefix="training."))
    if key == "fsdp" and isinstance(value, bool):  # transformers reads it so, and calls it a string
        return value or None
    hint = typing.get_type_hints(AsyncGRPOConfig)[key]
    if not _is_plain(hint):
        return value  # an object of another library: the dataclass itself judges it
    try:
        return TypeAdapter(hint).validate_python(value)
    except ValidationError as exc:
        raise ConfigError(
            f"training.{key} = {value!r} is no {_spell(hint)}: {exc.errors()[0]['msg'].lower()}.",
            f"The default is {fields[key].default!r}.",
        ) from None


def _is_plain(hint: Any) -> bool:
    if typing.get_origin(hint) is Literal:
        return True
    args = [a for a in typing.get_args(hint) if a is not Ellipsis]
    if args:
        return all(_is_plain(a) for a in args)
    return hint in (str, int, float, bool, dict, list, Any, types.NoneType)


def _spell(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
