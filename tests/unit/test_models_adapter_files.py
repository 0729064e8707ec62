"""The adapter's folder, what vLLM can serve of it, and the probe weights."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch
from peft.tuners.lora.config import KasaConfig, MontecloraConfig
from safetensors.torch import load_file

from asyncgrpo_core.models.adapter_files import ProbeWeights, save_adapter, served_adapter
from tests.unit.policy_cases import tiny_policy

IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]


def plain_policy():
    return tiny_policy(dtype=torch.float32).eval()


def policy(**changes):
    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **changes}
    return peft.get_peft_model(plain_policy(), peft.LoraConfig(**settings)).eval()


@torch.no_grad()
def score_tokens(model, ids: list[int]) -> list[float]:
    """transformers' own forward, as an outside witness."""
    logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return [float(logprobs[i - 1, ids[i]]) for i in range(1, len(ids))]


def test_the_folder_holds_the_adapter_alone_and_peft_reads_it_back(tmp_path):
    """F139: only the adapter is written, in PEFT's own format."""
    model = policy(init_lora_weights=False)
    assert save_adapter(model, tmp_path / "3") == tmp_path / "3"
    tensors = load_file(tmp_path / "3" / "adapter_model.safetensors")
    assert tensors and all(".lora_A." in name or ".lora_B." in name for name in tensors)
    assert json.loads((tmp_path / "3" / "adapter_config.json").read_text())["r"] == 4
    again = plain_policy()
    assert score_tokens(again, IDS) != score_tokens(model, IDS)
    loaded = peft.PeftModel.from_pretrained(again, tmp_path / "3")
    assert score_tokens(loaded, IDS) == score_tokens(model, IDS)


def test_an_adapter_with_a_name_of_its_own_lies_in_a_folder_of_that_name(tmp_path):
    base = plain_policy()
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"]), adapter_name="mine")
    place = save_adapter(model, tmp_path / "0")
    assert place == tmp_path / "0" / "mine" and (place / "adapter_model.safetensors").is_file()
    assert len(load_file(place / "adapter_model.safetensors")) == 2 * base.config.num_hidden_layers


def test_what_a_server_needs_to_know():
    """F141: the rank that counts is the highest of all modules."""
    assert served_adapter(plain_policy()) is None
    found = served_adapter(policy(rank_pattern={"q_proj": 12}))
    assert (found.rank, found.obstacle) == (12, None)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["norm"]}, "modules_to_save"),
        ({"bias": "lora_only"}, "bias"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"kasa_config": KasaConfig(), "target_modules": ["q_proj"]}, "KasaLinear"),  # more than A and B
        ({"monteclora_config": MontecloraConfig(), "target_modules": ["q_proj"]}, "MontecloraLinear"),
    ],
)
def test_f140_adapters_that_vllm_does_not_serve(changes, word):
    assert word in served_adapter(policy(**changes)).obstacle


def test_another_kind_of_adapter():
    base = plain_policy()
    model = peft.get_peft_model(base, peft.LoHaConfig(r=2, target_modules=["q_proj"]))
    assert "LOHA" in served_adapter(model).obstacle


def test_probe_weights_move_the_policy_and_leave_no_trace():
    """A fresh adapter changes nothing (B is zero), so only a probe shows that a server applies adapters at all."""
    model = policy()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    plain, probe = score_tokens(model, IDS), ProbeWeights(model)
    moved = []
    for share in (0.05, 0.2, 0.8):
        probe.set(share)
        moved.append(distance(score_tokens(model, IDS), plain))
    assert 0 < moved[0] < moved[1] < moved[2] and moved[2] > 0.1
    probe.restore()
    probe.restore()
    assert score_tokens(model, IDS) == plain
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_probe_weights_have_the_size_that_was_asked_for():
    model = policy(r=4, lora_alpha=12, use_rslora=True)
    probe = ProbeWeights(model)
    probe.set(0.5)
    layer = next(m for n, m in model.named_modules() if n.endswith("layers.0.mlp.up_proj"))
    change, weight = layer.get_delta_weight("default").detach(), layer.get_base_layer().weight.detach()
    ratio = float(change.pow(2).mean().sqrt() / weight.pow(2).mean().sqrt())
    assert 0.3 < ratio < 0.8
    probe.restore()


def test_the_base_is_what_is_left_at_size_zero():
    model = policy(init_lora_weights=False)
    own, probe = score_tokens(model, IDS), ProbeWeights(model)
    probe.set(0.0)
    assert score_tokens(model, IDS) == pytest.approx(score_tokens(plain_policy(), IDS))
    probe.restore()
    assert score_tokens(model, IDS) == own


def distance(a: list[float], b: list[float]) -> float:
    return sum(abs(x - y) for x, y in zip(a, b, strict=True)) / len(a)


def test_the_folder_is_written_without_asking_a_hub(tmp_path, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("nobody is asked about the base model")

    monkeypatch.setattr("peft.utils.save_and_load.check_file_exists_on_hf_hub", refuse)
    assert Path(save_adapter(policy(), tmp_path / "1")).is_dir()
