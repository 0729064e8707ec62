"""perf/fwd_bwd_mfu and perf/wall_clock_mfu (F093): operations by hand and by torch's counter, and what is not known."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from asyncgrpo_core.metrics import MetricWindow
from asyncgrpo_core.packing.planner import MicroBatch
from asyncgrpo_core.training import mfu
from asyncgrpo_core.training.mfu import MfuMeter, ModelFlops, peak_flops, segments_of, visible_pairs
from tests.unit.samples import make_sample

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
SPARSE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
WINDOWED = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        *((name, {}) for name in ("llama", "qwen2", "qwen3", "smollm3", "olmo2", "granite", "gemma", "glm", "glm4")),
        ("mistral", {"sliding_window": 5}),
        ("gemma2", WINDOWED),
        ("gemma3_text", WINDOWED),
        ("qwen3_moe", SPARSE),
        ("qwen3_moe", {**SPARSE, "mlp_only_layers": [0], "decoder_sparse_step": 2}),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ],
)
def test_f093_operations_of_an_architecture_agree_with_torchs_counter(kind, changes):
    """Eager attention multiplies every query with every key, so the counter sees n x n pairs in every layer."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**{**TINY, **changes})
    config._attn_implementation, config._experts_implementation = "eager", "eager"
    model = AutoModelForCausalLM.from_config(config).eval()
    n = 11
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.arange(n)[None], use_cache=False)
    counted = counter.get_flop_counts()
    rotary = sum(sum(ops.values()) for name, ops in counted.items() if name.endswith("rotary_emb"))
    flops = ModelFlops.from_config(config)
    expected = n * (flops.per_token + flops.per_term) + n * n * sum(flops.per_pair.values())
    assert counter.get_total_flops() - rotary == expected


def brute_force_pairs(position_ids, window):
    return sum(min(p + 1, window or p + 1) for p in position_ids)


@pytest.mark.parametrize("window", [None, 1, 3, 4, 100])
def test_visible_pairs_are_what_counting_them_gives(window):
    segments = np.array([(0, 4), (4, 9), (4, 6), (6, 7), (6, 12), (0, 2)])
    positions = [p for start, end in segments for p in range(start, end)]
    assert visible_pairs(segments, window) == brute_force_pairs(positions, window)


def hand_model():
    """2 layers, hidden 8, 2 heads of 4, 1 key/value head, MLP 16, vocabulary 10."""
    return Qwen3Config(
        vocab_size=10,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
    )


def test_f093_operations_of_a_trie_row_by_hand():
    """Prompt of 3 with completions of 2 and 2: 3 - 1 shared tokens, as in the reference's picture: 8 of 10."""
    a, b = make_sample(0), make_sample(0, rollout=1)
    a.sequence.token_ids = np.array([1, 2, 3, 4, 5], np.int32)
    b.sequence.token_ids = np.array([1, 2, 3, 8, 9], np.int32)
    assert segments_of([a, b]).tolist() == [[0, 2], [2, 5], [2, 5]]
    flops = ModelFlops.from_config(hand_model())
    # q 8x8, k and v 8x4, o 8x8; gate, up and down 8x16
    assert flops.per_token == 2 * 2 * (8 * 8 + 8 * 4 + 8 * 4 + 8 * 8 + 3 * 8 * 16)
    assert flops.per_pair == {None: 2 * 4 * 2 * 4}
    assert flops.per_term == 2 * 8 * 10
    pairs = (1 + 2) + 2 * (3 + 4 + 5)
    forward = 8 * flops.per_token + 4 * flops.per_term + pairs * 64
    assert flops.of_row([a, b]) == 3 * forward
    frozen = flops.of_row([a, b], trained_share=0.0)  # an adapter: no weight gradients
    assert frozen == 2 * (8 * flops.per_token + 4 * flops.per_term) + 3 * pairs * 64
    assert flops.of_row([]) == 0


