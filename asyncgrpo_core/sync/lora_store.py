"""The folder from which servers load adapters: one sub-folder per policy version, each written whole or not at all.

    <output_dir>/.vllm_lora/<version>-<attempt>/adapter_model.safetensors, adapter_config.json

A path is never used twice (`<attempt>` is drawn anew by every start), so no server can read an older file from some
cache under it. It is a serving cache: checkpoints are what keeps the adapter (reference, 'Train adapters').
"""

from __future__ import annotations

import logging
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

from asyncgrpo_core.errors import WeightSyncError
from asyncgrpo_core.server.adapters import adapter_name

logger = logging.getLogger(__name__)

FOLDER = ".vllm_lora"


class AdapterStore:
    """Adapter folders of one attempt of a run.

    Args:
        output_dir: on a filesystem that the servers see under the same path.
        save: writes the policy's adapter as it is now under a folder; returns where exactly.

    Attributes:
        stem: what the names of this attempt's adapters begin with.
    """

    def __init__(self, output_dir: Path | str, save: Callable[[Path], Path]) -> None:
        self.directory = (Path(output_dir) / FOLDER).resolve()
        self._attempt = uuid.uuid4().hex[:8]
        self.stem = f"asyncgrpo-{self._attempt}"
        self._save = save
        self._folders: dict[str, Path] = {}

    def name(self, version: int) -> str:
        """What requests call a version."""
        return adapter_name(self.stem, version)

    def write(self, version: int | str) -> Path:
        """The folder of a version, written at the first call: all servers of a sync load the same one.

        Raises:
            WeightSyncError: it could not be written.
        """
        label = str(version)
        if label not in self._folders:
            self._folders[label] = self._written(label)
        return self._folders[label]

    def num_bytes(self, version: int | str) -> int:
        return sum(path.stat().st_size for path in self.write(version).iterdir())

    def delete(self, version: int | str) -> None:
        """Remove a version's folder. No request that names it may be running: an engine may read it again."""
        if self._folders.pop(str(version), None) is not None:
            _remove(self._place(str(version)))

    def owns(self, folder: str) -> bool:
        """Whether an adapter that a server lists was loaded from this cache, by this attempt or an earlier one."""
        return Path(folder).is_relative_to(self.directory)

    def clear_leftovers(self) -> None:
        """Remove what earlier attempts left. Their adapters must be unloaded everywhere by then."""
        if not self.directory.is_dir():
            return
        mine = {self._place(label) for label in self._folders}
        for path in self.directory.iterdir():
            if path not in mine:
                _remove(path)

    def _place(self, label: str) -> Path:
        return self.directory / f"{label}-{self._attempt}"

    def _written(self, label: str) -> Path:
        final = self._place(label)
        partial = self.directory / f".{final.name}.partial"
        try:
            partial.mkdir(parents=True)
            inner = self._save(partial)
            for path in [*partial.rglob("*"), partial]:
                _to_disk(path)
            partial.rename(final)
            _to_disk(self.directory)
        except OSError as error:
            _remove(partial)
            raise WeightSyncError(
                f"The adapter of policy version {label} could not be written to {final}: {error}.",
                "Free space there, or set another output_dir (trainer and servers must both see it).",
            ) from error
        return final / inner.relative_to(partial)


def _to_disk(path: Path) -> None:
    """Make a server on another host see the file as soon as it is told about it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    try:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s could not be removed: %s", path, error)
