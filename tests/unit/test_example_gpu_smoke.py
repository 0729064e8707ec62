"""The parts of the GPU smoke run that need no GPU: its reward, its verdict, and the library it makes for vLLM."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from asyncgrpo_core.models.forward import install_packed_forward
from asyncgrpo_core.models.probe import check_packed_forward
from asyncgrpo_core.models.support import check_config
from examples import gpu_smoke


def test_the_reward_is_the_share_of_even_tokens():
    ids = [[2, 4, 6], [1, 3], [1, 2, 3, 4], []]
    assert gpu_smoke.even_share([None] * 4, ids) == [1.0, 0.0, 0.5, 0.0]


def test_where_the_server_goes_follows_from_the_backend():
    where = {tuple(a): gpu_smoke.parse(a) for a in (["--backend=ipc"], ["--backend=nccl"], ["--device=cpu"], [])}
    assert [(o.backend, o.trainer_gpu, o.server_gpu) for o in where.values()] == [
        ("ipc", 0, 0),
        ("nccl", 0, 1),
        ("shm", 0, 0),
        ("ipc", 0, 0),
    ]
    assert gpu_smoke.parse(["--backend=nccl", "--trainer-gpu=2"]).server_gpu == 3


def summary(**changes):
    rows = [
        {
            "perf/step_s": 2.0,
            "perf/rollout_wait_s": 1.0,
            "perf/fwd_bwd_s": 0.5,
            "perf/weight_sync_s": 0.1,
            "generating_s": 1.5,
            gpu_smoke.LOGP_DIFFERENCE: 0.01,
        }
    ] * 4
    made = {
        "rows": rows,
        "global_step": 4,
        "reward": {"first": 0.5, "last": 0.6},
        "ledger": {"lost": 0, "trained_twice": 0},
        "weight_sync": {"count": 4, "verified": 4, "unverified": 0, "max_abs_logp_diff": 0.01, "mean_s": 0.1},
        "throughput": {"generated_tokens_per_s": 1.0},
    }
    return {**made, **changes}


def test_a_good_run_passes_and_its_last_line_can_be_read_by_machines(capsys):
    result = gpu_smoke.report(gpu_smoke.parse(["--steps=4"]), summary(), {"backend": "ipc"})
    assert result["ok"] and json.loads(json.dumps(result))["split"]["generating_s"] == 1.5
    assert "the rest" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"global_step": 3}, "all steps"),
        ({"weight_sync": {**summary()["weight_sync"], "verified": 3, "unverified": 1}}, "every sync proved"),
        ({"weight_sync": {**summary()["weight_sync"], "count": 3, "verified": 3}}, "every sync proved"),
        ({"ledger": {"lost": 1, "trained_twice": 0}}, "nothing lost"),
        ({"ledger": {"lost": 0, "trained_twice": 2}}, "nothing lost"),
        ({"reward": {"first": 0.5, "last": 0.5}}, "reward rose"),
        ({"rows": [{**summary()["rows"][0], gpu_smoke.LOGP_DIFFERENCE: 0.06}]}, "first step's log-probabilities agree"),
        ({"reward": {"first": None, "last": None}}, "reward rose"),
    ],
)
def test_a_run_that_fell_short_fails_and_says_where(changes, check):
    result = gpu_smoke.report(gpu_smoke.parse(["--steps=4"]), summary(**changes), {})
    assert not result["ok"]
    assert [name for name, ok in result["checks"].items() if not ok] == [check]


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
def test_the_shim_is_the_library_and_what_it_lacks(tmp_path):
    def library(name: str, code: str):
        (tmp_path / "lib.c").write_text(code)
        made = tmp_path / name
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", made, tmp_path / "lib.c"], check=True, timeout=60)
        return made

    old = library("libnccl_old.so.2", "int ncclGetVersion(int *v){*v=22809;return 0;}\n")
    shim = ctypes.CDLL(gpu_smoke.nccl_shim(old, tmp_path))
    version = ctypes.c_int()
    assert shim.ncclGetVersion(ctypes.byref(version)) == 0 and version.value == 22809
    assert shim.ncclCommSuspend(None, 1) != 0 and shim.ncclCommResume(None) != 0
    both = "int ncclCommSuspend(void*c,int f){return 0;}\nint ncclCommResume(void*c){return 0;}\n"
    assert gpu_smoke.nccl_shim(library("libnccl_new.so.2", both), tmp_path) is None


@pytest.mark.parametrize("architecture", ["dense", "moe", "hybrid", "vision"])
@pytest.mark.parametrize("size", ["cpu", "cuda"])
def test_every_architecture_is_a_model_that_can_be_trained(architecture, size, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(gpu_smoke.POLICY_DIR)
    config = gpu_smoke.policy_config(architecture, gpu_smoke.SIZES[size], tokenizer)
    auto = AutoModelForImageTextToText if architecture == "vision" else AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config)
    check_config(model.config, None)
    check_packed_forward(install_packed_forward(model))
