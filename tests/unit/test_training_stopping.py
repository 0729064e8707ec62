"""Asked to stop: before training, by a signal in its first moments, in a run before; the end of the passes (F217)."""

from __future__ import annotations

import pytest

from tests.ranks.rank_parts import NUM_STEPS, make_trainer
from tests.tiny_model import write_model


def test_a_request_before_the_first_step_is_kept_and_one_of_an_earlier_run_is_not(tmp_path):
    """A signal is taken from before `train()` on: the checkpoint to resume from is looked for first."""
    trainer = make_trainer(write_model(tmp_path / "model"), tmp_path / "run")
    trainer.request_stop("SIGTERM")
    trainer.train()
    assert trainer.state.global_step == 1 and trainer.stop_reason == "SIGTERM"
    trainer.request_stop("too late")
    trainer.pipeline.at = 0
    trainer.train()
    assert trainer.state.global_step == NUM_STEPS and trainer.stop_reason is None


def test_a_request_of_a_run_that_failed_is_forgotten(tmp_path):
    trainer = make_trainer(write_model(tmp_path / "model"), tmp_path / "run")

    def stop_and_fail(number: int) -> None:
        trainer.request_stop("SIGTERM")
        raise ZeroDivisionError("a bug")

    trainer.pipeline.on_plan = stop_and_fail
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    trainer.pipeline.on_plan = lambda number: None
    trainer.train()
    assert trainer.state.global_step == NUM_STEPS and trainer.stop_reason is None


@pytest.mark.parametrize(("max_steps", "steps"), [(-1, 2), (3, 3)])
def test_f217_a_run_ends_with_the_step_that_ends_its_passes_unless_max_steps_decides(tmp_path, max_steps, steps):
    """The second step ends them: nothing more is planned, and a checkpoint is saved though no interval falls there."""
    settings = {"max_steps": max_steps, "num_train_epochs": 1.5, "save_strategy": "steps", "save_steps": 500}
    trainer = make_trainer(write_model(tmp_path / "model"), tmp_path / "run", **settings)
    pipeline, planned = trainer.pipeline, []
    pipeline.on_plan = planned.append
    pipeline.book.passes_done = lambda epochs: epochs == 1.5 and pipeline.at >= 2
    assert trainer.train().global_step == steps
    assert planned == list(range(steps))
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == [f"checkpoint-{steps}"]
