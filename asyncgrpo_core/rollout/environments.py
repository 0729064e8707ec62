"""Environments: stateful objects whose public methods are the tools of one rollout (reference, 'Environments').

    lease an instance -> reset(**row) -> prompt -> [ the rollout calls its methods ] -> get_reward() -> give it back

An instance is made when none is idle and reused afterwards, so an expensive __init__ is paid once; two running
rollouts never share one. One that timed out, raised, or whose rollout was cut short is thrown away.
"""

from __future__ import annotations

import inspect
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncgrpo_core.errors import ConfigError, DataError, RolloutError
from asyncgrpo_core.rollout.threads import CallDeadlineError, CallThreads
from asyncgrpo_core.rollout.tools import FailureWatch, call_within, check_tools

Factory = Callable[[], Any]

ROUTE_COLUMN = "environment"
_RESERVED = ("reset", "get_reward")
# The policy has no part in reset() and get_reward(): half of them failing is a broken environment.
_FAILURE_LIMIT, _FAILURE_WINDOW = 0.5, 32


class EnvironmentFailedError(RolloutError):
    """An environment's reset(), get_reward() or constructor raised or timed out: this rollout's group fails."""


@dataclass
class EnvironmentLease:
    """One environment instance in the hands of one rollout; `tools` are its public methods."""

    name: str | None  # its name in the dict of factories; None with a single factory
    instance: Any
    tools: list[Callable[..., Any]]
    reset_s: float = 0.0
    reward_s: float | None = None  # None when the environment does not score
    intact: bool = field(default=True)  # may be used by another rollout afterwards


class EnvironmentPool:
    """Makes, lends and takes back environments.

    Args:
        factory: makes an environment, or a dict of such by name; a row's "environment" column says which.
        threads: where constructors, sync reset() and get_reward() run.
        timeout_s: deadline of each of them.
    """

    def __init__(self, factory: Factory | dict[str, Factory], threads: CallThreads, timeout_s: float) -> None:
        self._routed = isinstance(factory, dict)
        self._factories: dict[Any, Factory] = dict(factory) if isinstance(factory, dict) else {None: factory}
        self._threads = threads
        self._timeout_s = timeout_s
        self._idle: dict[Any, list[Any]] = {name: [] for name in self._factories}
        self._watch = FailureWatch(
            _FAILURE_LIMIT, _FAILURE_WINDOW, fix="Repair the environment, or what it talks to; see the worker's log."
        )
        self.created = 0

    async def prepare(self, other_tools: Sequence[Callable[..., Any]] = ()) -> list[type]:
        """Make one instance of every environment and check its tools; they are used by the first rollouts.

        Args:
            other_tools: the trainer's own tools, offered beside each environment's.

        Returns:
            The classes of the environments that score themselves (have get_reward).

        Raises:
            ConfigError: an environment cannot be made, has no reset(), or a method that cannot be described as a tool.
        """
        scoring = []
        for name, factory in self._factories.items():
            where = "environment_factory" if name is None else f"environment_factory[{name!r}]"
            try:
                instance = await self._make(factory)
            except Exception as error:
                raise ConfigError(
                    f"{where} could not make an environment: {type(error).__name__}: {error}.",
                    "It is called without arguments, in the rollout process, which sees no GPU.",
                ) from error
            if not callable(getattr(instance, "reset", None)):
                raise ConfigError(
                    f"{where} made a {type(instance).__name__} without a reset() method.",
                    "Define `def reset(self, **kwargs) -> str | None`.",
                )
            check_tools([*other_tools, *public_methods(instance)])
            if callable(getattr(instance, "get_reward", None)):
                scoring.append(type(instance))
            self._idle[name].append(instance)
        return scoring

    async def lease(self, row: dict[str, Any]) -> EnvironmentLease:
        """An environment for one rollout of this row.

        Raises:
            DataError: the row names no environment, or one that there is no factory for.
            EnvironmentFailedError: it could not be made.
        """
        name = self._name_of(row)
        idle = self._idle[name]
        if idle:
            instance = idle.pop()
        else:
            try:
                instance = await self._make(self._factories[name])
            except Exception as error:
                raise self._failed(f"The environment {self._title(name)} could not be made", error) from error
        return EnvironmentLease(name, instance, public_methods(instance))

    def give_back(self, lease: EnvironmentLease) -> None:
        if lease.intact:
            self._idle[lease.name].append(lease.instance)

    async def reset(self, lease: EnvironmentLease, row: dict[str, Any]) -> str | None:
        """Start an episode with the row's columns; what reset() returned.

        Raises:
            EnvironmentFailedError: it raised or timed out.
            ConfigError: it returned something that is neither None nor a string.
        """
        started = time.monotonic()
        observation = await self._guarded(lease, "reset", reset_arguments(lease.instance.reset, row))
        lease.reset_s = time.monotonic() - started
        if observation is not None and not isinstance(observation, str):
            raise ConfigError(
                f"{type(lease.instance).__name__}.reset() returned {observation!r:.80}.", "Return None or a string."
            )
        return observation

    async def reward(self, lease: EnvironmentLease) -> tuple[type, float] | None:
        """(class, reward) of a finished episode; None when the environment does not score.

        Raises:
            EnvironmentFailedError: get_reward() raised or timed out.
        """
        if not callable(getattr(lease.instance, "get_reward", None)):
            return None
        started = time.monotonic()
        reward = await self._guarded(lease, "get_reward", {})
        lease.reward_s = time.monotonic() - started
        return type(lease.instance), reward

    async def _guarded(self, lease: EnvironmentLease, method: str, arguments: dict[str, Any]) -> Any:
        title = f"{type(lease.instance).__name__}.{method}()"
        was_intact, lease.intact = lease.intact, False  # also when this rollout is cancelled meanwhile
        try:
            result = await call_within(getattr(lease.instance, method), arguments, self._threads, self._timeout_s)
        except Exception as error:
            raise self._failed(title, error) from error
        self._watch.record(title, None)
        lease.intact = was_intact
        return result

    async def _make(self, factory: Factory) -> Any:
        self.created += 1
        return await self._threads.run(factory, self._timeout_s)

    def _failed(self, title: str, error: Exception) -> EnvironmentFailedError:
        what = str(error) if isinstance(error, CallDeadlineError) else f"{type(error).__name__}: {error}"
        self._watch.record(title, what)
        return EnvironmentFailedError(f"{title} failed: {what}.", "The group is generated again, at most twice.")

    def _name_of(self, row: dict[str, Any]) -> str | None:
        if not self._routed:
            return None
        name = row.get(ROUTE_COLUMN)
        if name not in self._factories:
            what = f"names the environment {name!r}" if name is not None else f'has no "{ROUTE_COLUMN}"'
            raise DataError(
                f"A dataset row {what}; environment_factory knows {sorted(map(str, self._factories))}.",
                f'Correct the "{ROUTE_COLUMN}" column, or add the factory.',
            )
        return name

    def _title(self, name: str | None) -> str:
        factory = self._factories[name]
        return repr(name) if name is not None else getattr(factory, "__name__", repr(factory))


