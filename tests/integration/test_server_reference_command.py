"""The reference's own `vllm serve` line, on a folder without weights, and its end when its owner is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from asyncgrpo_core.guard import process_table as table
from asyncgrpo_core.guard.records import read_record, record_path
from asyncgrpo_core.server.checks import ServerWants, check_server
from asyncgrpo_core.server.control import VLLMControl
from asyncgrpo_core.server.process import free_port
from tests.tiny_model import write_model

pytestmark = [pytest.mark.integration, pytest.mark.slow]

OWNER = """
import json, sys, time
from pathlib import Path
from asyncgrpo_core.server.command import ServerCommand
from asyncgrpo_core.server.process import start_server
argv, env, port, run_dir = json.loads(sys.argv[1])
start_server(ServerCommand(argv, env, "127.0.0.1", port), run_dir=Path(run_dir))
print("ready", flush=True)
time.sleep(3600)
"""


@pytest.fixture
def owner(tmp_path):
    """A process that started the server and would hold it for an hour; yields (process, base_url, model folder)."""
    model = write_model(tmp_path / "model", weights=False)
    port = free_port()
    # The reference's flags; the module entry point stands for `vllm serve` and the last two lines for a GPU.
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    argv += ["--weight-transfer-config", '{"backend": "nccl"}', "--logprobs-mode", "processed_logprobs"]
    argv += ["--max-model-len", "512", "--port", str(port), "--load-format", "dummy"]
    argv += ["--dtype", "float32", "--enforce-eager", "--max-num-seqs", "64", "--no-enable-chunked-prefill"]
    env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    env |= {"OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}
    spec = json.dumps([argv, env, port, str(tmp_path)])
    process = subprocess.Popen([sys.executable, "-c", OWNER, spec], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        yield process, f"http://127.0.0.1:{port}", model
    finally:
        process.kill()
        process.wait()


def test_the_references_command_is_accepted_and_ends_with_its_owner(owner, tmp_path: Path):
    """F001, F095: without --enable-scale-out, backend nccl, dummy weights of a config-only folder."""
    process, url, model = owner
    with VLLMControl(url, timeout_s=120.0) as control:
        cap = control.capabilities()
        wants = ServerWants(
            served_model_name=str(model),
            num_sampler_logprobs=8,
            dtype="float32",
            needed_len=512,
            weight_transfer_backend="nccl",
        )
        assert check_server(cap, wants) == []
        assert cap.token_in_token_out is False
        assert len(control.prompt_logprobs([11, 12, 13])) == 2
    body = {"model": str(model), "prompt": [11, 12], "max_tokens": 4, "logprobs": 8, "seed": 1}
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=120).status_code == 200

    record = read_record(record_path(tmp_path.resolve(), "server-0"))
    tree = [record.guard, record.child, *table.descendants(record.child.pid)]
    assert len(tree) >= 4 and all(table.is_running(p) for p in tree)
    os.kill(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while any(table.is_running(p) for p in tree):
        assert time.monotonic() < deadline, f"still running: {[p for p in tree if table.is_running(p)]}"
        time.sleep(0.1)
    assert not record_path(tmp_path, "server-0").exists()
