"""Rows of a run: from an import path, a file or the hub, checked to be conversational."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncgrpo_core.errors import AsyncGRPOError, DataError
from asyncgrpo_core.launch.config import DATA_FILES, IMPORT_PATH, DataSection
from asyncgrpo_core.launch.imports import import_object
from asyncgrpo_core.launch.row_shape import RowShape, shaped
from asyncgrpo_core.rollout.prompts import check_no_images, check_prompt

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

MAX_CHECKED = 20_000  # rows looked at before a run starts
Row = dict[str, Any]


def load_train_dataset(data: DataSection, *, needs_prompt: bool = True) -> Dataset | IterableDataset:
    """The training rows, their conversation in the column `prompt`.

    Args:
        data: the config's section; `train` is set.
        needs_prompt: False when an environment makes the prompts.

    Raises:
        ConfigError: the source cannot be found or imported.
        DataError: no rows, no prompt column, or a prompt that is no conversation.
    """
    from datasets import Dataset, IterableDataset  # slow to import

    assert data.train is not None
    rows = _load(data.train, data.train_args, data.train_split, data, "data.train", streaming=data.streaming)
    dataset = rows if isinstance(rows, Dataset | IterableDataset) else Dataset.from_list(rows)
    dataset = shaped(dataset, data)
    sample = dataset.take(100) if isinstance(dataset, IterableDataset) else dataset
    check_rows(sample, "data.train", needs_prompt=needs_prompt)
    return dataset


def load_heldout_rows(data: DataSection, n: int) -> list[Row]:
    """The first `n` held-out rows, their conversation in the column `prompt`; empty when there are none to use.

    Raises:
        ConfigError, DataError: as `load_train_dataset`.
    """
    if data.heldout is None or n == 0:
        return []
    rows = _load(data.heldout, data.heldout_args, data.heldout_split, data, "data.heldout")
    shape = RowShape(data)
    taken: list[Row] = []
    for row in rows:
        if len(taken) == n:
            break
        taken.append(shape(row))
    check_rows(taken, "data.heldout")
    return taken


def check_source(data: DataSection, key: str, *, needs_prompt: bool) -> None:
    """Look at the rows of `data.train` or `data.heldout` without making a `datasets.Dataset` of them.

    Raises:
        ConfigError, DataError: as `load_train_dataset`.
    """
    args, split = getattr(data, f"{key}_args"), getattr(data, f"{key}_split")
    rows = _load(getattr(data, key), args, split, data, f"data.{key}")
    check_rows(map(RowShape(data), rows), f"data.{key}", needs_prompt=needs_prompt)


def check_rows(rows: Iterable[Row], key: str, *, needs_prompt: bool = True) -> None:
    """Check that there are rows and that every prompt is a conversation.

    Raises:
        DataError: names the row, what it holds and what is expected.
    """
    number = -1
    for number, row in enumerate(rows):
        if number >= MAX_CHECKED:
            return
        check_no_images(row, f"row {number} of `{key}`")
        if "prompt" in row:
            check_prompt(row["prompt"], f"row {number} of `{key}`")
        elif needs_prompt:
            raise DataError(
                f"`{key}` has no column 'prompt': its columns are {sorted(row)}.",
                "Name the column that holds the conversation in data.prompt_column, or make the prompt of other "
                'columns with data.prompt_template: [{role: user, content: "{question}"}].',
            )
    if number < 0:
        raise DataError(f"`{key}` has no rows.", "Give at least one row.")


def _load(
    source: str, args: dict[str, Any], split: str, data: DataSection, key: str, *, streaming: bool = False
) -> Any:
    if IMPORT_PATH.match(source):
        return _call(import_object(source, key), args, source, key)
    if source.endswith(DATA_FILES):
        path = Path(source).expanduser()
        if not path.is_file():
            raise DataError(f"`{key}` = {source!r}: there is no such file.", "Check the path.")
        return _stream_file(path) if streaming else _read_file(path, key)
    return _from_hub(source, split, data.revision, key, streaming)


def _call(function: Any, args: dict[str, Any], source: str, key: str) -> Any:
    if not callable(function):
        raise DataError(f"`{key}` = {source!r} is a {type(function).__name__}, not a function.", "Name a function.")
    try:
        rows = function(**args)
    except AsyncGRPOError:
        raise
    except Exception as exc:
        raise DataError(
            f"`{key}`: {source} with the arguments {args} failed with {type(exc).__name__}: {exc}.",
            f"Correct the function, or {key}_args.",
        ) from exc
    if not hasattr(rows, "__iter__") or isinstance(rows, str | bytes | dict):
        raise DataError(
            f"`{key}`: {source} returned a {type(rows).__name__}.", "Return a list of dicts or a datasets.Dataset."
        )
    if isinstance(rows, list | tuple) and not all(isinstance(row, dict) for row in rows):
        raise DataError(f"`{key}`: {source} returned rows that are no dicts.", "Return a list of dicts.")
    return list(rows) if isinstance(rows, tuple) else rows


def _read_file(path: Path, key: str) -> list[Row]:
    if path.suffix == ".parquet":
        return _read_parquet(path, key)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise DataError(f"`{key}`: {path} cannot be read: {exc}.", "Give a UTF-8 text file.") from exc
    if path.suffix == ".csv":
        return [_parse_csv_row(row) for row in csv.DictReader(text.splitlines(keepends=True))]
    if path.suffix == ".json":
        rows = _parse_json(text, f"{path}", key)
        if not isinstance(rows, list):
            raise DataError(f"`{key}`: {path} holds no list of rows.", "Write [{...}, {...}], or one row a line.")
        return rows
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            row = _parse_json(line, f"line {number} of {path}", key)
            if not isinstance(row, dict):
                raise DataError(f"`{key}`: line {number} of {path} is no JSON object.", "Write one {...} a line.")
            rows.append(row)
    return rows


def _read_parquet(path: Path, key: str) -> list[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, pyarrow.ArrowException) as exc:
        raise DataError(f"`{key}`: {path} is no readable parquet file: {exc}.", "Write it again.") from exc


def _parse_json(text: str, where: str, key: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as exc:
        raise DataError(f"`{key}`: {where} is no JSON: {exc}.", "Correct it.") from None


def _parse_csv_row(row: Row) -> Row:
    """A cell that starts with '[' is a conversation written as JSON."""
    return {k: json.loads(v) if isinstance(v, str) and v.startswith("[{") else v for k, v in row.items()}


def _stream_file(path: Path) -> Any:
    from datasets import load_dataset

    kind = {".csv": "csv", ".parquet": "parquet"}.get(path.suffix, "json")
    return load_dataset(kind, data_files=str(path), split="train", streaming=True)


def _from_hub(source: str, split: str, revision: str | None, key: str, streaming: bool) -> Any:
    from datasets import load_dataset

    try:
        return load_dataset(source, split=split, revision=revision, streaming=streaming)
    except Exception as exc:
        raise DataError(
            f"`{key}` = {source!r} is no import path and no data file, and the hub gave {type(exc).__name__}: "
            f"{' '.join(str(exc).split())[:300]}.",
            f"Use pkg.mod:function, a {'/'.join(DATA_FILES)} file, or a hub data set that has the split {split!r}.",
        ) from exc
