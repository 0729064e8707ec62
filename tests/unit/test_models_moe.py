"""The load-balancing loss of packed rows against transformers' own on the same tokens (F039, F056, F209)."""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model

from asyncgrpo_core.errors import ConfigError
from asyncgrpo_core.models import forward
from asyncgrpo_core.models.forward import causal_model, install_packed_forward
from asyncgrpo_core.models.moe import (
    RouterBalance,
    _routers,
    install_router_loss,
    router_balance,
    router_coefficient,
    routing_sums,
)
from asyncgrpo_core.packing import pack_row
from asyncgrpo_core.packing.trie_layout import tree_layout
from tests.tiny_architectures import make_architecture
from tests.unit import deltanet_cases
from tests.unit.policy_cases import (
    assert_same_gradients,
    float64_throughout,
    gradients,
    make_sample,
    some_samples,
    tiny_policy,
)

MOE = ["qwen3_moe", "mixtral", "qwen3_vl_moe"]


def moe_policy(architecture="qwen3_moe"):
    return make_architecture(architecture, dtype=torch.float64)


def with_loss(model, coefficient=0.5):
    install_router_loss(model, coefficient)
    return install_packed_forward(model)


def forked_samples(seed=3):
    """Five samples over one prompt; two of them share the start of their completions too."""
    rng = np.random.default_rng(seed)
    first = make_sample(rng, 7, 9)
    samples = [first]
    for common in (7, 7, 12, 15):
        other = make_sample(rng, 7, 9)
        tokens = other.sequence.token_ids.copy()
        tokens[:common] = first.sequence.token_ids[:common]
        samples.append(replace(other, sequence=replace(other.sequence, token_ids=tokens)))
    return samples


def transformers_loss(model, samples):
    """Its function on its own router logits of every sample forwarded alone; a shared token is taken once."""
    layout = tree_layout(samples)
    layers = None
    for b, sample in enumerate(samples):
        ids = torch.from_numpy(sample.sequence.token_ids.astype(np.int64))[None]
        found = model(input_ids=ids, output_router_logits=True, use_cache=False).router_logits
        layers = layers or [[None] * layout.num_tokens for _ in found]
        for layer, logits in zip(layers, found, strict=True):
            for t, index in enumerate(layout.sample_tokens(b)):
                layer[index] = logits[t]
    text = model.config.get_text_config()
    num_experts = getattr(text, "num_experts", None) or text.num_local_experts
    function = sys.modules[type(model).__module__].load_balancing_loss_func
    return function(tuple(torch.stack(layer) for layer in layers), num_experts, text.num_experts_per_tok)


@float64_throughout()
@pytest.mark.parametrize("architecture", MOE)
def test_f039_the_loss_of_one_sample_is_the_models_own_aux_loss(architecture):
    sample = make_sample(np.random.default_rng(0), 5, 8)
    plain, ours = moe_policy(architecture), with_loss(moe_policy(architecture))
    ids = torch.from_numpy(sample.sequence.token_ids.astype(np.int64))[None]
    want = plain(input_ids=ids, output_router_logits=True).aux_loss
    got = ours(**pack_row([sample], 0), temperature=1.0).aux_loss
    assert want.item() > 1.0
    torch.testing.assert_close(got, want.to(got.dtype), rtol=1e-6, atol=0)
    want.backward()
    got.backward()
    wanted = {n: g for n, g in gradients(plain).items() if g.abs().max() > 0}
    mine = {n: g for n, g in gradients(ours).items() if g.abs().max() > 0}
    assert any(name.endswith("gate.weight") for name in wanted)
    assert_same_gradients(mine, wanted, 1e-6)


@float64_throughout()
@pytest.mark.parametrize("architecture", ["qwen3_next", "qwen3_5_moe"])
def test_f039_hybrids_with_gated_deltanet_have_it_too(architecture):
    samples = forked_samples()
    plain, model = deltanet_cases.policy(architecture), with_loss(deltanet_cases.policy(architecture))
    got = model(**pack_row(samples, 0), temperature=1.0).aux_loss
    torch.testing.assert_close(got, transformers_loss(plain, samples).to(got), rtol=1e-6, atol=0)


@float64_throughout()
@pytest.mark.parametrize("architecture", MOE)
def test_f039_every_forwarded_token_counts_once(architecture):
    samples = forked_samples()
    row = pack_row(samples, 0)
    assert row["input_ids"].numel() < sum(s.sequence.num_tokens for s in samples) - 20
    got = with_loss(moe_policy(architecture))(**row, temperature=1.0).aux_loss
    torch.testing.assert_close(got, transformers_loss(moe_policy(architecture), samples).to(got), rtol=1e-6, atol=0)


