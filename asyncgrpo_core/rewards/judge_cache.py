"""Replies of a judge, remembered in memory and, when given a path, in an sqlite file that later runs use too."""

from __future__ import annotations

import hashlib
import json
import logging
import sqlite3
import threading
from collections import OrderedDict
from typing import Any

from asyncgrpo_core.errors import ConfigError

logger = logging.getLogger(__name__)

_TABLE = "create table if not exists replies (key text primary key, reply text not null) without rowid"


def cache_key(*parts: Any) -> str:
    """A digest of JSON values: whatever the reply depends on."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class ReplyCache:
    """key -> the judge's reply as text. Safe from several threads; several processes may share one file.

    Args:
        size: replies kept in memory, the least recently used go first; 0 keeps none.
        path: sqlite file, made when it does not exist; nothing is ever removed from it.
    """

    def __init__(self, size: int, path: str | None) -> None:
        self._size = size
        self.path = path
        self._memory: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()
        self._file: sqlite3.Connection | None = None

    def get(self, key: str) -> str | None:
        """The reply, or None. Reads the file when the memory does not have it.

        Raises:
            ConfigError: the file cannot be opened as a cache.
        """
        with self._lock:
            if key in self._memory:
                self._memory.move_to_end(key)
                return self._memory[key]
            if self.path is None:
                return None
            found = self._open().execute("select reply from replies where key = ?", (key,)).fetchone()
            if found is None:
                return None
            self._remember(key, found[0])
            return found[0]

    def put(self, key: str, reply: str) -> None:
        """Remember a reply. A file that cannot be written (full disk) costs a warning, not the reply."""
        with self._lock:
            self._remember(key, reply)
            if self.path is None:
                return
            try:
                self._open().execute("insert or replace into replies values (?, ?)", (key, reply))
            except sqlite3.Error as error:
                logger.warning("the judge's cache %s cannot be written: %s", self.path, error)

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _remember(self, key: str, reply: str) -> None:
        self._memory[key] = reply
        self._memory.move_to_end(key)
        while len(self._memory) > self._size:
            self._memory.popitem(last=False)

    def _open(self) -> sqlite3.Connection:
        assert self.path is not None
        if self._file is None:
            try:
                # autocommit; calls come from several threads, one at a time
                connection = sqlite3.connect(self.path, timeout=10.0, isolation_level=None, check_same_thread=False)
                connection.execute("pragma journal_mode = wal")
                connection.execute("pragma synchronous = normal")
                connection.execute(_TABLE)
            except sqlite3.Error as error:
                raise ConfigError(
                    f"The judge's cache {self.path!r} cannot be opened: {error}.",
                    "Give cache_path a file in an existing, writable folder, or None.",
                ) from error
            self._file = connection
        return self._file
