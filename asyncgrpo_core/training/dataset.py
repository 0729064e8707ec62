"""What the trainer's arguments must look like: reward functions and the prompt dataset."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from asyncgrpo_core.errors import ConfigError, DataError
from asyncgrpo_core.rollout.loop import AsyncRolloutLoop
from asyncgrpo_core.rollout.prompts import check_no_images, check_prompt


def normalise_reward_funcs(
    reward_funcs: Any, environment_factory: Any, loop_cls: type[AsyncRolloutLoop] = AsyncRolloutLoop
) -> list[Callable]:
    """One reward function or a list of them -> list.

    Raises:
        ConfigError: none given although no environment scores and `generate_one` is the default, which sets no
            Rollout.reward; or something that is not callable. (Whether an environment scores is seen in the worker.)
    """
    if reward_funcs is None:
        reward_funcs = []
    if not isinstance(reward_funcs, list | tuple):
        reward_funcs = [reward_funcs]
    for func in reward_funcs:
        # A torch module is callable too, so a reward model has to be told apart by what it is.
        if isinstance(func, str) or not callable(func) or hasattr(func, "save_pretrained"):
            raise ConfigError(
                f"reward_funcs contains {func!r}; a reward must be a Python callable, not a model.",
                "Serve a reward model behind its own engine and call it from a module-level function.",
            )
    generates_itself = loop_cls.generate_one is not AsyncRolloutLoop.generate_one
    if not reward_funcs and environment_factory is None and not generates_itself:
        raise ConfigError("reward_funcs is missing.", "Pass a reward function, or an environment with get_reward().")
    return list(reward_funcs)


def check_dataset(dataset: Any, environment_factory: Any, max_steps: int) -> int | None:
    """Check shape and prompt format on the first row (every row, for a map dataset, when it is used).

    Returns:
        Number of rows, or None for a stream or when an environment owns the data.

    Raises:
        DataError: no dataset, no "prompt" column, no rows, or a prompt that is not conversational.
        ConfigError: max_steps is needed and not set.
    """
    if dataset is None:
        if environment_factory is None:
            raise DataError("train_dataset is missing.", 'Pass a dataset with a conversational "prompt" column.')
        if max_steps <= 0:
            raise ConfigError("Without train_dataset the training length is unknown.", "Set max_steps.")
        return None
    num_rows = len(dataset) if hasattr(dataset, "__len__") else None
    if num_rows == 0:
        raise DataError("train_dataset has no rows.", "Check the split or filter that made it.")
    if num_rows is None and max_steps <= 0:
        raise ConfigError("A streaming train_dataset has no length, so epochs cannot be counted.", "Set max_steps.")
    first = dataset[0] if num_rows is not None else next(iter(dataset))
    if not isinstance(first, Mapping):
        raise DataError(f"train_dataset rows are {type(first).__name__}, not mappings.", "Use a datasets.Dataset.")
    check_no_images(first, "row 0 of train_dataset")
    if "prompt" in first:
        check_prompt(first["prompt"], "row 0 of train_dataset")
    elif environment_factory is None:
        raise DataError(
            f'train_dataset has no "prompt" column; its columns are {sorted(first)}.',
            'Rename the column that holds the messages to "prompt".',
        )
    return num_rows
