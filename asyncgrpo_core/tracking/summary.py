"""`run_summary.json`: the state of a run in one small file, always whole, at most a few seconds old.

Several processes write it (flow, trainer, the guard's close_run), each its own keys: `update_summary` reads, merges and
replaces under a file lock that the kernel releases when its holder dies. Schema: design.md, 'Run folder'.
"""

from __future__ import annotations

import copy
import fcntl
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from asyncgrpo_core.errors import AsyncGRPOError
from asyncgrpo_core.ledger_schema import DROP_REASONS

SUMMARY_NAME = "run_summary.json"
STATUSES = ("running", "completed", "failed", "cancelled", "interrupted")
_LOCK_TIMEOUT_S = 10.0

logger = logging.getLogger(__name__)

EMPTY_SUMMARY: dict[str, Any] = {
    "schema": 1,
    "status": "running",
    "mlflow_run_id": None,
    "flow_run_id": None,
    "attempt": 1,
    "global_step": 0,
    "resumed_from": None,
    "wall_s": 0.0,
    "train_s": 0.0,
    "reward": {"first": None, "last": None},
    "heldout": {"n": 0, "before": None, "after": None},
    "ledger": {
        "prompts": 0,
        "trained": 0,
        "dropped": dict.fromkeys(DROP_REASONS, 0),
        "filtered": 0,
        "pending": 0,
        "rolled_back": 0,
        "lost": 0,
        "trained_twice": 0,
    },
    "weight_sync": {
        "backend": None,
        "count": 0,
        "verified": 0,
        "unverified": 0,
        "max_abs_logp_diff": None,
        "mean_s": None,
    },
    "throughput": {"generated_tokens_per_s": 0.0, "trained_tokens_per_s": 0.0, "overlap_frac": 0.0},
    "restarts": {"server": 0, "rollout_worker": 0, "trainer": 0},
}

# Keys that only some runs have: with several servers, how often a sync did not reach one of them.
OPTIONAL_KEYS = ("weight_sync.left_out",)

_number = (int, float)
_TYPES: dict[str, Any] = {
    "mlflow_run_id": (str, type(None)),
    "flow_run_id": (str, type(None)),
    "resumed_from": (str, type(None)),
    "wall_s": _number,
    "train_s": _number,
    "reward.first": (*_number, type(None)),
    "reward.last": (*_number, type(None)),
    "heldout.before": (*_number, type(None)),
    "heldout.after": (*_number, type(None)),
    "weight_sync.backend": (str, type(None)),
    "weight_sync.max_abs_logp_diff": (*_number, type(None)),
    "weight_sync.mean_s": (*_number, type(None)),
    "throughput.generated_tokens_per_s": _number,
    "throughput.trained_tokens_per_s": _number,
    "throughput.overlap_frac": _number,
}


def read_summary(run_dir: Path) -> dict[str, Any] | None:
    """The summary of a run folder; None when it has none.

    Raises:
        AsyncGRPOError: the file is no JSON object.
    """
    path = Path(run_dir) / SUMMARY_NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise AsyncGRPOError(f"{path} is not JSON: {error}.", "Delete it; it is written anew.") from error
    if not isinstance(content, dict):
        raise AsyncGRPOError(f"{path} does not hold a JSON object.", "Delete it; it is written anew.")
    return content


