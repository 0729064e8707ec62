"""The schema of `ledger.sqlite`: rows, tables, views.

Rows are only ever appended. Each carries a sequence number (`seq`) that grows over the whole run, attempts included,
so that a resume can say "everything after the checkpoint never happened": those rows are marked with the attempt that
rolled them back and count in nothing. States are therefore *views* over the live rows: `slots` (one row per prompt
slot), `samples` (one row per sample) and `trainings` (one row per time a sample was trained).
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

SCHEMA_VERSION = 1

# States of a slot that is not over, and ways in which a slot can end.
OPEN_STATES = ("dispatched", "scored", "kept", "requeued", "regenerate")
END_STATES = ("trained", "dropped", "filtered")
DROP_REASONS = ("zero_std", "no_reward", "oversize", "stale", "failed", "non_finite")


class SlotRow(NamedTuple):
    """One thing that happened to a slot. `worker` numbers the rollout workers of the run (0 = first)."""

    seq: int
    worker: int
    epoch: int
    row: int
    position: int
    generation: int
    state: str  # one of OPEN_STATES or END_STATES
    reason: str | None = None  # of "dropped": one of DROP_REASONS
    step: int | None = None  # of "trained": the optimizer step that trained its last sample
    group_id: int | None = None
    model_version: int | None = None  # policy version when the group's first rollout started
    reward: float | None = None  # mean summed reward of the group
    num_samples: int | None = None
    error: str | None = None


class SampleRow(NamedTuple):
    """One thing that happened to a sample: "generated", then "trained" or "dropped".

    `record` is the `seq` of the slot row that brought the sample: all samples of one generated group share it.
    """

    seq: int
    sample_id: str
    epoch: int
    row: int
    generation: int
    record: int
    event: str
    reason: str | None = None
    step: int | None = None
    version_first: int | None = None
    version_last: int | None = None
    forwarded_tokens: int | None = None
    trained_tokens: int | None = None
    reward: float | None = None
    advantage: float | None = None
    rollout_id: str | None = None


LedgerRow = SlotRow | SampleRow

SCHEMA = f"""
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT);
CREATE TABLE IF NOT EXISTS attempts (
    attempt INTEGER PRIMARY KEY, started_at REAL NOT NULL,
    checkpoint_seq INTEGER NOT NULL,  -- rows after this one were rolled back when the attempt began
    first_seq INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS slot_events (
    seq INTEGER PRIMARY KEY, worker INTEGER NOT NULL, epoch INTEGER NOT NULL, row INTEGER NOT NULL,
    position INTEGER NOT NULL, generation INTEGER NOT NULL, state TEXT NOT NULL, reason TEXT, step INTEGER,
    group_id INTEGER, model_version INTEGER, reward REAL, num_samples INTEGER, error TEXT,
    attempt INTEGER NOT NULL, at REAL NOT NULL,
    rolled_back INTEGER NOT NULL DEFAULT 0);  -- 0 = live, else the attempt that rolled it back
CREATE INDEX IF NOT EXISTS slot_events_slot ON slot_events (epoch, row, seq);
CREATE TABLE IF NOT EXISTS sample_events (
    seq INTEGER PRIMARY KEY, sample_id TEXT NOT NULL, epoch INTEGER NOT NULL, row INTEGER NOT NULL,
    generation INTEGER NOT NULL, record INTEGER NOT NULL, event TEXT NOT NULL, reason TEXT, step INTEGER,
    version_first INTEGER, version_last INTEGER, forwarded_tokens INTEGER, trained_tokens INTEGER,
    reward REAL, advantage REAL, rollout_id TEXT,
    attempt INTEGER NOT NULL, at REAL NOT NULL, rolled_back INTEGER NOT NULL DEFAULT 0);
CREATE INDEX IF NOT EXISTS sample_events_sample ON sample_events (sample_id, event);
CREATE INDEX IF NOT EXISTS sample_events_slot ON sample_events (epoch, row);
-- what the counts of run_summary.json go through every few seconds
CREATE INDEX IF NOT EXISTS trained_samples ON sample_events (sample_id) WHERE event = 'trained' AND rolled_back = 0;
CREATE INDEX IF NOT EXISTS trained_slots ON sample_events (epoch, row, record, sample_id)
    WHERE event = 'trained' AND rolled_back = 0;
-- the newest live row of every slot (sqlite takes the bare columns from the row that holds the maximum)
CREATE VIEW IF NOT EXISTS slots AS
    SELECT epoch, row, position, generation, state, reason, step, group_id, model_version, reward, num_samples,
           error, worker, attempt, at, max(seq) AS seq
    FROM slot_events WHERE rolled_back = 0 GROUP BY epoch, row;
CREATE VIEW IF NOT EXISTS samples AS
    SELECT g.sample_id, g.epoch, g.row, g.generation, g.record, coalesce(e.event, 'waiting') AS state, e.reason,
           e.step, g.version_first, g.version_last, g.forwarded_tokens, g.trained_tokens, g.reward, g.advantage,
           g.rollout_id, g.attempt, max(coalesce(e.seq, g.seq)) AS seq
    FROM sample_events g LEFT JOIN sample_events e
      ON e.sample_id = g.sample_id AND e.event IN ('trained', 'dropped') AND e.rolled_back = 0
    WHERE g.event = 'generated' AND g.rolled_back = 0 GROUP BY g.sample_id;
CREATE VIEW IF NOT EXISTS trainings AS
    SELECT seq, sample_id, epoch, row, generation, record, step, attempt, at
    FROM sample_events WHERE event = 'trained' AND rolled_back = 0;
INSERT OR IGNORE INTO meta VALUES ('schema', '{SCHEMA_VERSION}');
"""


def _insert(table: str, fields: tuple[str, ...]) -> str:
    names = (*fields, "attempt", "at")
    return f"INSERT INTO {table} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"


INSERT_SLOT = _insert("slot_events", SlotRow._fields)
INSERT_SAMPLE = _insert("sample_events", SampleRow._fields)


def last_seq(path: Path) -> int:
    """The highest sequence number in the ledger, rolled-back rows included; 0 for an empty or missing file."""
    if not Path(path).exists():
        return 0
    with closing(sqlite3.connect(path, timeout=30.0)) as connection:
        return last_seq_of(connection)


def last_seq_of(connection: sqlite3.Connection) -> int:
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    highest = [
        connection.execute(f"SELECT coalesce(max(seq), 0) FROM {table}").fetchone()[0]
        for table in ("slot_events", "sample_events")
        if table in tables
    ]
    if "attempts" in tables:
        highest.append(connection.execute("SELECT coalesce(max(first_seq), 0) FROM attempts").fetchone()[0])
    return max(highest, default=0)
