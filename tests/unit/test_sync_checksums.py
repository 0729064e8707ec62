"""Server digests against the trainer's tensors: fusion, padding, dtype, ranks."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncgrpo_core.sync.checksums import compare_checksums

PREFIX = "dp0:pp0:pcp0:tp0:"


def digest(tensor: Tensor) -> str:
    """vLLM's digest, written down independently: sha256 over the raw bytes."""
    return hashlib.sha256(np.ascontiguousarray(tensor.view(torch.int16).numpy()).tobytes()).hexdigest()


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {
        "embed_tokens.weight": (70, 8),
        "layers.0.q_proj.weight": (8, 8),
        "layers.0.k_proj.weight": (4, 8),
        "layers.0.v_proj.weight": (4, 8),
        "norm.weight": (8,),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def server_digests(sent: dict[str, Tensor], prefix: str = PREFIX) -> dict[str, str]:
    held = {name: tensor.to(torch.bfloat16) for name, tensor in sent.items()}
    padded = torch.cat([held["embed_tokens.weight"], torch.zeros(128 - 70, 8, dtype=torch.bfloat16)])
    qkv = torch.cat([held[f"layers.0.{p}_proj.weight"] for p in "qkv"])
    return {
        prefix + "embed_tokens.weight": digest(padded),
        prefix + "layers.0.qkv_proj.weight": digest(qkv),
        prefix + "norm.weight": digest(held["norm.weight"]),
    }


def test_right_weights_are_equal() -> None:
    sent = tensors()
    evidence = compare_checksums(server_digests(sent), sent.items(), torch.bfloat16)
    assert evidence is not None and evidence.equal
    assert evidence.compared == len(sent)


def test_a_fused_parameter_names_its_parts() -> None:
    sent = tensors()
    old = {**sent, "layers.0.k_proj.weight": sent["layers.0.k_proj.weight"] + 1}
    evidence = compare_checksums(server_digests(old), sent.items(), torch.bfloat16)
    assert evidence is not None
    assert set(evidence.differing) == {f"layers.0.{p}_proj.weight" for p in "qkv"}


def float32_digest(tensor: Tensor) -> str:
    return hashlib.sha256(np.ascontiguousarray(tensor.numpy()).tobytes()).hexdigest()


def test_what_a_server_holds_in_float32_is_compared() -> None:
    """Routers come in the server's dtype, as every matrix, their biases and a delta rule's decay as they are."""
    generator = torch.Generator().manual_seed(3)
    sent = {"mlp.gate.weight": torch.randn(4, 8, generator=generator), "A_log": torch.randn(4, generator=generator)}
    router = sent["mlp.gate.weight"].to(torch.bfloat16).float()
    server = {PREFIX + "mlp.gate.weight": float32_digest(router), PREFIX + "A_log": float32_digest(sent["A_log"])}
    evidence = compare_checksums(server, sent.items(), torch.bfloat16)
    assert evidence is not None and evidence.equal and evidence.compared == 2
    late = sent | {"A_log": sent["A_log"] + 1e-6}
    evidence = compare_checksums(server, late.items(), torch.bfloat16)
    assert evidence is not None and evidence.differing == ("A_log",)


def test_a_saved_buffer_has_no_digest_and_needs_none() -> None:
    sent = {"norm.weight": torch.ones(8), "layer_scalar": torch.nn.Buffer(torch.ones(1))}
    server = {PREFIX + "norm.weight": digest(torch.ones(8, dtype=torch.bfloat16))}
    evidence = compare_checksums(server, sent.items(), torch.bfloat16)
    assert evidence is not None and evidence.equal and evidence.compared == 1
    assert evidence.constant == ("layer_scalar",) and evidence.matched == ("norm.weight",)
    shuffled = server | {PREFIX + "layer_scalar": digest(torch.zeros(1, dtype=torch.bfloat16))}
    evidence = compare_checksums(shuffled, sent.items(), torch.bfloat16)
    assert evidence is not None and evidence.equal and evidence.constant == ("layer_scalar",)
    plain = sent | {"layer_scalar": torch.ones(1)}
    evidence = compare_checksums(server, plain.items(), torch.bfloat16)
    assert evidence is not None and evidence.unchecked == ("layer_scalar",)


def test_what_has_another_name_or_is_turned_round_is_found_by_its_digest() -> None:
    """GPT-NeoX has another prefix at the server, GPT-2's matrices are [inputs, outputs], GraniteMoE fuses by itself."""
    generator = torch.Generator().manual_seed(4)
    sent = {
        "gpt_neox.embed_in.weight": torch.randn(64, 8, generator=generator),
        "h.0.c_attn.weight": torch.randn(8, 24, generator=generator),
        "norm_1.weight": torch.ones(8),
        "norm_2.weight": torch.ones(8),
    }
    held = {name: tensor.to(torch.bfloat16) for name, tensor in sent.items()}
    server = {
        PREFIX + "embedding.weight": digest(held["gpt_neox.embed_in.weight"]),
        PREFIX + "h.0.c_attn.weight": digest(held["h.0.c_attn.weight"].T.contiguous()),
        PREFIX + "other_1.weight": digest(held["norm_1.weight"]),
        PREFIX + "other_2.weight": digest(held["norm_2.weight"]),
    }
    evidence = compare_checksums(server, sent.items(), torch.bfloat16)
    assert evidence is not None and evidence.equal and evidence.compared == 4
    stale = server | {PREFIX + "other_2.weight": digest(held["norm_2.weight"] * 2)}
    evidence = compare_checksums(stale, sent.items(), torch.bfloat16)
    assert evidence is not None and evidence.unchecked == ("norm_2.weight",)  # one tensor does not prove two


def test_tensors_that_changed_places_are_differences() -> None:
    """Each is at the server, under the other's name: that proves nothing of either."""
    sent = {"layers.0.norm.weight": torch.ones(8), "layers.1.norm.weight": torch.zeros(8)}
    held = {name: tensor.to(torch.bfloat16) for name, tensor in sent.items()}
    server = {
        PREFIX + "layers.0.norm.weight": digest(held["layers.1.norm.weight"]),
        PREFIX + "layers.1.norm.weight": digest(held["layers.0.norm.weight"]),
    }
    evidence = compare_checksums(server, sent.items(), torch.bfloat16)
    assert evidence is not None and set(evidence.differing) == set(sent)
    renamed = {"layers.0.norm.weight": torch.ones(8), "elsewhere.weight": torch.zeros(8)}  # and what has no name there
    evidence = compare_checksums(server, renamed.items(), torch.bfloat16)
    assert evidence is not None and evidence.matched == () and evidence.unchecked == ("elsewhere.weight",)


@pytest.mark.parametrize(
    ("fused", "parts"),
    [
        ("in_proj_qkvz", ["in_proj_qkv", "in_proj_z"]),
        ("in_proj_ba", ["in_proj_b", "in_proj_a"]),
        ("fused_qkv_a_proj", ["q_a_proj", "kv_a_proj_with_mqa"]),
        ("gate_up_proj", ["gate_proj", "up_proj"]),
        ("qkv_proj", ["q_proj", "k_proj", "k_proj"]),  # Gemma 4's keys that are values too
        ("gate_up_proj", ["gate_up_proj"]),  # GLM-4's checkpoint holds it so
    ],
)
def test_what_a_server_joins_is_compared_in_its_order(fused: str, parts: list[str]) -> None:
    generator = torch.Generator().manual_seed(6)
    sent = {f"layers.0.mlp.{part}.weight": torch.randn(4, 8, generator=generator) for part in dict.fromkeys(parts)}
    held = torch.cat([sent[f"layers.0.mlp.{part}.weight"] for part in parts]).to(torch.bfloat16)
    server = {f"{PREFIX}model.layers.0.mlp.{fused}.weight": digest(held)}
    evidence = compare_checksums(server, sent.items(), torch.bfloat16)
    assert evidence is not None and evidence.equal and set(evidence.matched) == set(sent)
    server = {f"{PREFIX}model.layers.0.mlp.{fused}.weight": digest(held.flip(0))}
    evidence = compare_checksums(server, sent.items(), torch.bfloat16)
    assert evidence is not None and set(evidence.differing) == set(sent)


def test_a_scalar_is_compared_too() -> None:
    """Apertus' activations have one each."""
    sent = {"act_fn.beta": torch.tensor(0.5), "norm.weight": torch.ones(8)}
    server = {
        PREFIX + "other_norm.weight": digest(torch.ones(8, dtype=torch.bfloat16)),
        PREFIX + "other_beta": digest(torch.tensor([0.5], dtype=torch.bfloat16)),
    }
    evidence = compare_checksums(server, sent.items(), torch.bfloat16)
    assert evidence is not None and evidence.equal and evidence.compared == 2


def test_one_wrong_replica_is_a_difference() -> None:
    sent = tensors()
    old = {**sent, "norm.weight": sent["norm.weight"] + 1}
    both = server_digests(sent) | server_digests(old, "dp1:pp0:pcp0:tp0:")
    evidence = compare_checksums(both, sent.items(), torch.bfloat16)
    assert evidence is not None and evidence.differing == ("norm.weight",)


def test_emptied_and_absent_parameters_are_unchecked() -> None:
    """On a CPU the server's linear weights are emptied after packing: their digest is of nothing."""
    sent = tensors()
    digests = server_digests(sent)
    digests[PREFIX + "norm.weight"] = hashlib.sha256(b"").hexdigest()
    del digests[PREFIX + "layers.0.qkv_proj.weight"]
    evidence = compare_checksums(digests, sent.items(), torch.bfloat16)
    assert evidence is not None and not evidence.equal
    assert set(evidence.unchecked) == set(sent) - {"embed_tokens.weight"}


@pytest.mark.parametrize("rank", ["dp0:pp0:pcp0:tp1:", "dp0:pp0:pcp1:tp0:"])
def test_sharded_tensors_cannot_be_compared(rank: str) -> None:
    sent = tensors()
    digests = server_digests(sent) | server_digests(sent, rank)
    assert compare_checksums(digests, sent.items(), torch.bfloat16) is None


@pytest.mark.parametrize("names", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")])
@pytest.mark.parametrize("inside", ["", "routed_experts."])
def test_f138_the_experts_of_a_layer_are_one_parameter_of_the_server(names: tuple[str, str, str], inside: str) -> None:
    """vLLM holds [experts, gate and up, hidden] and [experts, hidden, intermediate], under either name."""
    generator = torch.Generator().manual_seed(2)
    gate, up = torch.randn(3, 4, 8, generator=generator), torch.randn(3, 4, 8, generator=generator)
    down = torch.randn(3, 8, 4, generator=generator)
    layer = "model.layers.0.mlp.experts"
    sent = {
        f"{layer}.{e}.{name}.weight": stack[e]
        for name, stack in zip(names, (gate, up, down), strict=True)
        for e in range(3)
    }
    held = {"w13_weight": torch.cat([gate, up], dim=1), "w2_weight": down}
    server = {f"{PREFIX}{layer}.{inside}{name}": digest(t.to(torch.bfloat16)) for name, t in held.items()}
    evidence = compare_checksums(server, sent.items(), torch.bfloat16)
    assert evidence is not None and evidence.equal and evidence.compared == 9
    other = sent | {f"{layer}.2.{names[1]}.weight": up[2] + 1}
    evidence = compare_checksums(server, other.items(), torch.bfloat16)
    assert evidence is not None
    assert set(evidence.differing) == {f"{layer}.{e}.{name}.weight" for e in range(3) for name in names[:2]}


@pytest.mark.parametrize("published", ["one_by_one", "together", "turned_round"])
def test_f138_experts_whose_halves_a_kernel_swaps(published: str) -> None:
    """FlashInfer's CUTLASS experts, vLLM's choice on some GPUs, hold [up; gate]."""
    generator = torch.Generator().manual_seed(5)
    gate, up = torch.randn(3, 4, 8, generator=generator), torch.randn(3, 4, 8, generator=generator)
    layer = "model.layers.0.mlp.experts"
    together = torch.cat([gate, up], dim=1)
    sent = {
        "one_by_one": {
            f"{layer}.{e}.{name}.weight": stack[e]
            for e in range(3)
            for name, stack in (("gate_proj", gate), ("up_proj", up))
        },
        "together": {f"{layer}.gate_up_proj": together},
        "turned_round": {f"{layer}.gate_up_proj": together.transpose(1, 2).contiguous()},
    }[published]
    held = torch.cat([up, gate], dim=1).to(torch.bfloat16)
    evidence = compare_checksums({f"{PREFIX}{layer}.w13_weight": digest(held)}, sent.items(), torch.bfloat16)
    assert evidence is not None and evidence.equal and evidence.compared == len(sent)
    wrong = {f"{PREFIX}{layer}.w13_weight": digest(held + 1)}
    evidence = compare_checksums(wrong, sent.items(), torch.bfloat16)
    assert evidence is not None and {*evidence.differing} == set(sent)


def test_f189_the_text_model_of_a_vision_language_model_has_its_wrapper_elsewhere() -> None:
    sent = {"model.language_model.norm.weight": torch.ones(8), "lm_head.weight": torch.zeros(64, 8)}
    server = {
        PREFIX + "language_model.model.norm.weight": digest(torch.ones(8, dtype=torch.bfloat16)),
        PREFIX + "language_model.lm_head.weight": digest(torch.zeros(64, 8, dtype=torch.bfloat16)),
        PREFIX + "visual.norm.weight": digest(torch.ones(8, dtype=torch.bfloat16)),
    }
    evidence = compare_checksums(server, sent.items(), torch.bfloat16)
    assert evidence is not None and evidence.equal and evidence.compared == 2
