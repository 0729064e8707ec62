"""SampleBuffer: order, survival, unreadable files, regeneration requests, errors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from asyncgrpo_core.errors import RewardError, RolloutError
from asyncgrpo_core.rollout.buffer import SampleBuffer
from asyncgrpo_core.types import GroupRecord, Slot, TopLogprobs, TrainingSample, TrainingSequence


def record(group_id: int) -> GroupRecord:
    sequence = TrainingSequence(
        token_ids=np.arange(3, dtype=np.int32),
        loss_mask=np.array([False, True, True]),
        sampler_logprobs=np.array([0, -1, -2], dtype=np.float32),
        versions=np.zeros(3, dtype=np.int32),
        top=TopLogprobs(np.zeros((2, 4), np.int32), np.zeros((2, 4), np.float32)),
    )
    sample = TrainingSample(sequence, 0.5, 1.0, 0.5, Slot(0, 3, 1), 0, group_id, 2, "r")
    return GroupRecord(outcome="scored", slot=Slot(0, 3, 1), group_id=group_id, samples=[sample])


def test_records_come_back_whole_in_order_and_once(tmp_path) -> None:
    writer, reader = SampleBuffer(tmp_path), SampleBuffer(tmp_path)
    for group_id in range(5):
        writer.put(record(group_id))
    assert reader.size == 5 and len(reader.pending_files()) == 5
    first = reader.take(2)
    assert [r.group_id for r in first + reader.take()] == [0, 1, 2, 3, 4]
    assert reader.take() == [] and reader.size == 0
    np.testing.assert_array_equal(first[0].samples[0].sequence.loss_mask, [False, True, True])
    assert first[0].samples[0].slot == Slot(0, 3, 1)


def test_a_restarted_writer_continues_after_its_predecessor(tmp_path, monkeypatch) -> None:
    SampleBuffer(tmp_path).put(record(0))
    monkeypatch.setattr(time, "time_ns", lambda: 1)  # a clock that was set back
    SampleBuffer(tmp_path).put(record(1))
    assert [r.group_id for r in SampleBuffer(tmp_path).take()] == [0, 1]


def test_cut_off_file_is_named(tmp_path) -> None:
    buffer = SampleBuffer(tmp_path)
    path = buffer.put(record(0))
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(RolloutError, match=path.name):
        buffer.take()
    assert path.exists()


@pytest.mark.parametrize("content", [b"", b"hello", b"AGB1\0\0\0\0garbage"])
def test_foreign_file_is_named(tmp_path, content) -> None:
    buffer = SampleBuffer(tmp_path)
    path = buffer.put(record(0))
    path.write_bytes(content)
    with pytest.raises(RolloutError, match=path.name):
        buffer.take()


def test_regeneration_requests_arrive_oldest_first_and_once(tmp_path) -> None:
    trainer, worker = SampleBuffer(tmp_path), SampleBuffer(tmp_path)
    trainer.request_regeneration(Slot(0, 9, 4), 1)
    trainer.request_regeneration(Slot(0, 2, 1), 2)
    assert worker.take_regenerations() == [(Slot(0, 9, 4), 1), (Slot(0, 2, 1), 2)]
    assert worker.take_regenerations() == []


def test_error_keeps_type_fields_and_traceback(tmp_path) -> None:
    worker, trainer = SampleBuffer(tmp_path), SampleBuffer(tmp_path)
    assert trainer.take_error() is None
    worker.put_error(RewardError("bad", "good"), "Traceback ...")
    error, text = trainer.take_error()
    assert isinstance(error, RewardError) and (error.message, error.fix, text) == ("bad", "good", "Traceback ...")
    assert trainer.take_error() is None


class Stubborn(Exception):
    def __init__(self, a: int, b: int) -> None:  # pickles, but cannot be unpickled
        super().__init__(f"{a}{b}")


def test_error_that_does_not_survive_pickling_still_arrives(tmp_path) -> None:
    buffer = SampleBuffer(tmp_path)
    buffer.put_error(Stubborn(4, 2), "Traceback ...")
    error, _ = buffer.take_error()
    assert isinstance(error, RolloutError) and "Stubborn: 42" in str(error)


def test_clear_empties_everything(tmp_path) -> None:
    buffer = SampleBuffer(tmp_path)
    buffer.put(record(0))
    buffer.request_regeneration(Slot(0, 0, 0), 1)
    buffer.put_error(ValueError("x"), "")
    buffer.clear()
    assert (buffer.size, buffer.take_regenerations(), buffer.take_error()) == (0, [], None)


def test_a_writer_killed_at_any_moment_leaves_only_whole_records(tmp_path) -> None:
    """SIGKILL in the middle of a stream of writes: what is there can be read, without gaps and in order."""
    code = (
        "from asyncgrpo_core.rollout.buffer import SampleBuffer\n"
        "from asyncgrpo_core.types import GroupRecord\n"
        f"buffer = SampleBuffer({str(tmp_path)!r})\n"
        "for i in range(10**9):\n"
        "    buffer.put(GroupRecord(outcome='failed', group_id=i, error='x' * 20000))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    buffer = SampleBuffer(tmp_path)
    deadline = time.monotonic() + 30
    try:
        while buffer.size < 50 and time.monotonic() < deadline:
            time.sleep(0.005)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    got = [r.group_id for r in buffer.take()]
    assert len(got) >= 50 and got == list(range(len(got)))
