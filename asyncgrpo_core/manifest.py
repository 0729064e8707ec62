"""Which checkpoint folders are whole: the manifest in rollout_state.json against the files that are there.

Used by whoever looks for a checkpoint (trainer, launcher, tracker); stdlib only.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

STATE_NAME = "rollout_state.json"
_FOLDER = re.compile(r"checkpoint-(\d+)$")


def manifest_of(folder: Path) -> dict[str, int]:
    """Every file below a checkpoint folder except rollout_state.json itself: relative path -> bytes."""
    return {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(STATE_NAME)
    }


def problem_with(folder: Path) -> str | None:
    """Why a folder is not a whole checkpoint of this project; None when it is one."""
    path = folder / STATE_NAME
    if not path.is_file():
        return f"{path} is missing"
    try:
        content = json.loads(path.read_text())
        manifest = content["manifest"]
    except (ValueError, KeyError, TypeError) as error:
        return f"{path} cannot be read ({error})"
    for name, size in manifest.items():
        file = folder / name
        if not file.is_file():
            return f"{file} is missing"
        if file.stat().st_size != size:
            return f"{file} has {file.stat().st_size} bytes instead of {size}"
    return None


def newest_checkpoint(output_dir: Path) -> Path | None:
    """The newest whole checkpoint below a folder, or None."""
    found = []
    for path in output_dir.glob("checkpoint-*"):
        match = _FOLDER.search(path.name)
        if match and problem_with(path) is None:
            found.append((int(match.group(1)), path))
    return max(found)[1] if found else None