def test_f093_utilization_of_two_devices_with_a_declared_peak():
    """One row of 5 tokens per device; peak 1e6 per second and device; the window divides sums, not means."""
    step = [MicroBatch(rows=((make_sample(0),), (make_sample(1),)), row_tokens=(5, 5), row_costs=(1.0, 1.0))]
    flops = ModelFlops.from_config(hand_model())
    row = 3 * (5 * flops.per_token + 2 * flops.per_term + 15 * 64)
    meter, window = MfuMeter(flops, 1e6, devices=2), MetricWindow()
    meter.record(window, step, fwd_bwd_s=0.5, wall_s=1.0)
    meter.record(window, step, fwd_bwd_s=1.5, wall_s=4.0)
    values = window.reduce()
    assert values["perf/fwd_bwd_mfu"] == pytest.approx(4 * row / (2.0 * 2e6))
    assert values["perf/wall_clock_mfu"] == pytest.approx(4 * row / (5.0 * 2e6))


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.5e12),
        ("NVIDIA H100 80GB HBM3", 989.5e12),
        ("NVIDIA H100 PCIe", 756.5e12),
        ("NVIDIA H100 NVL", 835.5e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA B200", 2250e12),
        ("AMD Instinct MI300X", 1307.4e12),
        ("NVIDIA GeForce GTX 1080", None),
        ("NVIDIA A1000 Laptop GPU", None),
    ],
)
def test_f093_peak_of_a_device(name, peak):
    assert peak_flops(name, "bf16") == peak_flops(name, "fp16") == peak
    assert peak_flops(name, "fp32") is None


def tiny_model(**changes):
    return Qwen3ForCausalLM(Qwen3Config(**{**TINY, **changes}))


def args_of(**changes):
    return SimpleNamespace(**{"device": torch.device("cpu"), "bf16": True, "fp16": False, "world_size": 1, **changes})


def test_f093_an_unknown_peak_or_architecture_logs_no_metric_and_one_line(monkeypatch, caplog):
    model, window = tiny_model(), MetricWindow()
    step = [MicroBatch(rows=((make_sample(0),),), row_tokens=(5,), row_costs=(1.0,))]
    with caplog.at_level(logging.INFO):
        MfuMeter.of_training(model, model.config, args_of()).record(window, step, 1.0, 1.0)
        assert caplog.records == []  # nobody asks for the utilization of a CPU
        monkeypatch.setattr(mfu, "_device_name", lambda device: "NVIDIA GeForce GTX 1080")
        MfuMeter.of_training(model, model.config, args_of()).record(window, step, 1.0, 1.0)
        monkeypatch.setattr(mfu, "_device_name", lambda device: "NVIDIA H200")
        MfuMeter.of_training(model, model.config, args_of(bf16=False)).record(window, step, 1.0, 1.0)
        other = CONFIG_MAPPING["gpt2"]()
        MfuMeter.of_training(model, other, args_of()).record(window, step, 1.0, 1.0)
    assert window.reduce() == {}
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3
    assert "GTX 1080" in said[0] and "fp32" in said[1] and "'gpt2'" in said[2]


def test_f093_on_a_known_device_both_are_logged(monkeypatch):
    monkeypatch.setattr(mfu, "_device_name", lambda device: "NVIDIA H200")
    model, window = tiny_model(), MetricWindow()
    meter = MfuMeter.of_training(model, model.config, args_of(world_size=2))
    assert (meter.peak, meter.devices, meter.trained_share) == (989.5e12, 2, 1.0)
    meter.record(window, [MicroBatch(rows=((make_sample(0),), ()), row_tokens=(5, 1), row_costs=(1.0, 0.0))], 1.0, 2.0)
    values = window.reduce()
    assert values["perf/fwd_bwd_mfu"] == pytest.approx(2 * values["perf/wall_clock_mfu"]) and len(values) == 2


def test_an_adapter_trains_next_to_nothing_of_the_matrices():
    model = get_peft_model(tiny_model(), LoraConfig(r=1, target_modules="all-linear", task_type="CAUSAL_LM"))
    assert 0 < mfu._trained_share(model) < 0.15
    assert mfu._trained_share(tiny_model(tie_word_embeddings=True)) == 1.0
