"""What a run is to its trainer: where it lives, what it has counted so far, and how its policy is reached."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncgrpo_core.packing.planner import CostModel

logger = logging.getLogger(__name__)


@dataclass
class RunContext:
    """Where a run lives and what its launcher knows. A script needs none: `output_dir` is then the run folder.

    Args:
        run_dir: holds ledger.sqlite, buffer/ and logs/.
        served_model_name: name of the policy on the server; None = the model's own name or path.
        attempt: how often this run was started before, plus one.
    """

    run_dir: Path
    served_model_name: str | None = None
    attempt: int = 1


@dataclass
class Counters:
    """Cumulative numbers of a run, carried from attempt to attempt in rollout_state.json."""

    num_tokens: int = 0
    generated_tokens: int = 0
    trained_tokens: int = 0
    train_s: float = 0.0
    overlapped_s: float = 0.0
    window_s: float = 0.0
    sync: dict[str, float] = field(default_factory=dict)


@dataclass
class AdapterLink:
    """The adapter of the policy (models/adapter_files.py).

    rank: the highest of its modules; obstacle: why a server cannot serve it, None when it can; save: writes it as it
    is now under a folder, returns where exactly; set_probe, restore: random weights for a moment, see `AdapterProbe`.
    """

    rank: int
    obstacle: str | None
    save: Callable[[Path], Path]
    set_probe: Callable[[float], None]
    restore: Callable[[], None]


@dataclass
class PolicyLink:
    """How the pipeline reaches the policy that is being trained, without knowing torch.

    parameters: the current weights under Hugging Face names; score: the trainer's log-probabilities of
    tokens 1..n-1 of a canary; canary_ids: that canary; dtype and device: torch's own names; adapter: None when all
    weights are trained; row_cost: what a row costs it, for balancing ranks; longest_sample: tokens above which its
    rotary frequencies change (models/support.py), None if they never do.
    """

    parameters: Callable[[], Iterable[tuple[str, Any]]]
    score: Callable[[list[int]], list[float]]
    canary_ids: list[int]
    dtype: str
    device: str
    adapter: AdapterLink | None = None
    row_cost: CostModel = field(default_factory=CostModel)
    longest_sample: int | None = None


def count_one_more(sync: dict[str, Any]) -> dict[str, Any]:
    """The sync numbers of earlier attempts plus one proved sync, whose seconds are not known apart."""
    return sync | {"count": sync.get("count", 0) + 1, "verified": sync.get("verified", 0) + 1}


def set_aside(ledger: Path) -> None:
    """A run that starts anew in a used folder keeps the old ledger under another name."""
    if not ledger.exists():
        return
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(ledger.stat().st_mtime))
    for suffix in ("", "-wal", "-shm"):
        old = ledger.with_name(ledger.name + suffix)
        if old.exists():
            old.rename(ledger.with_name(f"ledger-{stamp}.sqlite{suffix}"))


def close_all(closers: Iterable[Callable[[], object]]) -> None:
    """Call every closer, whatever the others do. The first error is raised after all were tried."""
    errors: list[Exception] = []
    for close in closers:
        try:
            close()
        except Exception as error:
            logger.exception("Closing a part of the pipeline failed")
            errors.append(error)
    if errors:
        raise errors[0]
