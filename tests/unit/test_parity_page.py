"""docs/parity.md says which test shows which requirement, and it is up to date."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def parity():
    spec = importlib.util.spec_from_file_location("parity", ROOT / "docs" / "parity.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date():
    assert parity().main(["--check"]) == 0, "run `python docs/parity.py` and commit docs/parity.md"


def test_ids_are_found_in_names_and_docstrings_but_not_inside_words(tmp_path):
    (tmp_path / "unit").mkdir()
    (tmp_path / "unit" / "test_a.py").write_text('"""Rows F001, F002."""\ndef test_f003_x(): ...\n# xF004, F0055\n')
    assert parity().tests_by_row(tmp_path) == {name: {"unit/test_a.py"} for name in ("F001", "F002", "F003")}


def test_the_last_column_is_replaced():
    page = "| F001 | a | b | 1 | old |\n| F002 | c | 2 | old |\n"
    assert parity().render(page, {"F001": {"t.py"}}) == "| F001 | a | b | 1 | `t.py` |\n| F002 | c | 2 | - |\n"