def test_f039_gradient_checkpointing_changes_nothing():
    row = pack_row(forked_samples(), 0)

    def result(checkpointing):
        model = with_loss(moe_policy())
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        for _ in range(2):  # a second forward must not find what the first one's recomputation left
            out = model(**row, temperature=1.0)
            (out.logprobs.sum() + 3 * out.aux_loss).backward()
            assert router_balance(model)._collected is None  # nor keep its graph
        return out.aux_loss.item(), gradients(model)

    (plain, wanted), (checkpointed, got) = result(False), result(True)
    assert checkpointed == pytest.approx(plain, rel=1e-12)
    assert_same_gradients(got, wanted, 1e-9)


def test_f039_filler_tokens_of_a_back_end_do_not_count(monkeypatch):
    """FlexAttention pads dense models' rows; a router must see the row alone, whatever the config calls its experts."""
    row = pack_row(forked_samples(), 0)
    monkeypatch.setattr(forward, "dense_attention_layers", lambda config: True)
    found = []
    for backend in ("sdpa", "flex"):
        monkeypatch.setattr(forward, "_backend", lambda model, device, backend=backend: backend)
        model = with_loss(make_architecture("qwen3_moe")).requires_grad_(False)  # it has no backward on a CPU
        found.append(model(**row, temperature=1.0).aux_loss.item())
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_f039_compiled_layers_give_the_same_loss():
    """trunk_kernels="compile" wraps whole layers, router and hook included."""
    row = pack_row(forked_samples(), 0)
    plain, compiled = (with_loss(make_architecture("qwen3_moe", num_hidden_layers=1)) for _ in range(2))
    compiled.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in compiled.model.layers:
        layer.compile(backend="eager", dynamic=True)
    found = []
    for model in (plain, compiled):
        out = model(**row, temperature=1.0)
        out.aux_loss.backward()
        found.append((out.aux_loss.item(), gradients(model)))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)
    routers = [name for name in found[0][1] if name.endswith("gate.weight")]
    assert len(routers) == 1
    for name in routers:
        torch.testing.assert_close(found[1][1][name], found[0][1][name], rtol=1e-3, atol=1e-5)


def test_f039_checkpointing_keeps_no_logits():
    """What lives from forward to backward is two numbers per expert and layer, not [tokens, experts]."""
    model = with_loss(make_architecture("qwen3_moe"))
    row = pack_row(some_samples(count=12), 0)
    shape = (row["input_ids"].numel(), 4)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    kept = []

    def pack(tensor):
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(**row, temperature=1.0)
    assert kept and shape not in kept


def test_f039_reentrant_checkpointing_would_lose_the_loss_and_is_refused():
    model = with_loss(make_architecture("qwen3_moe"))
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ConfigError, match=r"0 of 2 routers.*use_reentrant"):
        model(**pack_row(some_samples(count=2), 0), temperature=1.0)


def test_f056_there_is_no_aux_loss_without_a_coefficient_or_without_experts():
    row = pack_row(some_samples(count=2), 0)
    for model, requested in ((tiny_policy("qwen3"), None), (tiny_policy("qwen3_moe"), 0.0)):
        assert install_router_loss(model, requested) == 0.0
        assert router_balance(model) is None
        assert install_packed_forward(model)(**row, temperature=1.0).aux_loss is None


def test_f209_none_is_the_configs_own_value_zero_is_off():
    moe, dense = tiny_policy("qwen3_moe").config, tiny_policy("qwen3").config
    moe.router_aux_loss_coef = 0.02
    assert router_coefficient(moe, None) == 0.02
    assert router_coefficient(moe, 0.0) == 0.0
    assert router_coefficient(moe, 0.3) == 0.3
    assert router_coefficient(dense, None) == router_coefficient(dense, 0.0) == 0.0
    with pytest.raises(ConfigError, match=r"router_aux_loss_coef=0\.1.*not a Mixture-of-Experts"):
        router_coefficient(dense, 0.1)


def test_installing_again_changes_the_coefficient_and_counts_nothing_twice():
    model, row = tiny_policy("qwen3_moe"), pack_row(some_samples(count=2), 0)
    install_packed_forward(model)
    assert install_router_loss(model, 0.5) == install_router_loss(model, 0.5) == 0.5
    first = model(**row, temperature=1.0).aux_loss
    assert install_router_loss(model, 0.0) == 0.0
    assert model(**row, temperature=1.0).aux_loss is None
    install_router_loss(model, 0.25)
    assert torch.equal(model(**row, temperature=1.0).aux_loss, first)
    assert router_balance(model).coefficient == 0.25


