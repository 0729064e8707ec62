"""Errors of the config file as one paragraph: the key, its value, what is expected, and the fix."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ValidationError

from asyncgrpo_core.errors import AsyncGRPOError, ConfigError

MAX_SHOWN = 3  # errors spelled out in one message; the rest are counted


def nearest(key: str, valid: Iterable[str], prefix: str = "") -> str:
    """The sentence that helps with an unknown key. Example: "Did you mean `training.learning_rate`?"."""
    valid = sorted(valid)
    close = difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
    if close:
        return f"Did you mean `{prefix}{close[0]}`?"
    shown = ", ".join(valid[:12]) + (", ..." if len(valid) > 12 else "")
    return f"Valid keys: {shown}."


def explain_validation_error(exc: ValidationError, model: type[BaseModel], source: str) -> AsyncGRPOError:
    """Turn pydantic's error list into one `ConfigError` whose message is a single paragraph.

    Args:
        exc: what pydantic raised.
        model: the model it was parsed with, to find the nearest valid key.
        source: where the values come from, named at the start of the message.
    """
    errors = exc.errors()
    own = next((e["ctx"]["error"] for e in errors if isinstance(e.get("ctx", {}).get("error"), AsyncGRPOError)), None)
    if own is not None:  # one of our own checks: it has said everything already
        return type(own)(f"{source}: {own.message}", own.fix)
    sentences = [_sentence(error, model) for error in _merge_unions(errors)]
    more = len(sentences) - MAX_SHOWN
    text = " ".join(sentences[:MAX_SHOWN]) + (f" ({more} more.)" if more > 0 else "")
    return ConfigError(f"{source}: {text}")


def _merge_unions(errors: list[Any]) -> list[Any]:
    """Keep one error per key: a union reports one for each of its members."""
    seen: dict[tuple, Any] = {}
    for error in errors:
        seen.setdefault(_keys(error["loc"]), error)
    return list(seen.values())


def _keys(loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """`loc` without the member names that pydantic adds for unions ("str", "list[str]", "function-after[...]")."""
    union_members = {"str", "int", "float", "bool", "none"}
    return tuple(
        part
        for i, part in enumerate(loc)
        if not (isinstance(part, str) and ("[" in part or (i == len(loc) - 1 and i and part in union_members)))
    )


def _sentence(error: dict[str, Any], model: type[BaseModel]) -> str:
    keys = _keys(error["loc"])
    path = ".".join(str(k) for k in keys) or "the file"
    kind = error["type"]
    if kind == "extra_forbidden":
        section, parents = _section(model, keys[:-1])
        known = nearest(str(keys[-1]), section.model_fields, prefix="".join(f"{p}." for p in parents))
        return f"`{path}` is no key of a run's config. {known}"
    if kind == "missing":
        return f"`{path}` is required and not there: add it."
    expected = error["msg"].replace("Input should be", "expected").replace("Value error, ", "")
    expected = expected[0].lower() + expected[1:]
    return f"`{path}` = {_short(error.get('input'))}: {expected}; change `{path}`."


def _section(model: type[BaseModel], keys: tuple[int | str, ...]) -> tuple[type[BaseModel], list[str]]:
    """The pydantic model at a key path, and the path that was followed to it."""
    parents: list[str] = []
    for key in keys:
        field = model.model_fields.get(str(key))
        inner = _model_in(field.annotation) if field is not None else None
        if inner is None:
            break
        model = inner
        parents.append(str(key))
    return model, parents


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated):
        return next((m for a in typing.get_args(annotation) if (m := _model_in(a)) is not None), None)
    return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
