"""All that vLLM's model class has is sent, parameters and buffers, and nothing that it does not know (F138).

The model classes are vLLM's own, made in another process (nothing but sync/ may import vllm in this one).
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from asyncgrpo_core.models.parameters import iter_server_parameters
from asyncgrpo_core.sync.checksums import compare_checksums
from tests.tiny_architectures import (
    BUFFERED_ARCHITECTURES,
    HYBRID_ARCHITECTURES,
    NAMES,
    NEED_TORCHVISION,
    RENAMED_ARCHITECTURES,
    make_architecture,
)
from tests.tiny_model import write_tokenizer

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
ALL = [*NAMES, *BUFFERED_ARCHITECTURES, *HYBRID_ARCHITECTURES, *RENAMED_ARCHITECTURES]
HAS_TORCHVISION = importlib.util.find_spec("torchvision") is not None


def write_sent(folder: Path, architecture: str, *, without: str | None = None, unknown: str | None = None) -> None:
    folder.mkdir()
    write_tokenizer(folder)
    model = make_architecture(architecture)
    config = model.config
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    sent = {name: tensor.contiguous().clone() for name, tensor in iter_server_parameters(model) if name != without}
    if unknown is not None:
        sent[unknown] = sent["model.norm.weight"].clone()
    save_file(sent, folder / "sent.safetensors")


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, dict]:
    """One process for all of them: importing vllm is most of the time."""
    root = tmp_path_factory.mktemp("names")
    # Experts first: vLLM makes the groups of its parallel layers for the first model.
    names = sorted(ALL, key=lambda name: "moe" not in name)
    if not HAS_TORCHVISION:
        names = [name for name in names if name not in NEED_TORCHVISION]
    for name in names:
        write_sent(root / name, name)
    write_sent(root / "lacking", "llama", without="model.layers.1.self_attn.k_proj.weight")
    write_sent(root / "unknown", "llama", unknown="model.layers.1.mlp.experts.down_proj")
    folders = [str(root / name) for name in [*names, "lacking", "unknown"]]
    command = [sys.executable, "-m", "tests.integration.vllm_load", str(root / "report.json"), *folders]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((root / "report.json").read_text())


@pytest.mark.parametrize("architecture", ALL)
def test_f138_the_server_gets_every_parameter_and_knows_each_name(reports, architecture):
    if architecture in NEED_TORCHVISION and not HAS_TORCHVISION:
        pytest.skip("vLLM's class of this model needs torchvision, which is not installed")
    report = reports[architecture]
    assert report["error"] is None
    assert [name for name in report["left"] if not name.startswith("visual.")] == []  # the tower keeps its own (F189)
    own = type(make_architecture(architecture)).__name__
    assert report["class"] in (own, "TransformersForCausalLM")  # vLLM's wrapper of transformers' model


@pytest.mark.parametrize("kind", ["digests", "fingerprints"])
@pytest.mark.parametrize("architecture", ALL)
def test_f138_the_digests_of_a_bfloat16_server_prove_every_tensor(reports, architecture, kind):
    """Small steps move the canary less than bfloat16 rounds: then only the digests can prove a delivery."""
    if architecture in NEED_TORCHVISION and not HAS_TORCHVISION:
        pytest.skip("vLLM's class of this model needs torchvision, which is not installed")
    digests = {f"dp0:pp0:pcp0:tp0:{name}": digest for name, digest in reports[architecture][kind].items()}
    sent = list(iter_server_parameters(make_architecture(architecture)))
    fingerprints = kind == "fingerprints"
    evidence = compare_checksums(digests, sent, torch.bfloat16, fingerprints=fingerprints)
    assert evidence is not None and (evidence.differing, evidence.unchecked) == ((), ())
    parameters = {name for name, tensor in sent if not isinstance(tensor, torch.nn.Buffer)}
    assert len(parameters) <= evidence.compared <= len(sent)  # a buffer here may be a parameter there
    moved = [(name, tensor + 1) for name, tensor in sent]
    evidence = compare_checksums(digests, moved, torch.bfloat16, fingerprints=fingerprints)
    assert evidence is not None and parameters <= {*evidence.differing, *evidence.unchecked}


def test_a_parameter_that_is_not_sent_or_not_known_is_seen(reports):
    assert reports["lacking"]["left"] == ["model.layers.1.self_attn.qkv_proj.weight"]
    assert "experts" in reports["unknown"]["error"]