def test_inference_computes_no_aux_loss():
    model, row = with_loss(tiny_policy("qwen3_moe")), pack_row(some_samples(count=2), 0)
    with torch.no_grad():
        assert model(**row, temperature=1.0).aux_loss is None


def test_a_copy_has_routers_of_its_own():
    model, row = with_loss(tiny_policy("qwen3_moe")), pack_row(some_samples(count=2), 0)
    other = install_packed_forward(copy.deepcopy(model))
    assert router_balance(other) is not router_balance(model)
    assert torch.equal(other(**row, temperature=1.0).aux_loss, model(**row, temperature=1.0).aux_loss)


def test_f039_a_layer_without_experts_is_no_router():
    model = make_architecture("qwen3_moe", mlp_only_layers=[0])
    assert router_coefficient(model.config, None) > 0
    out = with_loss(model)(**pack_row(some_samples(count=2), 0), temperature=1.0)
    assert router_balance(model).num_routers == 1 and out.aux_loss.item() > 0.5


def test_f039_an_architecture_with_another_balance_loss_is_refused(monkeypatch):
    module = sys.modules[hf.Qwen3MoeForCausalLM.__module__]
    original = module.load_balancing_loss_func
    monkeypatch.setattr(module, "load_balancing_loss_func", lambda *args: original(*args) * 1.01)
    with pytest.raises(ConfigError, match=r"Qwen3MoeForCausalLM has a load-balancing loss of its own.*coef=0\.0"):
        install_router_loss(tiny_policy("qwen3_moe"), 0.1)
    monkeypatch.delattr(module, "load_balancing_loss_func")
    with pytest.raises(ConfigError, match="has no load-balancing loss in transformers"):
        install_router_loss(tiny_policy("qwen3_moe"), 0.1)


def test_f039_a_router_that_an_adapter_trains_whole_is_the_one_that_counts():
    row = pack_row(some_samples(count=2), 0)
    want = with_loss(tiny_policy("qwen3_moe"))(**row, temperature=1.0).aux_loss
    model = get_peft_model(
        tiny_policy("qwen3_moe"), LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["gate"])
    )
    install_router_loss(causal_model(model), 0.5)
    got = install_packed_forward(model)(**row, temperature=1.0).aux_loss
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    got.backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert any("gate.modules_to_save" in name for name in trained)


class _Router(torch.nn.Module):
    pass


class _Decoder(torch.nn.ModuleDict):
    pass


def test_routers_are_where_transformers_records_them():
    """A class alone stands for the second output; a recorder says which output, and inside what."""
    decoder = _Decoder({"mlp": torch.nn.ModuleDict({"gate": _Router()}), "indexer": _Router()})
    model = SimpleNamespace(get_decoder=lambda: decoder)

    def found(recorder):
        _Decoder._can_record_outputs = {"router_logits": recorder}
        return list(_routers(model))

    gate, indexer = decoder["mlp"]["gate"], decoder["indexer"]
    assert found(_Router) == [(gate, 1), (indexer, 1)]
    assert found(SimpleNamespace(target_class=_Router, index=2, layer_name="mlp.gate")) == [(gate, 2)]
    assert found([SimpleNamespace(target_class=_Router, index=0, layer_name="indexer")]) == [(indexer, 0)]
    assert found(SimpleNamespace(target_class=_Router, index=0, layer_name="ate")) == found(None) == []


def test_sums_of_sixteen_bit_logits_are_float32():
    """Added up in bfloat16, a count stops at 256."""
    logits = torch.randn(5000, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    counts, probabilities = routing_sums(logits, 1)
    assert counts.sum() == 5000 and counts.dtype == probabilities.dtype == torch.float32
    torch.testing.assert_close(probabilities, logits.softmax(-1).double().sum(0).float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("calls", [1, 3])
def test_a_router_that_is_missed_or_counted_twice_is_an_error(calls):
    balance = RouterBalance(coefficient=1.0, top_k=1, num_routers=2)
    with balance.collecting():
        for _ in range(calls):
            balance.add(torch.zeros(3, 4))
        with pytest.raises(ConfigError, match=f"saw {calls} of 2 routers"):
            balance.loss()
