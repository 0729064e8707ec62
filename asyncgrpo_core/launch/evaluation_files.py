"""The records of the held-out evaluations: RUN/heldout/{before,after}.jsonl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def heldout_file(run_dir: Path, when: str) -> Path:
    """The file of the evaluation "before" or "after" training."""
    return run_dir / "heldout" / f"{when}.jsonl"


def read_heldout(run_dir: Path, when: str) -> list[dict[str, Any]]:
    """The records of one evaluation, one per prompt; empty when it was not made."""
    path = heldout_file(run_dir, when)
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_heldout(run_dir: Path, when: str, records: list[dict[str, Any]]) -> None:
    """Write the records of one evaluation; the file appears whole or not at all."""
    path = heldout_file(run_dir, when)
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_suffix(".tmp")
    tmp.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    tmp.replace(path)
