"""The sample buffer between rollout worker and trainer: a folder of small files.

Why files: a multiprocessing.Queue loses what it holds when either side is killed, and can be left locked for ever.
Here a record is written under a temporary name and renamed, so it is either there as a whole or not at all; names
sort in writing order; each direction has one writer and one reader; nothing is locked.

    DIR/groups/<number>.group       worker -> trainer, one GroupRecord each
    DIR/regenerate/<number>.json    trainer -> worker, one slot to generate again each
    DIR/error.pickle                worker -> trainer, the exception that ended the worker
"""

from __future__ import annotations

import json
import os
import pickle
import time
import zlib
from pathlib import Path

from asyncgrpo_core.errors import RolloutError
from asyncgrpo_core.types import GroupRecord, Slot

_MAGIC = b"AGB1"
_HEADER = len(_MAGIC) + 4


def encode_record(record: GroupRecord) -> bytes:
    """GroupRecord -> file content: magic, CRC-32 of the rest (little endian), pickle."""
    payload = pickle.dumps(record, protocol=5)
    return _MAGIC + zlib.crc32(payload).to_bytes(4, "little") + payload


def read_record(path: Path) -> GroupRecord:
    """Read one record file. Raises RolloutError naming the file when it is cut off or not a record."""
    data = path.read_bytes()
    payload = data[_HEADER:]
    if data[:4] != _MAGIC or int.from_bytes(data[4:_HEADER], "little") != zlib.crc32(payload):
        raise RolloutError(
            f"The buffer file {path} ({len(data)} bytes) is cut off or not a group record.",
            "Delete the file; its prompt is generated again.",
        )
    record = pickle.loads(payload)
    if not isinstance(record, GroupRecord):
        raise RolloutError(
            f"The buffer file {path} holds a {type(record).__name__}, not a group record.", "Delete the file."
        )
    return record


class SampleBuffer:
    """Duplex spool of files; one worker writes groups, one trainer reads them.

    Args:
        directory: made when missing. Both sides give the same one.
    """

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        self._groups = self.directory / "groups"
        self._regenerate = self.directory / "regenerate"
        self._error = self.directory / "error.pickle"
        self._groups.mkdir(parents=True, exist_ok=True)
        self._regenerate.mkdir(parents=True, exist_ok=True)
        self._last_number = 0

    # worker side

    def put(self, record: GroupRecord) -> Path:
        """Hand one record to the trainer."""
        return self._write(self._groups, "group", encode_record(record))

    def take_regenerations(self) -> list[tuple[Slot, int]]:
        """The (slot, generation) pairs that the trainer asked for since the last call, oldest first."""
        out = []
        for path in _sorted_files(self._regenerate, ".json"):
            wanted = json.loads(path.read_text())
            out.append((Slot(*wanted["slot"]), int(wanted["generation"])))
            path.unlink()
        return out

    def put_error(self, error: BaseException, traceback_text: str) -> None:
        """Leave the exception that ended the worker for the trainer."""
        try:
            payload = pickle.dumps((error, traceback_text))
            pickle.loads(payload)  # an exception may pickle and still not unpickle
        except Exception:  # any exception of user code may do anything when it is pickled
            payload = pickle.dumps((RolloutError(f"{type(error).__name__}: {error}"), traceback_text))
        temporary = self._error.with_suffix(".tmp")
        temporary.write_bytes(payload)
        os.replace(temporary, self._error)

    # trainer side

    def take(self, max_records: int | None = None) -> list[GroupRecord]:
        """Records in writing order, removed as they are read.

        Raises:
            RolloutError: a file is unreadable; it stays where it is and the message names it.
        """
        out = []
        for path in self.pending_files()[:max_records]:
            out.append(read_record(path))
            path.unlink()
        return out

    def request_regeneration(self, slot: Slot, generation: int) -> None:
        """Ask the worker to generate a slot again, as its `generation`-th repetition."""
        content = json.dumps({"slot": [int(x) for x in slot], "generation": int(generation)})
        self._write(self._regenerate, "json", content.encode())

    def pending_files(self) -> list[Path]:
        """Files of the records not yet taken, oldest first."""
        return _sorted_files(self._groups, ".group")

    def take_error(self) -> tuple[BaseException, str] | None:
        """The worker's last exception and its traceback, removed as it is read; None when it left none."""
        if not self._error.exists():
            return None
        error, text = pickle.loads(self._error.read_bytes())
        self._error.unlink()
        return error, text

    def clear(self) -> None:
        """Remove every record, regeneration request and error."""
        for folder in (self._groups, self._regenerate):
            for path in folder.iterdir():
                path.unlink()
        self._error.unlink(missing_ok=True)

    @property
    def size(self) -> int:
        """Number of records not yet taken."""
        return sum(1 for entry in os.scandir(self._groups) if entry.name.endswith(".group"))

    def _write(self, folder: Path, suffix: str, content: bytes) -> Path:
        if self._last_number == 0:  # a restarted writer goes on after what its predecessor left
            present = _sorted_files(folder, f".{suffix}")
            self._last_number = int(present[-1].stem) if present else 0
        self._last_number = max(self._last_number + 1, time.time_ns())
        path = folder / f"{self._last_number:020d}.{suffix}"
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(content)
        os.replace(temporary, path)
        return path


def _sorted_files(folder: Path, suffix: str) -> list[Path]:
    return [folder / name for name in sorted(os.listdir(folder)) if name.endswith(suffix)]
