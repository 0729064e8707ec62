"""The in-server comparison finds the parameter that did not arrive, by its Hugging Face name.

The model here has vLLM's CPU conventions without vLLM: fused projections whose parameter was emptied by packing,
a tied head with a packed copy of its own, a padded vocabulary.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from asyncgrpo_core.sync.delivery import compare_delivery

HIDDEN, VOCAB, PADDED = 32, 50, 64
TIED = "lm_head.weight (tied to model.embed_tokens.weight)"


class Packed(nn.Module):
    """A linear layer as vLLM leaves it on a CPU: an opaque callable, and (unless kept) an empty parameter."""

    def __init__(self, weight: Tensor, keep: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone() if keep else weight.new_empty(0), requires_grad=False)
        self.pack(weight)

    def pack(self, weight: Tensor) -> None:
        packed = weight.clone()
        self.cpu_linear = lambda x, _weight, bias: nn.functional.linear(x, packed, bias)


class Norm(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone(), requires_grad=False)


def checkpoint(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.layers.0.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
        "model.layers.0.self_attn.k_proj.weight": (HIDDEN // 2, HIDDEN),
        "model.layers.0.self_attn.v_proj.weight": (HIDDEN // 2, HIDDEN),
        "model.layers.0.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    return {n: (torch.randn(s, generator=generator) * 0.05).to(dtype) for n, s in shapes.items()}


def serve(sent: dict[str, Tensor]) -> nn.Module:
    """A server model that computes with exactly `sent`."""
    attention = nn.Module()
    parts = [sent[f"model.layers.0.self_attn.{p}_proj.weight"] for p in "qkv"]
    attention.qkv_proj = Packed(torch.cat(parts))
    attention.o_proj = Packed(sent["model.layers.0.self_attn.o_proj.weight"])
    layer = nn.Module()
    layer.self_attn = attention
    inner = nn.Module()
    embedding = sent["model.embed_tokens.weight"]
    padded = torch.cat([embedding, embedding.new_zeros(PADDED - VOCAB, HIDDEN)])
    inner.embed_tokens = Norm(padded)
    inner.layers = nn.ModuleList([layer])
    inner.norm = Norm(sent["model.norm.weight"])
    model = nn.Module()
    model.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    model.model = inner
    model.lm_head = Packed(padded)
    model.lm_head.weight = inner.embed_tokens.weight
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_weights_are_found_equal(dtype: torch.dtype) -> None:
    sent = checkpoint(dtype)
    report = compare_delivery(serve(sent), sent)
    assert report.as_dict() == {"checked": len(sent) + 1, "differing": {}, "unchecked": {}, "missing": []}


@pytest.mark.parametrize("name", checkpoint())
def test_each_stale_parameter_is_named(name: str) -> None:
    sent = checkpoint()
    stale = dict(sent)
    stale[name] = sent[name] + 0.25
    report = compare_delivery(serve(stale), sent)
    expected = {name, TIED} if "embed" in name else {name}
    assert set(report.differing) == expected
    assert all(value == pytest.approx(0.25, rel=0.01) or value > 0.25 for value in report.differing.values())


def test_stale_packed_copy_of_a_tied_head_is_named_alone() -> None:
    """The CPU trap: the shared parameter is new, the head's packed copy is old."""
    sent = checkpoint()
    model = serve(sent)
    model.lm_head.pack(torch.zeros(PADDED, HIDDEN))
    assert set(compare_delivery(model, sent).differing) == {TIED}


def test_change_below_bf16_rounding_of_a_product_is_found() -> None:
    """One unit in the last place of every weight: a dense probe cannot see it, one-hot columns are exact."""
    sent = checkpoint(torch.bfloat16)
    stale = {n: (t.view(torch.int16) + 1).view(torch.bfloat16) if "o_proj" in n else t for n, t in sent.items()}
    report = compare_delivery(serve(stale), sent)
    assert set(report.differing) == {"model.layers.0.self_attn.o_proj.weight"}


def test_server_in_a_coarser_dtype_holds_what_was_sent() -> None:
    sent = checkpoint(torch.float32)
    held = {name: tensor.to(torch.bfloat16) for name, tensor in sent.items()}
    report = compare_delivery(serve(held), sent)
    assert not report.differing and not report.unchecked


