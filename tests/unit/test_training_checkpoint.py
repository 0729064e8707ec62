"""What a checkpoint holds, and that a torn one is never taken for a whole one (F166, F167, F169)."""

from __future__ import annotations

import json
import shutil

import pytest

from asyncgrpo_core.errors import CheckpointError
from asyncgrpo_core.manifest import newest_checkpoint, problem_with
from asyncgrpo_core.slots import SlotBook
from asyncgrpo_core.training.checkpoint import (
    RolloutState,
    load_rollout_state,
    resolve_resume,
    save_rollout_state,
)
from tests.unit.samples import make_record, make_sample


def write(folder, step=10, samples=()):
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights" * 100)
    (folder / "trainer_state.json").write_text("{}")
    book = SlotBook(num_rows=8)
    book.apply(make_record(0))
    state = RolloutState(step, step, book.state_dict(), {"num_tokens": 5})
    save_rollout_state(folder, state, list(samples))
    return state


def test_f167_state_and_buffered_samples_come_back(tmp_path):
    samples = [make_sample(3), make_sample(4)]
    state = write(tmp_path / "checkpoint-10", samples=samples)
    loaded, buffered = load_rollout_state(tmp_path / "checkpoint-10")
    assert loaded == state
    assert [s.sample_id for s in buffered] == [s.sample_id for s in samples]
    assert (buffered[0].sequence.token_ids == samples[0].sequence.token_ids).all()


@pytest.mark.parametrize(
    "damage",
    [
        lambda f: (f / "rollout_state.json").unlink(),
        lambda f: (f / "rollout_state.json").write_text('{"schema": 1, "mani'),
        lambda f: (f / "rollout_state.json").write_text("[]"),
        lambda f: (f / "model.safetensors").unlink(),
        lambda f: (f / "model.safetensors").write_bytes(b"short"),
        lambda f: (f / "buffered_samples.pkl").unlink(),
    ],
    ids=["no state", "cut state", "wrong state", "no weights", "short weights", "no samples"],
)
def test_a_torn_checkpoint_is_refused_by_name_and_an_older_whole_one_is_found(tmp_path, damage):
    write(tmp_path / "checkpoint-9", 9)
    write(tmp_path / "checkpoint-10", 10)
    assert newest_checkpoint(tmp_path).name == "checkpoint-10"
    damage(tmp_path / "checkpoint-10")
    assert problem_with(tmp_path / "checkpoint-10") is not None
    with pytest.raises(CheckpointError, match="checkpoint-10"):
        load_rollout_state(tmp_path / "checkpoint-10")
    assert newest_checkpoint(tmp_path).name == "checkpoint-9"


def test_newest_is_by_number_not_by_name_or_place_in_the_folder(tmp_path):
    numbers = [9, 100, 20, 3, 1000, 55, 101, 8]
    for number in numbers:
        write(tmp_path / f"checkpoint-{number}", number)
    for number in sorted(numbers, reverse=True):
        assert newest_checkpoint(tmp_path).name == f"checkpoint-{number}"
        shutil.rmtree(tmp_path / f"checkpoint-{number}")
    assert newest_checkpoint(tmp_path) is None


def test_f169_resume_accepts_a_path_or_true(tmp_path):
    write(tmp_path / "checkpoint-5", 5)
    assert resolve_resume(True, tmp_path) == tmp_path / "checkpoint-5"
    assert resolve_resume(str(tmp_path / "checkpoint-5"), tmp_path / "elsewhere") == tmp_path / "checkpoint-5"
    assert resolve_resume(None, tmp_path) is None and resolve_resume(False, tmp_path) is None


def test_f169_resume_without_a_checkpoint_says_so(tmp_path):
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        resolve_resume(True, tmp_path)
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        resolve_resume(str(tmp_path / "checkpoint-1"), tmp_path)


def test_a_checkpoint_of_another_version_is_refused(tmp_path):
    write(tmp_path / "checkpoint-5", 5)
    path = tmp_path / "checkpoint-5" / "rollout_state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 99}))
    with pytest.raises(CheckpointError, match="another version"):
        load_rollout_state(tmp_path / "checkpoint-5")
