"""Build the trainer of a run from its resolved config (the composition root of the trainer process)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncgrpo_core.errors import ConfigError
from asyncgrpo_core.launch.config import RunConfig
from asyncgrpo_core.launch.dataset import load_heldout_rows, load_train_dataset
from asyncgrpo_core.launch.imports import import_object
from asyncgrpo_core.launch.placement import num_ranks
from asyncgrpo_core.launch.reward_probe import check_picklable, reward_name
from asyncgrpo_core.launch.run_folder import Attempt
from asyncgrpo_core.launch.training_section import TrainingSection

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from asyncgrpo_core.training.config import AsyncGRPOConfig
    from asyncgrpo_core.training.trainer import AsyncGRPOTrainer


@dataclass
class Inputs:
    """What a config names, imported and loaded.

    Attributes:
        dataset: training rows, None when an environment makes the prompts.
        heldout: rows of the held-out evaluation, maybe none.
    """

    dataset: Any
    heldout: list[dict[str, Any]]
    rewards: list[Callable[..., Any]]
    tools: list[Callable[..., Any]] = field(default_factory=list)
    environment: Any = None
    loop: type | None = None


def load_inputs(cfg: RunConfig) -> Inputs:
    """Import and load everything that the config names.

    Raises:
        ConfigError, DataError: names the key and what is wrong.
    """
    environment = import_environment(cfg.environment)
    dataset = None
    if cfg.data.train is not None:
        dataset = load_train_dataset(cfg.data, needs_prompt=environment is None)
    return Inputs(
        dataset=dataset,
        heldout=load_heldout_rows(cfg.data, cfg.evaluation.n),
        rewards=check_rewards([import_callable(path, f"rewards.{i}") for i, path in enumerate(cfg.rewards)]),
        tools=[import_callable(path, f"tools.{i}") for i, path in enumerate(cfg.tools)],
        environment=environment,
        loop=import_loop(cfg.loop),
    )


def import_callable(path: str, key: str) -> Callable[..., Any]:
    found = import_object(path, key)
    if not callable(found):
        raise ConfigError(f"`{key}` = {path!r} is a {type(found).__name__}, not a function.", "Name a function.")
    return found


def check_rewards(rewards: list[Callable[..., Any]]) -> list[Callable[..., Any]]:
    """The reward functions, when all of them can be sent to the rollout process.

    Raises:
        ConfigError: one cannot be pickled; names it.
    """
    for function in rewards:
        check_picklable(function, f"the reward function {reward_name(function)!r}")
    return rewards


def import_environment(value: str | dict[str, str] | None) -> Any:
    if isinstance(value, dict):
        return {name: import_callable(path, f"environment.{name}") for name, path in value.items()}
    return None if value is None else import_callable(value, "environment")


def import_loop(path: str | None) -> type | None:
    if path is None:
        return None
    from asyncgrpo_core.rollout.loop import AsyncRolloutLoop

    loop = import_object(path, "loop")
    if not (isinstance(loop, type) and issubclass(loop, AsyncRolloutLoop)):
        raise ConfigError(
            f"`loop` = {path!r} is no subclass of AsyncRolloutLoop.", "Derive it from asyncgrpo_core.AsyncRolloutLoop."
        )
    return loop


def training_args(
    section: TrainingSection, *, output_dir: Path, server_url: str | list[str], **more: Any
) -> AsyncGRPOConfig:
    """The trainer's own config object.

    Raises:
        ConfigError: a combination of values that the trainer or transformers refuses.
    """
    from asyncgrpo_core.training.config import AsyncGRPOConfig

    kwargs = section.explicit() | more
    kwargs |= {"output_dir": str(output_dir), "vllm_server_base_url": server_url, "report_to": "none"}
    kwargs.setdefault("disable_tqdm", True)  # the run has its own progress line
    try:
        return AsyncGRPOConfig(**kwargs)
    except ConfigError:
        raise
    except (ValueError, TypeError, ImportError, OSError) as exc:  # OSError: a file that the section names
        raise ConfigError(f"The `training` section is refused: {' '.join(str(exc).split())}.", "Change it.") from exc


def peft_config(cfg: RunConfig) -> Any:
    """The `peft.LoraConfig` of `model.lora`, None without one.

    Raises:
        ConfigError: peft is not installed.
    """
    lora = cfg.model.lora
    if lora is None:
        return None
    try:
        from peft import LoraConfig
    except ImportError as exc:
        raise ConfigError("model.lora needs the package peft.", "Install peft, or remove model.lora.") from exc
    return LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        task_type="CAUSAL_LM",
    )


def build_trainer(
    cfg: RunConfig, run_dir: Path, attempt: Attempt, inputs: Inputs, callbacks: list[TrainerCallback]
) -> AsyncGRPOTrainer:
    """Assemble the trainer; nothing is started.

    Raises:
        ConfigError: the model or its tokenizer cannot be loaded, or the training settings are refused.
    """
    from asyncgrpo_core.training.run_context import RunContext
    from asyncgrpo_core.training.trainer import AsyncGRPOTrainer

    more: dict[str, Any] = {}
    if cfg.model.revision is not None:
        more["model_init_kwargs"] = {"revision": cfg.model.revision, **(cfg.training.model_init_kwargs or {})}
    if num_ranks() > 1 and cfg.resources.sharding == "fsdp" and "fsdp" not in cfg.training.explicit():
        more["fsdp"] = True
    args = training_args(cfg.training, output_dir=run_dir / "checkpoints", server_url=attempt.server_url, **more)
    trainer_class: type[AsyncGRPOTrainer] = AsyncGRPOTrainer
    if inputs.loop is not None:
        trainer_class = type("LoopTrainer", (AsyncGRPOTrainer,), {"loop_cls": inputs.loop})
    return trainer_class(
        model=cfg.model.path,
        reward_funcs=inputs.rewards or None,
        args=args,
        train_dataset=inputs.dataset,
        callbacks=callbacks,
        peft_config=peft_config(cfg),
        tools=inputs.tools or None,
        environment_factory=inputs.environment,
        run=RunContext(run_dir=run_dir, served_model_name=attempt.served_model_name, attempt=attempt.attempt),
    )
