"""From a YAML file and `--set` overrides to a checked `RunConfig`."""

from __future__ import annotations

import importlib.resources
import json
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from asyncgrpo_core.errors import ConfigError
from asyncgrpo_core.launch.config import RunConfig
from asyncgrpo_core.launch.explain import explain_validation_error


class _StrictLoader(yaml.SafeLoader):
    """YAML without its trap: a key that is there twice is refused instead of the last one winning."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is there twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def load_config(path: Path, overrides: list[str] | None = None) -> RunConfig:
    """Read a YAML (or JSON) config file and apply `a.b=c` overrides, whose values are YAML.

    Raises:
        ConfigError: the file cannot be read, is no YAML mapping, or does not describe a run.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"The config file {path} does not exist.", "Check the path.") from None
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"The config file {path} cannot be read: {exc}.", "Give a readable YAML file.") from exc
    return parse_config(parse_yaml(text, str(path)), overrides, source=str(path))


def quickstart_config(overrides: list[str] | None = None) -> RunConfig:
    """The embedded defaults of `asyncgrpo quickstart`, the same text as `examples/quickstart.yaml`."""
    return parse_config(parse_yaml(quickstart_text(), "quickstart"), overrides, source="quickstart")


def quickstart_text() -> str:
    return (importlib.resources.files("asyncgrpo_core.launch") / "quickstart.yaml").read_text(encoding="utf-8")


def parse_yaml(text: str, source: str) -> dict[str, Any]:
    """The mapping in a YAML text.

    Raises:
        ConfigError: it is no YAML, has a key twice, or is no mapping.
    """
    try:
        data = yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as exc:
        mark = getattr(exc, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "somewhere"
        problem = getattr(exc, "problem", None) or str(exc)
        raise ConfigError(f"{source} is no valid YAML: {where}: {problem}.", "Correct that line.") from None
    if not isinstance(data, dict):
        raise ConfigError(
            f"{source} holds {'nothing' if data is None else type(data).__name__}, not a mapping of keys.",
            "Start from examples/quickstart.yaml.",
        )
    return data


def parse_config(data: dict[str, Any], overrides: list[str] | None, *, source: str) -> RunConfig:
    """Apply the overrides and check everything.

    Raises:
        ConfigError: one paragraph that names the key, its value, what is expected and the nearest valid key.
    """
    for override in overrides or []:
        _apply(data, override)
    try:
        return RunConfig.model_validate(data)
    except ValidationError as exc:
        raise explain_validation_error(exc, RunConfig, source) from None


def _apply(data: dict[str, Any], override: str) -> None:
    key, sign, text = override.partition("=")
    path = key.strip().split(".")
    if not sign or not all(path):
        raise ConfigError(f"--set {override!r} is not of the form a.b=value.", "Example: --set training.max_steps=60.")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"--set {override!r}: {text!r} is no YAML value.", "Quote it.") from None
    for part in path[:-1]:
        inner = data.get(part)
        if inner is None:
            inner = data[part] = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {override!r}: `{part}` is {inner!r}, it has no keys.", "Check the key.")
        data = inner
    data[path[-1]] = value


def read_resolved(path: Path) -> RunConfig:
    """The resolved config of a run folder, as a child process reads it.

    Raises:
        ConfigError: the file is missing, damaged, or from another version of this project.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return RunConfig.model_validate(data)
    except OSError as exc:
        raise ConfigError(f"{path} cannot be read: {exc}.", "Give a run folder's config.resolved.json.") from exc
    except json.JSONDecodeError as exc:
        raise ConfigError(f"{path} is no JSON: {exc}.", "Start the run again from its config file.") from None
    except ValidationError as exc:
        raise explain_validation_error(exc, RunConfig, str(path)) from None