def public_methods(instance: Any) -> list[Callable[..., Any]]:
    """An environment's tools: its public methods but `reset` and `get_reward`, in alphabetical order.

    Only what Python code defines with `def`: no property is run, and an environment derived from dict does not offer
    dict's own methods to the model.
    """
    return [getattr(instance, name) for name in _method_names(type(instance))]


def offers_tools(factory: Any) -> bool:
    """Whether any environment of `factory` (or of a dict of such) has tools; a factory that is no class may have."""
    every = factory.values() if isinstance(factory, dict) else [factory]
    return any(not isinstance(one, type) or bool(_method_names(one)) for one in every)


def _method_names(cls: type) -> list[str]:
    kinds = (types.FunctionType, staticmethod, classmethod)
    names = [name for name in dir(cls) if not name.startswith("_") and name not in _RESERVED]
    return [name for name in names if isinstance(inspect.getattr_static(cls, name), kinds)]


def reset_arguments(reset: Callable[..., Any], row: dict[str, Any]) -> dict[str, Any]:
    """The row's columns as keyword arguments of reset(), without the routing column.

    "prompt" is passed like every column, except to a reset() that has no place for it.
    """
    arguments = {name: value for name, value in row.items() if name != ROUTE_COLUMN}
    parameters = inspect.signature(reset).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if "prompt" in arguments and "prompt" not in parameters and not takes_any:
        del arguments["prompt"]
    return arguments


def opening_messages(
    row_prompt: list[dict[str, Any]] | None, observation: str | None, title: str
) -> list[dict[str, Any]]:
    """The prompt of a rollout: the row's, with what reset() returned at the end of its last user message.

    Without a prompt in the row, what reset() returned is the user's message.

    Raises:
        DataError: neither gives a prompt, or the prompt has no user message to append to.
    """
    if row_prompt is None:
        if observation is None:
            raise DataError(
                f"The dataset row has no prompt and {title}.reset() returned None.",
                'Return the prompt from reset(), or give the dataset a "prompt" column.',
            )
        return [{"role": "user", "content": observation}]
    if observation is None:
        return list(row_prompt)
    last = max((i for i, message in enumerate(row_prompt) if message["role"] == "user"), default=None)
    if last is None:
        raise DataError(
            f"{title}.reset() returned text, but the row's prompt has no user message to append it to.",
            "Add a user message to the prompt, or return None.",
        )
    messages = list(row_prompt)
    content = messages[last].get("content")
    if isinstance(content, list):
        content = [*content, {"type": "text", "text": observation}]
    else:
        content = f"{content or ''}{observation}"
    messages[last] = {**messages[last], "content": content}
    return messages
