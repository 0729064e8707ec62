"""A rank that is killed, or that hangs, while the others are in a collective with it (F005, F021)."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from asyncgrpo_core.manifest import newest_checkpoint
from tests.ranks.rank_parts import on_ranks
from tests.tiny_model import write_model


@pytest.mark.parametrize(
    ("where", "how", "says"),
    [
        ("backward", "SIGKILL", "trainer rank 1 is lost"),
        ("save", "SIGKILL", "trainer rank 1 is lost"),
        ("forward", "SIGSTOP", "ddp_timeout (15 s)"),
    ],
)
def test_the_others_end_soon_and_say_which_rank_is_gone(tmp_path, monkeypatch, where, how, says):
    """A hanging rank is gone after `ddp_timeout`: transformers does not hand that to gloo, which waits 30 minutes."""
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "2")  # torchrun: from TERM to KILL, for the stopped one
    model = write_model(tmp_path / "model")
    started = time.time()
    code, output = on_ranks(2, "end_inside", str(model), str(tmp_path), where, how)
    assert code != 0, output
    kind, text, pipeline_stopped = json.loads((tmp_path / "ended-0.json").read_text())
    assert (kind, pipeline_stopped) == ("RankLostError", True) and says in text and "logs/trainer-" in text, text
    assert "GLHF" not in text
    last = tmp_path / "run" / "checkpoint-1"
    assert newest_checkpoint(tmp_path / "run") == last
    assert os.path.getmtime(tmp_path / "ended-0.json") - _written(last) < 45, time.time() - started


def _written(checkpoint: Path) -> float:
    return (checkpoint / "rollout_state.json").stat().st_mtime
