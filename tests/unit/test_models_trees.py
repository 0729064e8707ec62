"""The parity suite of trie rows: log-probabilities, entropy, top tokens and every gradient against the samples alone.

Every sample is forwarded by transformers' own eager code, one at a time, in float64 (F121, F122, F129 for the layers
that need more than attention is in test_models_deltanet.py).
"""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from asyncgrpo_core.errors import ConfigError
from asyncgrpo_core.models import attention as attention_module
from asyncgrpo_core.models import forward as forward_module
from asyncgrpo_core.models.forward import PolicyOutput, install_packed_forward
from asyncgrpo_core.packing import pack_row
from tests.unit.policy_cases import (
    ARCHITECTURES,
    assert_same_gradients,
    dense_logprobs,
    float64_throughout,
    gradients,
    sharing_samples,
    tiny_policy,
    trained_ids,
)


def alone(model, samples, temperature):
    logp = torch.cat([dense_logprobs(model, s, temperature) for s in samples])
    targets = torch.cat([trained_ids(s) for s in samples])
    top = torch.cat([torch.from_numpy(s.sequence.top.ids).long() for s in samples])
    return PolicyOutput(logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1), logp.gather(1, top))


def total(output):
    """Weights every result differently, so that no two errors cancel."""
    scale = torch.linspace(-1, 2, len(output.logprobs), dtype=output.logprobs.dtype)
    return (scale * output.logprobs).sum() + (scale[:, None].flip(0) * output.top_logprobs).sum()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@float64_throughout()
def test_f121_f122_a_trie_row_equals_its_samples_forwarded_alone(architecture):
    samples = sharing_samples()
    row = pack_row(samples, 4)
    raw = sum(s.sequence.num_tokens for s in samples)
    assert row["input_ids"].shape[1] < 0.75 * raw and int(row["parents"].max()) > 2
    want_model, model = tiny_policy(architecture), install_packed_forward(tiny_policy(architecture))
    want, got = alone(want_model, samples, 0.8), model(**row, temperature=0.8)
    for mine, other in zip(got, want, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)
    total(want).backward()
    total(got).backward()
    assert_same_gradients(gradients(model), gradients(want_model))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_changes_nothing_on_a_trie_row(use_reentrant):
    row, model = pack_row(sharing_samples(), 4), install_packed_forward(tiny_policy())
    total(model(**row, temperature=1.0)).backward()
    plain = gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    total(model(**row, temperature=1.0)).backward()
    assert_same_gradients(gradients(model), plain)


@float64_throughout()
def test_a_trie_row_equals_the_same_samples_in_rows_of_their_own():
    """Packed against unpacked: the sum of the gradients of many rows is the gradient of one."""
    samples, model = sharing_samples(), install_packed_forward(tiny_policy())
    scale = iter(torch.linspace(-1, 2, sum(s.sequence.num_trained for s in samples), dtype=torch.float64))
    scales = [torch.stack([next(scale) for _ in range(s.sequence.num_trained)]) for s in samples]
    (model(**pack_row(samples, 4), temperature=1.0).logprobs * torch.cat(scales)).sum().backward()
    packed = gradients(model)
    for sample, weights in zip(samples, scales, strict=True):
        (model(**pack_row([sample], 4), temperature=1.0).logprobs * weights).sum().backward()
    assert_same_gradients(gradients(model), packed)


def test_a_row_without_parents_is_a_row_of_roots():
    row = pack_row(sharing_samples()[:1], 4)
    model = install_packed_forward(tiny_policy())
    want = model(**row, temperature=1.0).logprobs
    del row["parents"]
    torch.testing.assert_close(model(**row, temperature=1.0).logprobs, want, rtol=0, atol=0)


def test_filler_tokens_of_flex_rows_are_read_by_nobody(monkeypatch):
    """The row is padded before the layers, where every layer would otherwise pad; `flex` runs densely on a CPU."""
    row, model = pack_row(sharing_samples(), 4), install_packed_forward(tiny_policy())
    want = model(**row, temperature=1.0)
    monkeypatch.setattr(forward_module, "_backend", lambda model, device: "flex")
    lengths = []
    hook = model.model.layers[0].register_forward_hook(lambda module, args, out: lengths.append(out.shape[1]))
    with torch.no_grad():
        got = model(**row, temperature=1.0)
    hook.remove()
    assert lengths == [128]
    torch.testing.assert_close(got.logprobs, want.logprobs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got.entropy, want.entropy, rtol=1e-6, atol=1e-6)


def test_a_router_does_not_see_filler_tokens(monkeypatch):
    row, model = pack_row(sharing_samples(), 4), install_packed_forward(tiny_policy("qwen3_moe"))
    monkeypatch.setattr(forward_module, "_backend", lambda model, device: "flex")
    lengths = []
    hook = model.model.layers[0].register_forward_hook(lambda module, args, out: lengths.append(out.shape[1]))
    with torch.no_grad():
        model(**row, temperature=1.0)
    hook.remove()
    assert lengths == [row["input_ids"].shape[1]]


def test_a_model_that_keeps_the_plan_from_one_of_its_layers_is_refused(monkeypatch):
    """StableLM and Nemotron of transformers 5.19: their tokens saw the whole row, later ones and other samples'."""
    row, model = pack_row(sharing_samples(), 4), install_packed_forward(tiny_policy())
    attention = model.model.layers[1].self_attn
    original = attention.forward
    monkeypatch.setattr(attention, "forward", lambda *a, packed_attention, **kw: original(*a, **kw))
    with pytest.raises(ConfigError, match="Qwen3Attention .*does not hand its keyword arguments on"):
        model(**row, temperature=1.0)


def test_a_model_whose_layers_never_ask_who_sees_whom_is_refused(monkeypatch):
    row, model = pack_row(sharing_samples(), 4), install_packed_forward(tiny_policy())
    for layer in model.model.layers:
        monkeypatch.setattr(layer.self_attn, "forward", lambda hidden_states, **kw: (hidden_states, None))
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM .*does not hand its keyword arguments on"):
        model(**row, temperature=1.0)


def test_fsdps_mixed_precision_hands_every_layer_the_same_plan(tmp_path, monkeypatch):
    """FSDP casts the tensors among a layer's arguments; it must not make a plan per layer on the way."""
    row = pack_row(sharing_samples(), 4)
    model = install_packed_forward(tiny_policy(dtype=torch.float32))
    want = model(**row, temperature=1.0).logprobs
    plans = []
    attend = attention_module._BACKENDS["sdpa"]
    monkeypatch.setitem(
        attention_module._BACKENDS, "sdpa", lambda q, k, v, call: plans.append(call.plan) or attend(q, k, v, call)
    )
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=mesh, mp_policy=policy)
        got = model(**row, temperature=1.0).logprobs
    finally:
        torch.distributed.destroy_process_group()
    assert len(plans) == 2 and plans[0] is plans[1]
    assert (got - want).abs().max() < 0.2  # bfloat16
