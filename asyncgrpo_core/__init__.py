"""asyncgrpo: asynchronous GRPO training of language models that loses nothing.

The data path, one package per arrow:

    dataset row -> rollout loop -> scored group -> samples -> packed row -> loss -> step -> weight sync -> server
                   rollout/        rollout/        rollout/   packing/      training/         sync/        server/

The public names are loaded on first use, so that importing the package costs nothing in the small processes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncgrpo_core.rollout.loop import AsyncRolloutLoop as AsyncRolloutLoop
    from asyncgrpo_core.training.config import AsyncGRPOConfig as AsyncGRPOConfig
    from asyncgrpo_core.training.trainer import AsyncGRPOTrainer as AsyncGRPOTrainer
    from asyncgrpo_core.types import Rollout as Rollout
    from asyncgrpo_core.types import RolloutGroup as RolloutGroup
    from asyncgrpo_core.types import TurnRecord as TurnRecord

__version__ = "0.1.0"

_PUBLIC = {
    "AsyncGRPOTrainer": "asyncgrpo_core.training.trainer",
    "AsyncGRPOConfig": "asyncgrpo_core.training.config",
    "AsyncRolloutLoop": "asyncgrpo_core.rollout.loop",
    "Rollout": "asyncgrpo_core.types",
    "TurnRecord": "asyncgrpo_core.types",
    "RolloutGroup": "asyncgrpo_core.types",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str):
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)
