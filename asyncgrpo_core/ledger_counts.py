"""The reading side of the ledger: the `ledger` block of run_summary.json, counted from the rows alone.

Nothing here asks the SlotBook: a bookkeeping error there shows up here as `lost`, `trained_twice` or a line of `audit`.
"""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from asyncgrpo_core.errors import LedgerError
from asyncgrpo_core.ledger_schema import DROP_REASONS, END_STATES

_ENDED = "('" + "', '".join(END_STATES) + "')"

# Per epoch: how far workers have come (positions they announced), and how many prompts up to there have a live row.
# Positions and rows are both counted: a prompt order that changed between two attempts shows as fewer rows. Slots whose
# group was kept from an earlier worker may lie ahead of the present one: they say nothing about what lies before them.
_PRESENT = """
    WITH front AS (SELECT epoch, max(position) AS top FROM slot_events
                   WHERE rolled_back = 0 AND state = 'dispatched' GROUP BY epoch)
    SELECT front.epoch, top + 1, min(count(DISTINCT position), count(DISTINCT row))
    FROM slot_events e JOIN front ON front.epoch = e.epoch
    WHERE e.rolled_back = 0 AND e.position <= top GROUP BY front.epoch
"""

_ROWS_PER_EPOCH = """
    SELECT epoch, min(count(DISTINCT position), count(DISTINCT row)) FROM slot_events
    WHERE rolled_back = 0 GROUP BY epoch
"""

# Open slots that nobody will ever end: (1) the newest row belongs to an earlier rollout worker, so the slot was neither
# kept nor asked for again when the worker was replaced; (2) it was to be generated again in prompt order and the worker
# has passed it; (3) all its samples have ended.
_STUCK = f"""
    WITH open AS (SELECT * FROM slots WHERE state NOT IN {_ENDED}),
    now AS (SELECT coalesce(max(worker), 0) AS worker FROM slot_events WHERE rolled_back = 0),
    front AS (SELECT epoch, position FROM slot_events, now
              WHERE rolled_back = 0 AND state = 'dispatched' AND generation = 0 AND slot_events.worker = now.worker
              ORDER BY epoch DESC, position DESC LIMIT 1)
    SELECT count(*) FROM open, now
    WHERE open.worker < now.worker
       OR (open.state = 'requeued' AND EXISTS
              (SELECT 1 FROM front WHERE (front.epoch, front.position) > (open.epoch, open.position)))
       OR (open.state IN ('scored', 'kept')
           AND EXISTS (SELECT 1 FROM sample_events g WHERE g.epoch = open.epoch AND g.row = open.row
                       AND g.generation = open.generation AND g.event = 'generated' AND g.rolled_back = 0)
           AND NOT EXISTS (SELECT 1 FROM sample_events g WHERE g.epoch = open.epoch AND g.row = open.row
                       AND g.event = 'generated' AND g.rolled_back = 0 AND NOT EXISTS
                           (SELECT 1 FROM sample_events e WHERE e.sample_id = g.sample_id
                            AND e.event IN ('trained', 'dropped') AND e.rolled_back = 0)))
"""

# A training row names the group (`record`) that its sample came with; the sample's own "generated" row must agree.
_TWICE = """
    SELECT (SELECT count(*) FROM (SELECT 1 FROM trainings GROUP BY sample_id HAVING count(*) > 1))
         + (SELECT count(*) FROM (SELECT 1 FROM trainings GROUP BY epoch, row
            HAVING count(DISTINCT coalesce(nullif(record, 0),
                (SELECT g.record FROM sample_events g WHERE g.sample_id = trainings.sample_id
                 AND g.event = 'generated' AND g.rolled_back = 0), 0)) > 1))
"""

_AUDIT = {
    "slots that went on after they had ended": f"""
        SELECT count(*) FROM slots s WHERE EXISTS (SELECT 1 FROM slot_events e WHERE e.rolled_back = 0
            AND e.epoch = s.epoch AND e.row = s.row AND e.seq < s.seq AND e.state IN {_ENDED})""",
    "slots that ended as trained without a trained sample": """
        SELECT count(*) FROM slots s WHERE state = 'trained' AND NOT EXISTS
            (SELECT 1 FROM trainings t WHERE t.epoch = s.epoch AND t.row = s.row)""",
    "slots that ended as dropped or filtered with a trained sample": """
        SELECT count(*) FROM slots s WHERE state IN ('dropped', 'filtered') AND EXISTS
            (SELECT 1 FROM trainings t WHERE t.epoch = s.epoch AND t.row = s.row)""",
    "ended slots with samples that are still waiting": f"""
        SELECT count(*) FROM slots s WHERE state IN {_ENDED} AND EXISTS
            (SELECT 1 FROM samples p WHERE p.epoch = s.epoch AND p.row = s.row AND p.state = 'waiting')""",
    "samples that were both trained and dropped": """
        SELECT count(*) FROM (SELECT 1 FROM sample_events WHERE rolled_back = 0
            AND event IN ('trained', 'dropped') GROUP BY sample_id HAVING count(DISTINCT event) > 1)""",
    "trained samples whose row names another group than they were generated with": """
        SELECT count(*) FROM trainings t JOIN sample_events g ON g.sample_id = t.sample_id
            AND g.event = 'generated' AND g.rolled_back = 0 AND g.record <> t.record AND t.record > 0""",
    "trained samples that were never generated": """
        SELECT count(*) FROM trainings t WHERE NOT EXISTS (SELECT 1 FROM sample_events g
            WHERE g.sample_id = t.sample_id AND g.event = 'generated' AND g.rolled_back = 0)""",
    "rows with more than one position in their epoch": """
        SELECT count(*) FROM (SELECT 1 FROM slot_events WHERE rolled_back = 0
            GROUP BY epoch, row HAVING count(DISTINCT position) > 1)""",
}


