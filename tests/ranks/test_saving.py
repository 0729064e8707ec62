"""A save that fails or is killed at any point: what is left to resume from, and what it holds."""

from __future__ import annotations

import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from asyncgrpo_core.errors import CheckpointError
from asyncgrpo_core.manifest import newest_checkpoint, problem_with
from tests.ranks.rank_parts import make_trainer
from tests.tiny_model import write_model

STAGES = ["save_model", "_save_optimizer_and_scheduler", "_save_rng_state", "complete_checkpoint"]
SAVES = {"save_strategy": "steps", "save_steps": 1}


class Killed(BaseException):
    """Stands for a SIGKILL: nothing after it runs that would not run then, except what Python cannot leave out."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("saving") / "model")


@pytest.fixture(scope="module")
def whole(model) -> dict[int, dict[str, torch.Tensor]]:
    """The weights after each step of a run that nothing happens to."""
    out = model.parent / "whole"
    make_trainer(model, out, **SAVES).train()
    return {step: load_file(out / f"checkpoint-{step}" / "model.safetensors") for step in (1, 2, 3)}


def breaks(trainer: Any, stage: str, step: int, error: BaseException, *, after: bool) -> None:
    """`stage` of the save at `step` raises, before or after it has done its work."""
    real = getattr(trainer, stage)

    def broken(*args: Any, **kwargs: Any) -> None:
        here = trainer.state.global_step == step
        if after or not here:
            real(*args, **kwargs)
        if here:
            raise error

    setattr(trainer, stage, broken)


def assert_holds(folder: Path | None, step: int, whole: dict[int, dict[str, torch.Tensor]]) -> None:
    """The folder is whole, and its weights are those after `step`."""
    assert folder is not None and folder.name == f"checkpoint-{step}" and problem_with(folder) is None
    found = load_file(folder / "model.safetensors")
    assert set(found) == set(whole[step])
    assert all(torch.equal(found[name], value) for name, value in whole[step].items())


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_the_last_checkpoint_stays_until_the_next_one_is_whole(model, whole, tmp_path, stage, after):
    """One checkpoint is kept: it must not go before its successor can be resumed from."""
    trainer = make_trainer(model, tmp_path, save_total_limit=1, **SAVES)
    breaks(trainer, stage, 2, Killed(), after=after)
    with pytest.raises(Killed):
        trainer.train()
    assert_holds(newest_checkpoint(tmp_path), 1, whole)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]  # no torn one has a name
    make_trainer(model, tmp_path, save_total_limit=1, **SAVES).train(resume_from_checkpoint=True)
    assert_holds(newest_checkpoint(tmp_path), 3, whole)
    assert [path.name for path in tmp_path.iterdir() if "checkpoint" in path.name or path.name == ".saving"] == [
        "checkpoint-3"
    ]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_that_is_written_again_is_the_old_one_or_the_new_one(model, whole, tmp_path, stage, after):
    """A run goes on from an older checkpoint and comes to a step that is saved already: sizes agree, weights differ."""
    make_trainer(model, tmp_path, **SAVES).train()
    again = make_trainer(model, tmp_path, temperature=0.5, **SAVES)
    breaks(again, stage, 2, Killed(), after=after)
    with pytest.raises(Killed):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert_holds(tmp_path / "checkpoint-2", 2, whole)
    again = make_trainer(model, tmp_path, temperature=0.5, **SAVES)
    (tmp_path / "checkpoint-2" / "pytorch_model_fsdp_0").mkdir()  # of a sharded run: it would be read first
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert problem_with(tmp_path / "checkpoint-2") is None
    assert not (tmp_path / "checkpoint-2" / "pytorch_model_fsdp_0").exists()
    new = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    assert any(not torch.equal(new[name], value) for name, value in whole[2].items())


@pytest.mark.parametrize("limit", [1_000, 1_000_000])
def test_a_full_disk_is_named_with_the_folder(model, whole, tmp_path, limit):
    """No file can grow beyond `limit` bytes: the weights fail, or (twice as large) the optimizer's moments."""
    trainer = make_trainer(model, tmp_path, save_total_limit=1, **SAVES)
    real, (_, hard) = trainer._save_checkpoint, resource.getrlimit(resource.RLIMIT_FSIZE)

    def save(*args: Any) -> None:
        if trainer.state.global_step == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        real(*args)

    trainer._save_checkpoint = save
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with pytest.raises(CheckpointError, match=r"checkpoint-2 could not be written \(.*MiB are free.*Make room"):
            trainer.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert trainer.pipeline.stopped
    assert_holds(newest_checkpoint(tmp_path), 1, whole)


def test_a_full_disk_is_named_when_the_books_do_not_fit(model, whole, tmp_path):
    trainer = make_trainer(model, tmp_path, save_total_limit=1, **SAVES)
    breaks(trainer, "complete_checkpoint", 2, OSError(28, "No space left on device"), after=False)
    with pytest.raises(CheckpointError, match=r"checkpoint-2 could not be written .*No space left.*Make room"):
        trainer.train()
    assert_holds(newest_checkpoint(tmp_path), 1, whole)