def update_summary(run_dir: Path, **changes: Any) -> dict[str, Any]:
    """Merge changes into run_summary.json, atomically; other keys stay. Nested objects are merged key by key.

    Example: `update_summary(run, status="completed", heldout={"after": 0.93})` leaves heldout.before as it was.

    Returns:
        The new content.

    Raises:
        ValueError: a key that the schema does not have.
        AsyncGRPOError: another writer held the file for 10 s.
    """
    run_dir = Path(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    with _locked(run_dir / f".{SUMMARY_NAME}.lock"):
        content = _merge(EMPTY_SUMMARY, read_summary(run_dir) or {}, "", strict=False)
        content = _merge(content, changes, "", strict=True)
        temporary = run_dir / f".{SUMMARY_NAME}.{os.getpid()}.tmp"
        temporary.write_text(json.dumps(_finite(content), indent=2, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(temporary, run_dir / SUMMARY_NAME)
    return content


def validate_summary(content: dict[str, Any]) -> list[str]:
    """What in a summary contradicts the schema of design.md, as sentences; empty when nothing does."""
    problems = _compare(EMPTY_SUMMARY, content, "")
    if not problems:
        if content["status"] not in STATUSES:
            problems.append(f"status is {content['status']!r}, not one of {', '.join(STATUSES)}")
        ledger = content["ledger"]
        parts = ledger["trained"] + sum(ledger["dropped"].values()) + ledger["pending"] + ledger["lost"]
        if ledger["prompts"] != parts:
            problems.append(f"ledger.prompts is {ledger['prompts']}, its parts add up to {parts}")
        sync = content["weight_sync"]
        if sync["verified"] + sync["unverified"] > sync["count"]:
            problems.append("weight_sync has more verified and unverified syncs than syncs")
    return problems


class SummaryThread:
    """Rewrites run_summary.json every few seconds with what `provider` says, until stopped.

    A failing provider or disk is logged once per kind of failure and tried again: the summary cannot end a run.
    """

    def __init__(self, run_dir: Path, provider: Callable[[], dict[str, Any]], every_s: float = 2.0) -> None:
        self._run_dir, self._provider, self._every_s = Path(run_dir), provider, every_s
        self._stop = threading.Event()
        self._last_failure = ""
        self._thread = threading.Thread(target=self._run, name="run-summary", daemon=True)

    def start(self) -> SummaryThread:
        self._thread.start()
        return self

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the thread and write one last time. Idempotent."""
        if self._stop.is_set():
            return
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        self.write_now()

    def write_now(self) -> None:
        try:
            update_summary(self._run_dir, **self._provider())
            self._last_failure = ""
        except Exception as error:  # whatever it is, training goes on; the file only gets older
            failure = f"{type(error).__name__}: {error}"
            if failure != self._last_failure:
                logger.warning("run_summary.json could not be written (%s); trying again.", failure, exc_info=True)
            self._last_failure = failure

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            self.write_now()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    with open(path, "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise AsyncGRPOError(
                        f"{path} is held by another process for more than {_LOCK_TIMEOUT_S:.0f} s.",
                        "See which process of the run hangs.",
                    ) from error
                time.sleep(0.02)
        yield


def _merge(base: dict[str, Any], changes: dict[str, Any], where: str, *, strict: bool) -> dict[str, Any]:
    """`base` with `changes` laid over it. A None for a nested object changes nothing (its writer knows nothing yet)."""
    merged = copy.deepcopy(base)
    for key, value in changes.items():
        if key not in base:
            if strict and f"{where}{key}" not in OPTIONAL_KEYS:
                raise ValueError(f"run_summary.json has no key {where}{key}; it has {', '.join(sorted(base))}")
            merged[key] = value
        elif isinstance(base[key], dict):
            if value is not None:
                merged[key] = _merge(base[key], value, f"{where}{key}.", strict=strict)
        else:
            merged[key] = value
    return merged


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _compare(wanted: dict[str, Any], content: Any, where: str) -> list[str]:
    if not isinstance(content, dict):
        return [f"{where or 'the summary'} is {type(content).__name__}, not an object"]
    problems = [f"{where}{key} is missing" for key in wanted if key not in content]
    extra = [f"{where}{key}" for key in content if key not in wanted]
    problems += [f"{name} is not in the schema" for name in extra if name not in OPTIONAL_KEYS]
    for key in wanted.keys() & content.keys():
        name, value = f"{where}{key}", content[key]
        if isinstance(wanted[key], dict):
            problems += _compare(wanted[key], value, name + ".")
            continue
        types = _TYPES.get(name, type(wanted[key]))
        if not isinstance(value, types) or (isinstance(value, bool) and types is not bool):
            problems.append(f"{name} is {value!r} ({type(value).__name__})")
    return problems
