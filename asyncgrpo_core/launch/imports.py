"""Resolve import paths (`pkg.mod:name`) and package folders (`package://pkg.mod/folder`)."""

from __future__ import annotations

import importlib
import importlib.util
import traceback
from pathlib import Path
from typing import Any

from asyncgrpo_core.errors import ConfigError
from asyncgrpo_core.launch.explain import nearest


def import_object(path: str, key: str) -> Any:
    """The object at `pkg.mod:name`.

    Args:
        path: the import path.
        key: the config key it comes from, for the message.

    Raises:
        ConfigError: the module does not exist, fails while it is imported, or has no such name.
    """
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as exc:
        missing = exc.name or module_name
        if module_name == missing or module_name.startswith(missing + "."):
            raise ConfigError(
                f"`{key}` = {path!r}: there is no module {missing!r}.",
                "Start the command in the folder that holds it, or install its package into this environment.",
            ) from None
        raise ConfigError(
            f"`{key}` = {path!r}: importing {module_name} needs the module {missing!r}, which is not there.",
            f"Install {missing} into this environment.",
        ) from exc
    except Exception as exc:
        where = traceback.extract_tb(exc.__traceback__)[-1]
        raise ConfigError(
            f"`{key}` = {path!r}: importing {module_name} failed with {type(exc).__name__}: {exc} "
            f"({where.filename}, line {where.lineno}).",
            "Correct that module.",
        ) from exc
    try:
        return getattr(module, name)
    except AttributeError:
        public = [n for n in vars(module) if not n.startswith("_")]
        raise ConfigError(
            f"`{key}` = {path!r}: {module_name} has no {name!r}.", nearest(name, public, f"{module_name}:")
        ) from None


def resolve_model_path(path: str) -> str:
    """A model path as transformers and vLLM take it: an absolute folder, or a hub id.

    Raises:
        ConfigError: a folder that does not exist, or a package that is not installed.
    """
    if path.startswith("package://"):
        return str(_package_folder(path))
    folder = Path(path).expanduser()
    if folder.is_dir():
        return str(folder.resolve())
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if looks_local or folder.exists():
        raise ConfigError(
            f"`model.path` = {path!r}: there is no such folder (looked at {folder.absolute()}).",
            "Give a folder made by save_pretrained, or a hub id like Qwen/Qwen3-0.6B.",
        )
    return path


def _package_folder(path: str) -> Path:
    package, _, rest = path.removeprefix("package://").partition("/")
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"`model.path` = {path!r}: there is no package {package!r}.", "Install it.")
    folder = Path(next(iter(spec.submodule_search_locations))) / rest
    if not folder.is_dir():
        raise ConfigError(
            f"`model.path` = {path!r}: {folder} does not exist.", "Install the package with its data files."
        )
    return folder
