"""`RunConfig`: everything that decides a run, in sections.

It is the Prefect UI's form, the YAML file's schema and what the children read (as JSON, from the run folder).
Unknown keys, contradictions and values out of range are refused when it is parsed. This module imports no
torch, no Prefect and no MLflow: parsing a config is fast.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from asyncgrpo_core.errors import ConfigError
from asyncgrpo_core.launch.training_section import TrainingSection
from asyncgrpo_core.server.settings import ServerConfig
from asyncgrpo_core.tracking.settings import TrackingConfig

IMPORT_PATH = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
DATA_FILES = (".jsonl", ".json", ".parquet", ".csv")


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=(), allow_inf_nan=False)


class LoraSection(Section):
    """Train a LoRA adapter (peft). The server gets merged weights, or with server.enable_lora the adapter alone."""

    r: int = Field(default=8, ge=1, description="Rank.")
    alpha: int = Field(default=16, ge=1, description="Scale (lora_alpha).")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout of the adapter's input.")
    target_modules: list[str] | str = Field(default="all-linear", description="Modules that get an adapter.")


class ModelSection(Section):
    """The policy: a folder, a hub id, or `package://pkg.mod/folder` for files shipped in an installed package."""

    path: str = Field(description="Folder with weights and tokenizer, hub id, or package://pkg.mod/folder.")
    revision: str | None = Field(default=None, description="Hub revision of model and tokenizer.")
    trust_remote_code: bool = Field(default=False, description="Allow a model that ships its own code.")
    served_model_name: str | None = Field(default=None, description="Name at the server; null: the model's path.")
    lora: LoraSection | None = Field(default=None, description="Train an adapter instead of all weights.")


class DataSection(Section):
    """Where rows come from: `pkg.mod:function`, a .jsonl/.json/.parquet/.csv file, or a hub id.

    A function returns a list of dicts, a `datasets.Dataset` or an `IterableDataset`; it gets `train_args` /
    `heldout_args`. Every row has a conversational `prompt`: [{"role": "user", "content": "..."}], or `prompt_template`
    makes it from the row's columns ("question", "answer", ...). All other columns reach the rewards.
    """

    train: str | None = Field(default=None, description="Training rows; null: `environment` makes the prompts.")
    train_args: dict[str, Any] = Field(default_factory=dict, description="Arguments of the function.")
    train_split: str = Field(default="train", description="Split of a hub dataset.")
    heldout: str | None = Field(default=None, description="Rows for the evaluation before and after; null: none.")
    heldout_args: dict[str, Any] = Field(default_factory=dict, description="Arguments of the function.")
    heldout_split: str = Field(default="test", description="Split of a hub dataset.")
    revision: str | None = Field(default=None, description="Hub revision.")
    streaming: bool = Field(
        default=False,
        description="Read the training rows as they are needed (files and hub data sets): no length, so max_steps "
        "ends the run, and a resume starts again with the first row.",
    )
    prompt_column: str = Field(default="prompt", min_length=1, description="Column that holds the conversation.")
    prompt_template: list[dict[Literal["role", "content"], str]] | None = Field(
        default=None,
        description='Messages that make the prompt of a row without one; "{question}" stands for the column question, '
        "doubled braces for themselves.",
    )
    rename: dict[str, str] = Field(
        default_factory=dict, description="Columns under another name, for example {answer: solution}."
    )

    @model_validator(mode="after")
    def _template_is_whole(self) -> DataSection:
        for number, message in enumerate(self.prompt_template or []):
            if set(message) != {"role", "content"}:
                raise ConfigError(
                    f"data.prompt_template.{number} has the keys {sorted(message)}.", "Give it a role and a content."
                )
        if self.prompt_template is not None and self.prompt_column != "prompt":
            raise ConfigError(
                "data.prompt_template and data.prompt_column both say where the prompt comes from.", "Remove one."
            )
        return self


class SamplingSection(Section):
    """The sampling settings under their own heading: the same settings as in `training`, said once."""

    num_generations: int | None = Field(default=None, ge=2)
    max_completion_length: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, gt=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    min_p: float | None = Field(default=None, ge=0, le=1)
    chat_template_kwargs: dict[str, Any] | None = None


class ResourcesSection(Section):
    """What the run may use of the machine."""

    trainer_devices: list[int] | None = Field(
        default=None, min_length=1, description="CUDA devices of the trainer; null: the first."
    )
    server_devices: list[int] | None = Field(
        default=None, min_length=1, description="CUDA devices of the server; null: the others."
    )
    trainer_ranks: int | None = Field(
        default=None, ge=1, description="Trainer processes, one per device; null: one for each of trainer_devices."
    )
    sharding: Literal["fsdp", "ddp"] = Field(
        default="fsdp", description="Several trainer processes hold shards of the policy (fsdp) or copies of it (ddp)."
    )
    omp_threads: int | None = Field(
        default=None, ge=1, description="OpenMP threads of a trainer; null: 1 up to two cores, else half of them."
    )
    stop_grace_s: float = Field(default=60.0, gt=0, description="Seconds the trainer gets to save when it is stopped.")
    min_free_disk_gib: float = Field(default=1.0, ge=0, description="`doctor` warns below this.")


class CheckpointSection(Section):
    """When checkpoints are saved and how many stay on disk (what MLflow keeps: `tracking.checkpoints`)."""

    every_steps: int | None = Field(default=None, ge=1, description="Steps between checkpoints (training.save_steps).")
    keep: int | None = Field(default=None, ge=1, description="Checkpoints kept on disk (training.save_total_limit).")


class EvaluationSection(Section):
    """The held-out evaluation, sampled at the training temperature."""

    n: int = Field(default=256, ge=0, description="Held-out prompts used; 0: no evaluation.")
    when: list[Literal["before", "after"]] = Field(default=["before", "after"], description="When it is made.")
    seed: int = Field(default=0, ge=0, description="Seed of the sampling requests.")
    max_in_flight: int = Field(default=64, ge=1, description="Most requests at once.")
    show: int = Field(default=3, ge=0, description="Prompts shown at the end with both completions.")


class RunConfig(Section):
    """One training run. Example: `examples/quickstart.yaml`."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,79}$", description="Letters, digits, _ . -")
    run_dir: str | None = Field(default=None, description="Run folder; null: runs/<name>-<time>.")
    resume: bool = Field(default=False, description="Continue the run in run_dir (null: the newest runs/<name>-*).")
    model: ModelSection
    data: DataSection = Field(default_factory=DataSection)
    rewards: list[str] = Field(default_factory=list, description="Reward functions, each as pkg.mod:function.")
    tools: list[str] = Field(default_factory=list, description="Tools, each as pkg.mod:function.")
    environment: str | dict[str, str] | None = Field(default=None, description="pkg.mod:Class, or names to such.")
    loop: str | None = Field(default=None, description="Subclass of AsyncRolloutLoop as pkg.mod:Class.")
    training: TrainingSection = Field(default_factory=TrainingSection)
    sampling: SamplingSection = Field(default_factory=SamplingSection)
    server: ServerConfig = Field(default_factory=lambda: ServerConfig.model_validate({}))
    resources: ResourcesSection = Field(default_factory=ResourcesSection)
    tracking: TrackingConfig = Field(default_factory=TrackingConfig)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection)

    @field_validator("rewards", "tools")
    @classmethod
    def _are_import_paths(cls, values: list[str]) -> list[str]:
        for value in values:
            _require_import_path(value)
        return values

    @field_validator("environment", "loop")
    @classmethod
    def _is_import_path(cls, value: str | dict[str, str] | None) -> str | dict[str, str] | None:
        for path in value.values() if isinstance(value, dict) else [value]:
            if path is not None:
                _require_import_path(path)
        return value

    @model_validator(mode="after")
    def _has_rows_and_rewards(self) -> RunConfig:
        if self.data.train is None and self.environment is None:
            raise ConfigError("data.train is not set.", "Name a file, a hub id or a function (pkg.mod:function).")
        if self.data.train is None and self.training.max_steps <= 0:
            raise ConfigError(
                "data.train is not set, so there is no epoch to count.", "Set training.max_steps above 0."
            )
        if not self.rewards and self.environment is None:
            raise ConfigError(
                "rewards is empty, so nothing says what a good completion is.",
                "List at least one reward function, for example rewards: [my_project.rewards:score].",
            )
        return self

    @model_validator(mode="after")
    def _adapter_is_served(self) -> RunConfig:
        """training.weight_sync_backend = "lora" asks for a server that serves adapters."""
        if self.training.weight_sync_backend != "lora":
            return self
        if self.model.lora is None:
            raise ConfigError(
                "training.weight_sync_backend = 'lora' sends an adapter, but model.lora is not set.",
                "Set model.lora (for example model.lora.r=8), or remove training.weight_sync_backend.",
            )
        if "enable_lora" in self.server.model_fields_set and not self.server.enable_lora:
            raise ConfigError(
                "training.weight_sync_backend = 'lora' contradicts server.enable_lora = False.",
                "Remove one of the two.",
            )
        if self.server.url is None:
            self.server.enable_lora = True
        return self

    @model_validator(mode="after")
    def _merge_duplicates(self) -> RunConfig:
        """Write every setting that may be said in two places into `training`, and refuse a contradiction."""
        for key in self.sampling.model_fields_set:
            self._merge(f"sampling.{key}", getattr(self.sampling, key), key)
        self._merge("checkpoint.every_steps", self.checkpoint.every_steps, "save_steps")
        self._merge("checkpoint.keep", self.checkpoint.keep, "save_total_limit")
        if self.model.trust_remote_code:
            self._merge("model.trust_remote_code", True, "trust_remote_code")
        if self.server.url is not None:
            self._merge("server.url", self.server.url, "vllm_server_base_url")
        elif "vllm_server_base_url" in self.training.model_fields_set:
            self.server = ServerConfig.model_validate(
                self.server.model_dump(exclude_unset=True) | {"url": self.training.vllm_server_base_url}
            )
        self.training.check_contradictions()
        return self

    @model_validator(mode="after")
    def _completions_fit(self) -> RunConfig:
        """What the server would refuse, minutes later."""
        limit, longest = self.server.max_model_len, self.training.max_completion_length
        if limit is not None and longest >= limit:
            raise ConfigError(
                f"training.max_completion_length = {longest} leaves no room for a prompt in server.max_model_len = "
                f"{limit}.",
                "Raise server.max_model_len, or lower training.max_completion_length (or sampling's).",
            )
        return self

    def _merge(self, key: str, value: Any, training_key: str) -> None:
        if value is None:
            return
        if training_key in self.training.model_fields_set and getattr(self.training, training_key) != value:
            raise ConfigError(
                f"{key} = {value!r} contradicts training.{training_key} = {getattr(self.training, training_key)!r}.",
                "Remove one of the two.",
            )
        setattr(self.training, training_key, value)


def _require_import_path(value: str) -> None:
    if not IMPORT_PATH.match(value):
        raise ConfigError(
            f"{value!r} is no import path.", "Write it as package.module:name, for example my_project.rewards:score."
        )
