"""What can be found wrong with a run in a second or two, before a server is started for it.

The trainer checks all of this again, and more; this is only sooner. `doctor` makes the slow checks too.
"""

from __future__ import annotations

from pathlib import Path

from asyncgrpo_core.errors import ConfigError
from asyncgrpo_core.launch.build import check_rewards, import_callable, import_environment, training_args
from asyncgrpo_core.launch.config import DATA_FILES, IMPORT_PATH, RunConfig
from asyncgrpo_core.launch.dataset import check_source
from asyncgrpo_core.launch.imports import resolve_model_path
from asyncgrpo_core.launch.placement import place
from asyncgrpo_core.launch.preparation import reachable_uri

MAX_FILE_BYTES = 50e6  # larger data files are read once only, by the trainer
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)


# Of the config's defaults and examples: known to be names, without asking transformers.
USUAL_SCHEDULES = ("linear", "cosine", "constant", "constant_with_warmup")
USUAL_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")


def check_settings(cfg: RunConfig) -> None:
    """Devices, model folder and tracker.

    Raises:
        ConfigError: devices that are not there, a model folder that cannot be one.
        TrackerError: the tracker cannot be reached.
    """
    ranks = place(cfg).ranks
    if ranks == 1 and cfg.training.explicit().get("fsdp"):
        raise ConfigError(
            "training.fsdp needs several trainer processes, and there is one.",
            "Set resources.trainer_devices or resources.trainer_ranks (sharded then by itself), or remove it.",
        )
    check_unusual_training(cfg)
    check_model_folder(resolve_model_path(cfg.model.path))
    reachable_uri(cfg.tracking)


def check_unusual_training(cfg: RunConfig) -> None:
    """Let `AsyncGRPOConfig` judge the training section, when it has settings that only that class knows.

    For the others the section's own checks are enough, and torch's import is left to the trainer.

    Raises:
        ConfigError: a value or a combination that the trainer would refuse when a server has been started for it.
    """
    section = cfg.training
    usual = section.lr_scheduler_type in USUAL_SCHEDULES and section.optim in USUAL_OPTIMIZERS
    if section.model_extra or not usual or 0 < section.warmup_steps < 1:
        training_args(section, output_dir=Path(cfg.run_dir or "runs"), server_url="http://127.0.0.1:1")


def check_model_folder(path: str) -> None:
    """A local folder has a config and a tokenizer; hub ids are not looked at.

    Raises:
        ConfigError: it has not; names what is missing.
    """
    folder = Path(path)
    if not folder.is_dir():
        return
    if not (folder / "config.json").is_file():
        raise ConfigError(f"The model folder {folder} has no config.json.", "Give one made by save_pretrained.")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(
            f"The model folder {folder} has no tokenizer (none of {', '.join(TOKENIZER_FILES[:3])}, ...).",
            "Save the tokenizer there: tokenizer.save_pretrained(folder).",
        )


def check_code_and_rows(cfg: RunConfig) -> None:
    """Import what the config names and look at the rows of functions and of small files.

    Raises:
        ConfigError: something cannot be imported or sent to the rollout process.
        DataError: no rows, no prompt column, or a prompt that is no conversation.
    """
    check_rewards([import_callable(path, f"rewards.{i}") for i, path in enumerate(cfg.rewards)])
    for index, path in enumerate(cfg.tools):
        import_callable(path, f"tools.{index}")
    import_environment(cfg.environment)
    for key in ("train", "heldout"):
        source = getattr(cfg.data, key)
        if source is not None and _is_cheap(source):
            check_source(cfg.data, key, needs_prompt=cfg.environment is None or key == "heldout")


def _is_cheap(source: str) -> bool:
    if IMPORT_PATH.match(source):
        return True
    path = Path(source).expanduser()
    if not source.endswith(DATA_FILES):
        return False  # a hub id: loading it is the trainer's
    return not path.is_file() or path.stat().st_size <= MAX_FILE_BYTES
