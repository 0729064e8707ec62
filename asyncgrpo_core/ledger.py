"""`ledger.sqlite`: what happened to every prompt slot and every sample, written by the process that knows.

    SlotBook ── rows ──► LedgerWriter.write ──► thread ──► sqlite ──► counts ──► run_summary.json

WAL with synchronous=NORMAL: a SIGKILL at any point leaves the last committed batch, readers never wait for the writer.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from asyncgrpo_core.errors import CheckpointError, LedgerError
from asyncgrpo_core.ledger_counts import CountsReader, audit, counts
from asyncgrpo_core.ledger_schema import (
    INSERT_SAMPLE,
    INSERT_SLOT,
    SCHEMA,
    LedgerRow,
    SampleRow,
    SlotRow,
    last_seq,
    last_seq_of,
)

__all__ = ["CountsReader", "LedgerRow", "LedgerWriter", "SampleRow", "SlotRow", "audit", "counts", "last_seq"]


class LedgerWriter:
    """The writing side: rows go to a thread that commits them in batches; the caller never waits for the disk.

    Opening starts a new attempt and rolls back what the previous attempts wrote after `checkpoint_seq`. Give the
    SlotBook `last_seq` afterwards (`book.continue_after(writer.last_seq)`): sequence numbers are never used twice.

    Args:
        path: the ledger file, made if it does not exist.
        num_rows: length of the training dataset; None when it is not known (a stream).
        checkpoint_seq: `ledger_seq` of the rollout_state.json that this attempt continues from; 0 = from the start.
        snapshot: the ledger's copy inside that checkpoint. Used when the file at `path` is missing or older than the
            checkpoint (a resume on an empty disk).
        every_s: seconds between two commits.

    Raises:
        CheckpointError: the ledger does not reach `checkpoint_seq` and there is no snapshot that does.
        LedgerError: the file cannot be opened or is no ledger.
    """

    def __init__(
        self,
        path: Path,
        *,
        num_rows: int | None,
        checkpoint_seq: int = 0,
        snapshot: Path | None = None,
        every_s: float = 0.5,
    ) -> None:
        self.path = Path(path)
        self._every_s = every_s
        self._rows: list[LedgerRow] = []
        self._written = 0
        self._accepted = 0
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._closing = False
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._restore(checkpoint_seq, snapshot)
            self.attempt, self.last_seq = self._begin_attempt(num_rows, checkpoint_seq)
        except sqlite3.DatabaseError as error:
            raise LedgerError(
                f"The ledger {self.path} cannot be used: {error}.",
                "Check the disk and its free space; if the file is damaged, move it away and resume from a checkpoint.",
            ) from error
        self._thread = threading.Thread(target=self._run, name="ledger-writer", daemon=True)
        self._thread.start()

    def write(self, rows: Iterable[LedgerRow]) -> None:
        """Queue rows; they are on disk after the next commit (`every_s`) or `flush`."""
        with self._changed:
            if self._closing:
                raise LedgerError(f"The ledger {self.path} is closed.", "Write before close().")
            before = len(self._rows)
            self._rows.extend(rows)
            self._accepted += len(self._rows) - before

    def flush(self, timeout_s: float = 30.0) -> None:
        """Wait until everything written so far is on disk.

        Raises:
            LedgerError: not within `timeout_s` seconds; names what the disk said.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            target = self._accepted
            self._changed.notify_all()
            while self._written < target:
                left = deadline - time.monotonic()
                if left <= 0 or not self._thread.is_alive():
                    cause = f": {self._error}" if self._error else ""
                    raise LedgerError(
                        f"{target - self._written} rows of {self.path} were not written in {timeout_s:.0f} s{cause}.",
                        "Check the free space and the speed of the disk that holds the run folder.",
                    ) from self._error
                self._changed.wait(min(left, 0.2))
                self._changed.notify_all()

    def snapshot(self, path: Path, timeout_s: float = 60.0) -> None:
        """Copy the ledger, as of now, to `path` (for a checkpoint that may be resumed on an empty disk)."""
        self.flush(timeout_s)
        with (
            closing(sqlite3.connect(self.path, timeout=timeout_s)) as source,
            closing(sqlite3.connect(path)) as target,
        ):
            source.backup(target)
            target.execute("PRAGMA journal_mode = DELETE")  # one file, no -wal beside it

    def close(self, timeout_s: float = 30.0) -> None:
        """Write what is left and stop the thread. Idempotent."""
        with self._changed:
            already = self._closing
            self._closing = True
            self._changed.notify_all()
        if already:
            return
        try:
            self.flush(timeout_s)
        finally:
            self._thread.join(timeout_s)

    # -- thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        connection = self._connect()
        with closing(connection):
            while True:
                with self._changed:
                    if not self._rows and not self._closing:
                        self._changed.wait(self._every_s)
                    if self._closing and not self._rows:
                        return
                    rows = list(self._rows)
                failed = self._commit(connection, rows) if rows else None
                with self._changed:
                    self._error = failed
                    if rows and failed is None:
                        del self._rows[: len(rows)]
                        self._written += len(rows)
                        self._changed.notify_all()
                    if failed is not None and self._closing:
                        return
                    if not self._closing:
                        self._changed.wait(self._every_s)  # gather a batch; flush and close cut it short

    def _commit(self, connection: sqlite3.Connection, rows: list[LedgerRow]) -> Exception | None:
        """Write one batch in one transaction. A failure is kept for flush() and the batch is tried again."""
        stamp = (self.attempt, time.time())
        try:
            with connection:
                connection.executemany(INSERT_SLOT, [(*r, *stamp) for r in rows if isinstance(r, SlotRow)])
                connection.executemany(INSERT_SAMPLE, [(*r, *stamp) for r in rows if isinstance(r, SampleRow)])
        except sqlite3.Error as error:
            return error
        return None

    # -- opening --------------------------------------------------------------------------------------------------

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=10.0)
        mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        # Where the file system cannot do WAL (some network mounts) sqlite keeps a rollback journal: then FULL.
        connection.execute(f"PRAGMA synchronous = {'NORMAL' if mode == 'wal' else 'FULL'}")
        return connection

    def _restore(self, checkpoint_seq: int, snapshot: Path | None) -> None:
        have = last_seq(self.path)
        if have >= checkpoint_seq:
            return
        if snapshot is None or last_seq(snapshot) < checkpoint_seq:
            raise CheckpointError(
                f"The ledger {self.path} ends at row {have}, but the checkpoint was written at row {checkpoint_seq}.",
                "Resume from a checkpoint that holds its own ledger.sqlite, or from an older checkpoint.",
            )
        with closing(sqlite3.connect(snapshot)) as source, closing(sqlite3.connect(self.path)) as target:
            source.backup(target)

    def _begin_attempt(self, num_rows: int | None, checkpoint_seq: int) -> tuple[int, int]:
        with closing(self._connect()) as connection:
            connection.executescript(SCHEMA)
            with connection:
                # The attempt itself takes a number, so that every later checkpoint tells which attempt it is of.
                first = last_seq_of(connection) + 1
                previous = connection.execute("SELECT coalesce(max(attempt), 0) FROM attempts").fetchone()[0]
                attempt = previous + 1
                of_checkpoint = connection.execute(
                    "SELECT coalesce(max(attempt), 0) FROM attempts WHERE first_seq <= ?", (checkpoint_seq,)
                ).fetchone()[0]
                for table in ("slot_events", "sample_events"):
                    # A checkpoint of a branch that a later attempt had abandoned: what it holds counts again.
                    connection.execute(
                        f"UPDATE {table} SET rolled_back = 0 WHERE seq <= ? AND rolled_back > ?",
                        (checkpoint_seq, of_checkpoint),
                    )
                    connection.execute(
                        f"UPDATE {table} SET rolled_back = ? WHERE seq > ? AND rolled_back = 0",
                        (attempt, checkpoint_seq),
                    )
                connection.execute(
                    "INSERT INTO attempts VALUES (?, ?, ?, ?)", (attempt, time.time(), checkpoint_seq, first)
                )
                connection.execute("INSERT OR REPLACE INTO meta VALUES ('num_rows', ?)", (num_rows,))
        return attempt, first
