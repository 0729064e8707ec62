"""RUN/guards/<name>.json: what a guard is doing, readable by whoever comes after it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from asyncgrpo_core.guard.process_table import ProcessId


@dataclass
class GuardRecord:
    """One guard's file. Written by the guard before the child starts, removed when nothing is left of it.

    `descendants` is refreshed every few seconds: a program that rewrites its title (vLLM's engine core does) can
    lose the environment mark, and then this list is what finds it.
    """

    name: str
    guard_id: str
    run_dir: str
    boot_id: str
    grace_s: float
    log: str
    owner: ProcessId
    guard: ProcessId
    state: str = "starting"  # starting, running, stopping
    child: ProcessId | None = None
    descendants: list[ProcessId] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return record_path(Path(self.run_dir), self.name)

    def write(self) -> None:
        """Replace the file in one step, so that a reader never sees half of it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(f".{self.guard_id}.tmp")
        draft.write_text(json.dumps(asdict(self), indent=1))
        os.replace(draft, self.path)

    def remove(self) -> None:
        """Delete the file unless another guard of the same name has replaced it meanwhile."""
        current = read_record(self.path)
        if current is not None and current.guard_id == self.guard_id:
            self.path.unlink(missing_ok=True)


def record_path(run_dir: Path, name: str) -> Path:
    return run_dir / "guards" / f"{name}.json"


def read_record(path: Path) -> GuardRecord | None:
    """The record in a file; None when the file is gone.

    Raises:
        ValueError: the file is not a record (json and shape errors alike).
    """
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    try:
        for key in ("owner", "guard", "child"):
            content[key] = None if content[key] is None else ProcessId(*content[key])
        content["descendants"] = [ProcessId(*p) for p in content["descendants"]]
        return GuardRecord(**content)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a guard record: {error}") from error
