"""Metric names of reward functions and environments."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

_LONGEST = 100  # MLflow takes keys of 250 characters; "rewards/.../mean" and more goes around this one


def reward_name(func: Callable[..., Any]) -> str:
    """The name one reward function is logged under, before names are made distinct.

    Its own `__name__`; without one (partials, callable objects) that of the function a partial wraps, or of the
    object's class. A partial or an object that sets `__name__` on itself keeps it. Only letters, digits, "_", "-" and
    "." stay, which MLflow takes everywhere ("<lambda>" -> "lambda").
    """
    own = getattr(func, "__name__", None)
    while not isinstance(own, str) and isinstance(func, functools.partial):
        func = func.func
        own = getattr(func, "__name__", None)
    return _safe(own if isinstance(own, str) else type(func).__name__) or "reward"


def reward_names(reward_funcs: Sequence[Callable[..., Any]]) -> list[str]:
    """`reward_name` of each, made distinct: a name that is there already gets "_2", "_3", ... in list order."""
    return distinct([reward_name(func) for func in reward_funcs], taken=())


def distinct(names: Iterable[str], taken: Iterable[str]) -> list[str]:
    """The names, each different from those before it and from `taken`."""
    seen = set(taken)
    result = []
    for base in names:
        name, number = base, 1
        while name in seen:
            number += 1
            name = f"{base}_{number}"
        seen.add(name)
        result.append(name)
    return result


class EnvironmentNames:
    """Names of environment classes: the class's name, "_2", ... when a reward function or another class has it.

    Args:
        taken: the reward functions' names.
        known: classes known before the run; they get their names in this order, any other when it is first seen.
    """

    def __init__(self, taken: Sequence[str], known: Iterable[type] = ()) -> None:
        self._taken = list(taken)
        self._names: dict[type, str] = {}
        for environment in known:
            self.name(environment)

    def name(self, environment: type) -> str:
        if environment not in self._names:
            base = _safe(environment.__name__) or "environment"
            self._names[environment] = distinct([base], [*self._taken, *self._names.values()])[0]
        return self._names[environment]


def _safe(name: str) -> str:
    # "<lambda>" loses its brackets; a leading underscore of a real name stays
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", name.strip("<>"))[:_LONGEST].strip(".")