def counts(path: Path) -> dict[str, Any]:
    """The `ledger` block of run_summary.json, cumulative over the attempts of the run.

    `prompts` = trained + dropped + pending + lost; `filtered` beside it. `rolled_back` counts slots, once per attempt
    that rolled them back. `lost` counts prompts that nobody will train, drop or generate any more: skipped positions
    and open slots that were forgotten. `trained_twice` counts samples with more than one live training row and slots
    trained from more than one generated group. Both are 0 unless there is a bug.

    Raises:
        LedgerError: the file cannot be read.
    """
    with closing(_open(path)) as db:
        try:
            return _counts(db)
        except sqlite3.DatabaseError as error:
            raise LedgerError(f"The ledger {path} cannot be read: {error}.", "Check the file.") from error


class CountsReader:
    """`counts`, asked often: spends at most a twentieth of the time on it (a long run's ledger has millions of rows).

    Args:
        path: the ledger.
        share: largest share of the wall time spent counting.
    """

    def __init__(self, path: Path, share: float = 0.05) -> None:
        self._path, self._share = Path(path), share
        self._known: dict[str, Any] | None = None
        self._next = 0.0

    def read(self, *, fresh: bool = False) -> dict[str, Any]:
        """The counts; those of a moment ago when it is too early to count again. `fresh` counts in any case."""
        now = time.monotonic()
        if self._known is None or fresh or now >= self._next:
            self._known = counts(self._path)
            after = time.monotonic()
            self._next = after + (after - now) / self._share
        return self._known


def audit(path: Path) -> list[str]:
    """Contradictions inside the ledger, as sentences; empty when every row agrees with every other."""
    with closing(_open(path)) as db:
        found = {text: db.execute(sql).fetchone()[0] for text, sql in _AUDIT.items()}
    return [f"{number} {text}" for text, number in found.items() if number]


def _open(path: Path) -> sqlite3.Connection:
    if not Path(path).exists():
        raise LedgerError(f"There is no ledger at {path}.", "Give the run folder of a run that has started training.")
    connection = sqlite3.connect(path, timeout=10.0)
    connection.execute("PRAGMA query_only = ON")
    return connection


def _counts(db: sqlite3.Connection) -> dict[str, Any]:
    ended = dict.fromkeys(END_STATES, 0)
    dropped = dict.fromkeys(DROP_REASONS, 0)
    still_open = 0
    db.execute("BEGIN")  # one snapshot for all the questions below
    for state, reason, number in db.execute("SELECT state, reason, count(*) FROM slots GROUP BY state, reason"):
        if state == "dropped":
            dropped[reason] += number
        elif state in ended:
            ended[state] += number
        else:
            still_open += number
    stuck = db.execute(_STUCK).fetchone()[0]
    rolled_back = db.execute(
        "SELECT count(*) FROM (SELECT DISTINCT epoch, row, rolled_back FROM slot_events WHERE rolled_back > 0)"
    ).fetchone()[0]
    twice = db.execute(_TWICE).fetchone()[0]
    lost = stuck + _skipped(db)
    pending = still_open - stuck
    db.execute("COMMIT")
    return {
        "prompts": ended["trained"] + sum(dropped.values()) + pending + lost,
        "trained": ended["trained"],
        "dropped": dropped,
        "filtered": ended["filtered"],
        "pending": pending,
        "rolled_back": rolled_back,
        "lost": lost,
        "trained_twice": twice,
    }


def _skipped(db: sqlite3.Connection) -> int:
    """Positions below the highest one ever given out (all positions, in an epoch that is over) without a live row."""
    stored = db.execute("SELECT value FROM meta WHERE key = 'num_rows'").fetchone()
    num_rows = int(stored[0]) if stored and stored[0] is not None else None
    epochs = {epoch: (passed, present) for epoch, passed, present in db.execute(_PRESENT)}
    if not epochs:
        return 0
    if num_rows is None:
        return sum(max(passed - present, 0) for passed, present in epochs.values())
    passed, present = epochs[max(epochs)]
    skipped = max(passed - present, 0)
    rows_of = dict(db.execute(_ROWS_PER_EPOCH).fetchall())
    for epoch in range(max(epochs)):
        skipped += max(num_rows - rows_of.get(epoch, 0), 0)
    return skipped
