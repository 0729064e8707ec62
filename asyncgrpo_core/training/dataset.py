"""What the trainer's arguments must look like: reward functions and the prompt dataset."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from asyncgrpo_core.errors import ConfigError, DataError


def normalise_reward_funcs(reward_funcs: Any, environment_factory: Any) -> list[Callable]:
    """One reward function or a list of them -> list.

    Raises:
        ConfigError: none given although no environment scores, or something that is not callable.
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
    if not reward_funcs and environment_factory is None:
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
    if "prompt" in first:
        check_prompt(first["prompt"], "row 0 of train_dataset")
    elif environment_factory is None:
        raise DataError(
            f'train_dataset has no "prompt" column; its columns are {sorted(first)}.',
            'Rename the column that holds the messages to "prompt".',
        )
    return num_rows


def check_prompt(prompt: Any, where: str) -> None:
    """A prompt is a non-empty list of {"role": str, "content": str} messages.

    Raises:
        DataError: it is not; says what was found and shows the right form.
    """
    form = 'Use [{"role": "user", "content": "..."}].'
    if isinstance(prompt, str):
        raise DataError(f"The prompt in {where} is plain text ({prompt[:60]!r}), not a conversation.", form)
    if not isinstance(prompt, list) or not prompt:
        raise DataError(f"The prompt in {where} is {type(prompt).__name__}, not a list of messages.", form)
    for message in prompt:
        if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
            raise DataError(f"The prompt in {where} has a message without role and content: {message!r}.", form)
        if not isinstance(message["content"], str | None):
            raise DataError(
                f"The prompt in {where} has a message whose content is {type(message['content']).__name__}; "
                "images and other parts are not supported.",
                form,
            )