def test_change_outside_the_probed_columns_is_found() -> None:
    """The dense input covers the columns that one-hot inputs leave out."""
    sent = checkpoint()
    for column in range(HIDDEN):
        stale = {n: t.clone() for n, t in sent.items()}
        stale["model.layers.0.self_attn.v_proj.weight"][:, column] += 0.1
        assert set(compare_delivery(serve(stale), sent).differing) == {"model.layers.0.self_attn.v_proj.weight"}


def test_not_a_number_is_a_difference() -> None:
    sent = checkpoint()
    stale = {n: t.clone() for n, t in sent.items()}
    stale["model.norm.weight"][3] = math.nan
    assert compare_delivery(serve(stale), sent).differing == {"model.norm.weight": math.inf}


def test_what_was_not_sent_and_what_has_no_place() -> None:
    sent = checkpoint()
    model = serve(sent)
    sent["model.visual.weight"] = torch.zeros(3)
    del sent["model.norm.weight"]
    report = compare_delivery(model, sent)
    assert report.missing == ["model.norm.weight"]
    assert list(report.unchecked) == ["model.visual.weight"]


def test_wrong_shape_is_unchecked_not_equal() -> None:
    sent = checkpoint()
    model = serve(sent)
    sent["model.norm.weight"] = torch.zeros(HIDDEN + 1)
    report = compare_delivery(model, sent)
    assert list(report.unchecked) == ["model.norm.weight"]


def test_a_packed_kernel_is_compared_by_its_values() -> None:
    """vLLM's CPU build holds a kernel of [channels, 1, width] as [channels, width], in another order."""
    sent = {"conv.weight": torch.randn(64, 1, 4, generator=torch.Generator().manual_seed(0)).bfloat16().float()}

    def held(tensor: torch.Tensor) -> nn.Module:
        model = nn.Module()
        model.conv = nn.Module()
        packed = tensor.view(2, 32, 4).transpose(1, 2).reshape(64, 4).bfloat16()
        model.conv.register_parameter("weight", nn.Parameter(packed))
        return model

    report = compare_delivery(held(sent["conv.weight"]), sent)
    assert (report.checked, report.unchecked, report.differing) == (1, {}, {})
    stale = sent["conv.weight"].clone()
    stale[5, 0, 2] += 1
    assert list(compare_delivery(held(stale), sent).differing) == ["conv.weight"]


def test_renamed_parameters_are_followed() -> None:
    """Models with another prefix in the checkpoint carry a mapper; its stacked renames are left to us."""
    sent = checkpoint()
    model = serve(sent)

    class Mapper:
        def get_rename_mapper(self):
            return self

        def _map_name(self, name: str) -> str | None:
            return None if name.startswith("skip") else name.removeprefix("wrapped.")

    model.hf_to_vllm_mapper = Mapper()
    wrapped = {f"wrapped.{name}": tensor for name, tensor in sent.items()}
    report = compare_delivery(model, wrapped | {"skip.me": torch.zeros(1)})
    assert not report.differing
    assert list(report.unchecked) == ["skip.me"]
    assert report.checked == len(sent) + 1


def test_packed_experts_are_not_compared_and_not_called_missing() -> None:
    """F138: a Mixture-of-Experts layer of the server is one packed tensor; the canary has to prove it."""
    sent = checkpoint()
    model = serve(sent)
    model.model.layers.append(nn.Module())
    for layer in model.model.layers:
        layer.mlp = nn.Module()
        layer.mlp.experts = nn.Module()
        layer.mlp.experts.routed_experts = Norm(torch.zeros(2, 4, 4))
    names = [f"model.layers.0.mlp.experts.{e}.gate_proj.weight" for e in (0, 1)]
    report = compare_delivery(model, sent | dict.fromkeys(names, torch.zeros(2, 4)))
    assert report.unchecked == dict.fromkeys(names, "the server packs the experts of a layer into one tensor")
    assert report.missing == ["model.layers.1.mlp.experts.routed_experts.weight"]  # nothing of that layer was sent
    assert not report.differing
