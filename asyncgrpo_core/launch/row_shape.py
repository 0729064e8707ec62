"""Rows as training takes them: columns renamed, the prompt made from other columns where a template says so."""

from __future__ import annotations

import string
from typing import Any

from asyncgrpo_core.errors import DataError
from asyncgrpo_core.launch.config import DataSection
from asyncgrpo_core.launch.explain import nearest

Row = dict[str, Any]


class RowShape:
    """Applies `data.rename`, `data.prompt_column` and `data.prompt_template` to a row. Picklable.

    Example: rename {answer: solution}, template [{role: user, content: "{question}"}]:
    {"question": "1+1?", "answer": "2"} -> {"question": "1+1?", "solution": "2", "prompt": [{"role": "user",
    "content": "1+1?"}]}

    Raises:
        DataError: a column that the config names is not there, or a new name is taken.
    """

    def __init__(self, data: DataSection) -> None:
        self._names = dict(data.rename)
        if data.prompt_column != "prompt":
            self._names[data.prompt_column] = "prompt"
        self._template = data.prompt_template

    @property
    def names(self) -> dict[str, str]:
        """Old column name -> new one."""
        return self._names

    def __call__(self, row: Row) -> Row:
        return self.with_prompt(self.renamed(row))

    def renamed(self, row: Row) -> Row:
        check_renames(self._names, list(row))
        return {self._names.get(name, name): value for name, value in row.items()}

    def with_prompt(self, row: Row) -> Row:
        if self._template is None:
            return dict(row)
        if row.get("prompt") is not None:
            raise DataError(
                'The rows have a column "prompt", and data.prompt_template makes one too.', "Remove the template."
            )
        prompt = [{"role": m["role"], "content": fill(m["content"], row)} for m in self._template]
        return {**row, "prompt": prompt}


def fill(template: str, row: Row) -> str:
    """`template` with "{column}" replaced by the row's value as text.

    Raises:
        DataError: no such column, or a placeholder that is no plain column name.
    """
    out = []
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise DataError(
            f"data.prompt_template: {template!r} cannot be read: {error}.", "Double braces that stand for themselves."
        ) from None
    for text, column, spec, conversion in parts:
        out.append(text)
        if column is None:
            continue
        if column not in row or spec or conversion:
            raise DataError(
                f"data.prompt_template: {{{column}}} in {template!r} is no column; they are {sorted(row)}.",
                nearest(column, [*row]),
            )
        out.append(str(row[column]))
    return "".join(out)


def check_renames(names: dict[str, str], columns: list[str]) -> None:
    """Raise DataError when an old column does not exist or a new name is taken."""
    for old, new in names.items():
        if old not in columns:
            raise DataError(
                f"The rows have no column {old!r}, which data.rename or data.prompt_column names.",
                nearest(old, columns),
            )
        if new in columns and new not in names:
            raise DataError(f"There is a column {new!r} already, so {old!r} cannot get that name.", "Choose another.")


def shaped(dataset: Any, data: DataSection) -> Any:
    """The same for a whole `Dataset` or `IterableDataset`, lazily for the latter."""
    shape = RowShape(data)
    columns = dataset.column_names
    if shape.names:
        if columns is None:  # a stream that does not know its columns
            dataset = dataset.map(shape.renamed, remove_columns=list(shape.names))
        else:
            check_renames(shape.names, columns)
            dataset = dataset.rename_columns(shape.names)
    return dataset if data.prompt_template is None else dataset.map(shape.with_prompt)
