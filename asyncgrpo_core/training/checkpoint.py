"""What a checkpoint holds beside the Trainer's own files, and how a valid one is told from a torn one.

    checkpoint-N/rollout_state.json      slots, counters, policy version, and a manifest of every file
    checkpoint-N/buffered_samples.pkl    samples generated and not yet trained

`rollout_state.json` is written last, by rename: a folder without it, or whose files differ from its manifest,
is not a checkpoint (a kill can hit at any byte). All of it is written in `.saving/checkpoint-N` and then renamed, so
that a run that comes to a step again (it went on from an older checkpoint) never mixes two checkpoints.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncgrpo_core.errors import CheckpointError
from asyncgrpo_core.manifest import STATE_NAME, manifest_of, newest_checkpoint, problem_with
from asyncgrpo_core.types import TrainingSample

if TYPE_CHECKING:
    from asyncgrpo_core.training.pipeline import Pipeline

SAMPLES_NAME = "buffered_samples.pkl"
SCHEMA = 1
SAVING = ".saving"  # beside the checkpoints: the one that is being written


@dataclass
class RolloutState:
    """The part of a run's state that transformers does not know."""

    global_step: int
    policy_version: int
    slots: dict[str, Any]  # SlotBook.state_dict()
    counters: dict[str, Any]  # cumulative numbers of run_summary.json
    unsynced_steps: int = 0  # steps trained since the last weight sync
    loop_state: Any = None  # a custom loop's own state_dict()


def save_rollout_state(folder: Path, state: RolloutState, samples: list[TrainingSample]) -> None:
    """Complete a checkpoint folder in which the Trainer's files already lie.

    Args:
        folder: checkpoint-N.
        samples: generated and not yet trained, oldest first.

    Raises:
        CheckpointError: a custom loop's state is not made of JSON types.
    """
    _write_synced(folder / SAMPLES_NAME, pickle.dumps(samples, protocol=pickle.HIGHEST_PROTOCOL))
    content = {"schema": SCHEMA, **vars(state), "manifest": manifest_of(folder)}
    temporary = folder / (STATE_NAME + ".tmp")
    try:
        encoded = json.dumps(content).encode()
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"state_dict() of the rollout loop returned something that is no JSON: {error}.",
            "Return dicts, lists, strings, numbers, booleans and None only.",
        ) from error
    _write_synced(temporary, encoded)
    os.replace(temporary, folder / STATE_NAME)


def complete_checkpoint(folder: Path, pipeline: Pipeline, global_step: int) -> None:
    """Put the books and the rollout state of a pipeline beside the Trainer's files."""
    assert pipeline.ledger is not None
    samples = pipeline.buffered_samples()
    pipeline.ledger.snapshot(folder / "ledger.sqlite")
    save_rollout_state(folder, pipeline.rollout_state(global_step), samples)


def clear_unfinished(output_dir: Path) -> None:
    """Remove what a save left that did not come to its end."""
    shutil.rmtree(output_dir / SAVING, ignore_errors=True)


def publish(output_dir: Path, name: str) -> None:
    """Give a checkpoint in `.saving` its name; one that has the name already is removed."""
    made, final, replaced = output_dir / SAVING / name, output_dir / name, output_dir / SAVING / "replaced"
    if final.exists():
        os.rename(final, replaced)
    os.rename(made, final)
    clear_unfinished(output_dir)


def not_written(folder: Path, error: BaseException) -> CheckpointError:
    """What ends a run whose checkpoint could not be written. Names the first failure of a sharded one."""
    failures = getattr(error, "failures", None)
    cause = next(iter(failures.values()))[0] if failures else error
    free = shutil.disk_usage(folder.parent).free / 2**20
    return CheckpointError(
        f"The checkpoint {folder} could not be written ({type(cause).__name__}: {' '.join(str(cause).split())[:300]}); "
        f"the older ones are as they were. {free:,.0f} MiB are free there now.",
        "Make room on that disk, or see that it can be written to, then resume.",
    )


def _write_synced(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def load_rollout_state(folder: Path) -> tuple[RolloutState, list[TrainingSample]]:
    """Read what `save_rollout_state` wrote.

    Raises:
        CheckpointError: the folder is not a whole checkpoint; says which file is wrong.
    """
    problem = problem_with(folder)
    if problem is not None:
        raise CheckpointError(f"{folder} is not a complete checkpoint: {problem}.", "Resume from an older one.")
    content = json.loads((folder / STATE_NAME).read_text())
    if content.pop("schema") != SCHEMA:
        raise CheckpointError(f"{folder} was written by another version of asyncgrpo.", "Use that version.")
    content.pop("manifest")
    with open(folder / SAMPLES_NAME, "rb") as file:
        samples = pickle.load(file)
    return RolloutState(**content), samples


def resolve_resume(resume: str | bool | None, output_dir: Path) -> Path | None:
    """Turn `train(resume_from_checkpoint=...)` into a folder.

    Raises:
        CheckpointError: True and no whole checkpoint in `output_dir`, or a path that is none.
    """
    if resume is None or resume is False:
        return None
    if resume is True:
        newest = newest_checkpoint(output_dir)
        if newest is None:
            raise CheckpointError(
                f"resume_from_checkpoint=True, but {output_dir} has no complete checkpoint.",
                "Pass the path of one, or start without resuming.",
            )
        return newest
    folder = Path(resume)
    problem = problem_with(folder)
    if problem is not None:
        raise CheckpointError(f"{folder} is not a complete checkpoint: {problem}.", "Pass another one.")
    return folder
