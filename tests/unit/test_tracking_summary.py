"""run_summary.json: the schema of design.md, whole at every moment, several writers."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading

import pytest

from asyncgrpo_core.errors import AsyncGRPOError
from asyncgrpo_core.tracking.summary import SummaryThread, read_summary, update_summary, validate_summary

FULL = {
    "schema": 1,
    "status": "completed",
    "mlflow_run_id": "abc",
    "flow_run_id": None,
    "attempt": 2,
    "global_step": 60,
    "resumed_from": "RUN/checkpoints/checkpoint-20",
    "wall_s": 200.5,
    "train_s": 100.25,
    "reward": {"first": 0.25, "last": 0.95},
    "heldout": {"n": 256, "before": 0.4, "after": 0.93},
    "ledger": {
        "prompts": 100,
        "trained": 80,
        "dropped": {"zero_std": 10, "no_reward": 1, "oversize": 2, "stale": 3, "failed": 0, "non_finite": 0},
        "filtered": 5,
        "pending": 4,
        "rolled_back": 7,
        "lost": 0,
        "trained_twice": 0,
    },
    "weight_sync": {
        "backend": "shm",
        "count": 60,
        "verified": 15,
        "unverified": 0,
        "max_abs_logp_diff": 1e-5,
        "mean_s": 0.02,
    },
    "throughput": {"generated_tokens_per_s": 2000.0, "trained_tokens_per_s": 1500.0, "overlap_frac": 0.8},
    "restarts": {"server": 0, "rollout_worker": 0, "trainer": 1},
}


def test_a_full_summary_is_written_as_the_design_says(tmp_path):
    update_summary(tmp_path, **FULL)
    stored = json.loads((tmp_path / "run_summary.json").read_text())
    assert stored == FULL
    assert validate_summary(stored) == []


def test_a_first_write_has_every_key(tmp_path):
    update_summary(tmp_path, status="running")
    stored = read_summary(tmp_path)
    assert stored is not None
    assert validate_summary(stored) == []
    assert stored.keys() == FULL.keys()


def test_writers_keep_each_others_keys(tmp_path):
    update_summary(tmp_path, status="running", heldout={"n": 256, "before": 0.4})
    update_summary(tmp_path, global_step=3, ledger=None, reward={"first": 0.1})
    stored = update_summary(tmp_path, heldout={"after": 0.9})
    assert stored["heldout"] == {"n": 256, "before": 0.4, "after": 0.9}
    assert (stored["global_step"], stored["status"], stored["reward"]["first"]) == (3, "running", 0.1)


def test_unknown_keys_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no key heldout\.mean"):
        update_summary(tmp_path, heldout={"mean": 1.0})
    assert read_summary(tmp_path) is None


def test_nan_becomes_null(tmp_path):
    update_summary(tmp_path, reward={"first": math.nan, "last": math.inf})
    stored = read_summary(tmp_path)
    assert stored is not None
    assert stored["reward"] == {"first": None, "last": None}


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("status", "done", "status is 'done'"),
        ("global_step", 1.5, "global_step is 1.5"),
        ("attempt", True, "attempt is True"),
        ("ledger.lost", None, "ledger.lost is None"),
        ("ledger.prompts", 99, "parts add up to 100"),
        ("weight_sync.verified", 61, "more verified"),
        ("reward.last", "0.9", "reward.last is '0.9'"),
    ],
)
def test_validation_names_what_is_wrong(path, value, said):
    content = json.loads(json.dumps(FULL))
    *parents, key = path.split(".")
    target = content
    for parent in parents:
        target = target[parent]
    target[key] = value
    assert any(said in problem for problem in validate_summary(content))


def test_validation_finds_missing_and_extra_keys():
    content = json.loads(json.dumps(FULL))
    del content["ledger"]["dropped"]["stale"]
    content["mood"] = "good"
    assert sorted(validate_summary(content)) == ["ledger.dropped.stale is missing", "mood is not in the schema"]


def test_two_processes_and_a_reader_never_see_half_a_file(tmp_path):
    program = f"""
from pathlib import Path
from asyncgrpo_core.tracking.summary import update_summary
for i in range(1, 61):
    update_summary(Path({str(tmp_path)!r}), restarts={{"server": i}})
"""
    child = subprocess.Popen([sys.executable, "-c", program])
    try:
        for i in range(1, 61):
            update_summary(tmp_path, restarts={"trainer": i})
            stored = read_summary(tmp_path)
            assert stored is not None
            assert stored["restarts"]["trainer"] == i
        assert child.wait(60) == 0
    finally:
        child.kill()
    stored = read_summary(tmp_path)
    assert stored is not None
    assert stored["restarts"] == {"server": 60, "rollout_worker": 0, "trainer": 60}


def test_thread_writes_again_and_again_and_at_the_end(tmp_path):
    steps = iter(range(1, 10**6))
    written = threading.Event()
    last = []

    def provider():
        last.append(next(steps))
        if last[-1] >= 3:
            written.set()
        return {"global_step": last[-1]}

    thread = SummaryThread(tmp_path, provider, every_s=0.01).start()
    assert written.wait(10)
    thread.stop()
    thread.stop()
    stored = read_summary(tmp_path)
    assert stored is not None
    assert stored["global_step"] == last[-1]


def test_failing_provider_is_logged_once_and_does_not_end_the_thread(tmp_path, caplog):
    calls = threading.Semaphore(0)

    def provider():
        calls.release()
        raise RuntimeError("no numbers yet")

    thread = SummaryThread(tmp_path, provider, every_s=0.01).start()
    for _ in range(3):
        assert calls.acquire(timeout=10)
    thread.stop()
    assert caplog.text.count("could not be written (RuntimeError: no numbers yet)") == 1


def test_damaged_file_is_named(tmp_path):
    (tmp_path / "run_summary.json").write_text("{")
    with pytest.raises(AsyncGRPOError, match=r"run_summary\.json is not JSON"):
        read_summary(tmp_path)
