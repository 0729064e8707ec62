"""The GPU smoke run's own script, on the CPU: same server start, same trainer, shared memory instead of GPU memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "gpu_smoke.py"

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(660)]


@pytest.mark.parametrize("options", [[], ["--lora=8"], ["--architecture=moe"]], ids=["dense", "adapter", "experts"])
def test_the_smoke_run_ends_with_every_sync_proved(tmp_path, options):
    command = [sys.executable, SCRIPT, "--device=cpu", "--steps=3", f"--run-dir={tmp_path}", *options]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    result = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == (0 if result["ok"] else 1), done.stderr[-2000:]
    # three steps of a noisy reward: whether it rose is for longer runs
    assert {name for name, ok in result["checks"].items() if not ok} <= {"reward rose"}
    assert result["weight_sync"]["verified"] == 3
    split = result["split"]
    assert 0 < split["perf/fwd_bwd_s"] < result["step_s"] and 0 < split["perf/weight_sync_s"] < result["step_s"]
    assert (tmp_path / "logs" / "server-0.log").is_file() and not list((tmp_path / "guards").glob("*"))
