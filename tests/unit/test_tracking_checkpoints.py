"""Checkpoints go up in the background, whole or not at all, and come back whole or not at all."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import pytest

from asyncgrpo_core.errors import CheckpointError
from asyncgrpo_core.manifest import manifest_of, problem_with
from asyncgrpo_core.tracking.checkpoints import CheckpointUploader, fetch_newest
from asyncgrpo_core.tracking.settings import CheckpointTracking


def make_checkpoint(output_dir: Path, step: int) -> Path:
    folder = output_dir / f"checkpoint-{step}"
    (folder / "sub").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"w" * (100 + step))
    (folder / "sub" / "optimizer.pt").write_bytes(b"o" * 50)
    (folder / "rollout_state.json").write_text(json.dumps({"manifest": manifest_of(folder)}))
    return folder


class FolderStore:
    """A store in a folder; can hang, or fail a number of times."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.marks: dict[int, dict] = {}
        self.paths: dict[int, Path] = {}
        self.go = threading.Event()
        self.go.set()
        self.entered = threading.Event()
        self.failures = 0
        self.log: list[str] = []

    def put(self, folder: Path, step: int) -> None:
        self.entered.set()
        assert self.go.wait(30)
        if self.failures:
            self.failures -= 1
            raise ConnectionError("store is away")
        shutil.rmtree(self.root / str(step), ignore_errors=True)
        shutil.copytree(folder, self.root / str(step))
        self.log.append(f"put {step}")

    def mark(self, step: int, note) -> None:
        self.marks[step] = dict(note)
        self.log.append(f"mark {step}")

    def mark_path(self, step: int, path: Path) -> None:
        self.paths[step] = path

    def complete(self) -> dict[int, dict]:
        return dict(sorted(self.marks.items()))

    def remove(self, step: int) -> None:
        self.marks.pop(step, None)
        shutil.rmtree(self.root / str(step))
        self.log.append(f"remove {step}")

    def download(self, step: int, folder: Path) -> Path:
        return Path(shutil.copytree(self.root / str(step), folder / f"checkpoint-{step}"))


@pytest.fixture
def store(tmp_path):
    return FolderStore(tmp_path / "store")


@pytest.fixture
def out(tmp_path):
    return tmp_path / "run" / "checkpoints"


def uploader(store, out, **config) -> CheckpointUploader:
    return CheckpointUploader(store, CheckpointTracking(**config), out.parent, retry_s=0.01)


def test_mark_comes_after_the_upload_and_nothing_stays_staged(store, out):
    up = uploader(store, out)
    assert up.submit(make_checkpoint(out, 10), 10)
    assert up.close(10)
    assert store.log == ["put 10", "mark 10"]
    assert up.uploaded == [10]
    assert list((out.parent / "uploads").iterdir()) == []


def test_rotation_cannot_pull_files_away(store, out):
    """The folder is deleted while its upload waits: its hard links are uploaded whole."""
    store.go.clear()
    up = uploader(store, out)
    folder = make_checkpoint(out, 10)
    up.submit(folder, 10)
    shutil.rmtree(folder)
    store.go.set()
    assert up.close(10)
    assert problem_with(store.root / "10") is None


def test_flush_gives_up_after_its_deadline(store, out):
    store.go.clear()
    up = uploader(store, out)
    up.submit(make_checkpoint(out, 10), 10)
    assert not up.flush(0.1)
    store.go.set()
    assert up.close(10)


def test_store_that_is_away_is_tried_again(store, out):
    store.failures = 3
    up = uploader(store, out)
    up.submit(make_checkpoint(out, 10), 10)
    assert up.close(10)
    assert list(store.marks) == [10]


def test_store_that_stays_away_is_given_up_without_an_exception(store, out):
    store.failures = 99
    up = uploader(store, out)
    up.submit(make_checkpoint(out, 10), 10)
    assert not up.close(10)
    assert (up.failed, store.marks) == ([10], {})


@pytest.mark.parametrize(
    ("config", "left"),
    [
        ({"log": "all"}, [10, 20, 30, 40]),
        ({"log": "all", "keep_last": 2}, [30, 40]),
        ({"log": "last"}, [40]),
        ({"log": "best"}, [20]),
        ({"log": "best", "higher_is_better": False}, [40]),
        ({"log": "best", "metric": "unknown"}, []),
        ({"log": "none"}, []),
    ],
)
def test_policies(store, out, config, left):
    up = uploader(store, out, **config)
    for step, reward in ((10, 0.5), (20, 0.9), (30, 0.7), (40, 0.4)):
        up.submit(make_checkpoint(out, step), step, {"reward": reward})
        assert up.flush(10)
    assert up.close(10)
    assert sorted(store.marks) == left
    assert sorted(int(p.name) for p in store.root.glob("*")) == left


def test_policy_path_uploads_nothing(store, out):
    up = uploader(store, out, log="path")
    folder = make_checkpoint(out, 10)
    up.submit(folder, 10)
    assert up.close(10)
    assert store.paths == {10: folder}
    assert folder.exists()
    assert not store.root.exists()


def test_policy_last_leaves_out_what_is_out_of_date_before_it_was_sent(store, out):
    store.go.clear()
    up = uploader(store, out, log="last")
    up.submit(make_checkpoint(out, 10), 10)
    assert store.entered.wait(10)  # 10 is on its way
    for step in (20, 30):
        up.submit(make_checkpoint(out, step), step)
    store.go.set()
    assert up.close(10)
    assert sorted(store.marks) == [30]
    assert "put 20" not in store.log


def test_torn_checkpoint_is_not_logged(store, out):
    folder = make_checkpoint(out, 10)
    (folder / "model.safetensors").write_bytes(b"w")
    up = uploader(store, out)
    assert not up.submit(folder, 10)
    assert not up.close(10)
    assert store.marks == {}


def test_resume_logs_what_a_kill_left_unlogged(store, out):
    for step in (10, 20, 30):
        make_checkpoint(out, step)
    (out / "checkpoint-20" / "model.safetensors").unlink()
    store.marks[10] = {}
    make_checkpoint(out, 40)  # newer than the one resumed from: another branch of the run
    up = uploader(store, out)
    assert up.submit_missing(out, up_to_step=30) == [30]
    assert up.close(10)
    assert sorted(store.marks) == [10, 30]


def test_fetch_takes_the_newest_whole_one(store, out, tmp_path):
    up = uploader(store, out)
    for step in (10, 20, 30):
        up.submit(make_checkpoint(out, step), step)
    assert up.close(10)
    (store.root / "30" / "sub" / "optimizer.pt").write_bytes(b"o")  # torn in the store
    shutil.copytree(store.root / "20", store.root / "40")  # uploaded, but never marked complete
    target = tmp_path / "elsewhere"
    assert fetch_newest(store, target) == target / "checkpoint-20"
    assert problem_with(target / "checkpoint-20") is None
    assert [p.name for p in target.iterdir()] == ["checkpoint-20"]


def test_fetch_replaces_a_torn_local_folder(store, out):
    up = uploader(store, out)
    folder = make_checkpoint(out, 10)
    up.submit(folder, 10)
    assert up.close(10)
    (folder / "model.safetensors").unlink()
    assert fetch_newest(store, out) == folder
    assert problem_with(folder) is None


def test_fetch_from_an_empty_store_and_from_one_with_only_torn_ones(store, out):
    assert fetch_newest(store, out) is None
    up = uploader(store, out)
    up.submit(make_checkpoint(out, 10), 10)
    assert up.close(10)
    (store.root / "10" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"checkpoint-10: .*model\.safetensors is missing"):
        fetch_newest(store, out)
