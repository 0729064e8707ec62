"""Keep docs/parity.md true: `python docs/parity.py` writes its test column anew from the ids in tests/.

A row of the table is one requirement of the reference. Its id (F023) stands in the name or docstring of every test
that shows it; this script collects them. `--check` only says whether the file is up to date (a test runs it).
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "parity.md"
_ID = re.compile(r"(?<![A-Za-z0-9])[Ff](\d{3})(?!\d)")
_ROW = re.compile(r"^\| (F\d{3}) \|")


def tests_by_row(tests: Path) -> dict[str, set[str]]:
    """Row id -> names of the test files that name it."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted(tests.rglob("test_*.py")):
        for number in _ID.findall(path.read_text(encoding="utf-8")):
            found[f"F{number}"].add(path.relative_to(tests).as_posix())
    return found


def render(page: str, found: dict[str, set[str]]) -> str:
    """The page with its last column (tests) replaced."""
    lines = []
    for line in page.splitlines():
        match = _ROW.match(line)
        if match:
            cells = line.split(" | ")
            tests = ", ".join(f"`{name}`" for name in sorted(found.get(match.group(1), ()))) or "-"
            line = " | ".join([*cells[:-1], f"{tests} |"])
        lines.append(line)
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> int:
    page = PAGE.read_text(encoding="utf-8")
    wanted = render(page, tests_by_row(ROOT / "tests"))
    if "--check" in argv:
        return 0 if page == wanted else 1
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
