"""The packed forward against every sample forwarded alone by transformers' own code."""

import copy
import inspect
import json

import peft
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils.other import extract_model_from_parallel
from torch.nn.parallel import DistributedDataParallel

from asyncgrpo_core.errors import ConfigError
from asyncgrpo_core.models.attention import PACKED_ATTENTION
from asyncgrpo_core.models.forward import PolicyOutput, install_packed_forward, score_tokens
from asyncgrpo_core.packing import pack_row
from tests.unit.policy_cases import (
    ARCHITECTURES,
    assert_same_gradients,
    dense_logprobs,
    float64_throughout,
    gradients,
    some_samples,
    tiny_policy,
    trained_ids,
)


def total(output: PolicyOutput) -> torch.Tensor:
    """A scalar that depends on every log-probability with its own weight."""
    weight = torch.linspace(0.5, 1.5, len(output.logprobs), dtype=output.logprobs.dtype)
    loss = (weight * output.logprobs).sum()
    return loss if output.top_logprobs is None else loss + (weight[:, None] * output.top_logprobs).sum() / 3


def reference(model, samples, temperature) -> PolicyOutput:
    dense = [dense_logprobs(model, s, temperature) for s in samples]
    logp = torch.cat(dense)
    targets = torch.cat([trained_ids(s) for s in samples])
    top = torch.cat([torch.from_numpy(s.sequence.top.ids).long() for s in samples])
    return PolicyOutput(logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1), logp.gather(1, top))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@float64_throughout()
def test_a_row_equals_its_samples_forwarded_alone(architecture):
    """F191: a model made with eager attention is switched to packed attention and computes the same."""
    samples = some_samples(count=7)
    want_model, model = tiny_policy(architecture), tiny_policy(architecture)
    want = reference(want_model, samples, 0.8)
    assert model.config._attn_implementation == "eager"
    assert install_packed_forward(model) is model
    assert model.config._attn_implementation == PACKED_ATTENTION
    got = model(**pack_row(samples, 4), temperature=0.8)
    for mine, other in zip(got, want, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)
    total(want).backward()
    total(got).backward()
    assert_same_gradients(gradients(model), gradients(want_model))


def test_without_a_head_there_are_no_top_logprobs():
    model = install_packed_forward(tiny_policy())
    assert model(**pack_row(some_samples(), 0), temperature=1.0).top_logprobs is None


def test_the_order_of_samples_in_a_row_changes_nothing():
    samples = some_samples(count=5)
    model = install_packed_forward(tiny_policy())
    forward = model(**pack_row(samples, 4), temperature=1.0).logprobs
    backward = model(**pack_row(samples[::-1], 4), temperature=1.0).logprobs
    sizes = [s.sequence.num_trained for s in samples[::-1]]
    torch.testing.assert_close(forward, torch.cat(backward.split(sizes)[::-1]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradient(use_reentrant):
    row = pack_row(some_samples(), 4)
    model = install_packed_forward(tiny_policy())
    total(model(**row, temperature=1.0)).backward()
    plain = gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    total(model(**row, temperature=1.0)).backward()
    assert_same_gradients(gradients(model), plain)


def test_a_rank_without_samples_still_reaches_every_parameter():
    model = install_packed_forward(tiny_policy())
    model(**pack_row([], 4), temperature=1.0).logprobs.sum().backward()
    found = gradients(model)
    assert found.keys() == dict(model.named_parameters()).keys()
    assert all(not g.any() for g in found.values())


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2_softcap"])
def test_an_ordinary_call_is_the_models_own_forward_and_keeps_its_padding_mask(architecture):
    plain = tiny_policy(architecture, dtype=torch.float32)
    model = install_packed_forward(tiny_policy(architecture, dtype=torch.float32))
    ids = torch.tensor([[0, 0, 3, 4, 5], [6, 7, 8, 9, 10]])
    mask = (ids > 0).long()
    want = plain(input_ids=ids, attention_mask=mask).logits
    got = model(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(got[mask.bool()], want[mask.bool()], rtol=1e-5, atol=1e-5)
    unmasked = model(input_ids=ids[1:]).logits
    torch.testing.assert_close(unmasked, want[1:], rtol=1e-5, atol=1e-5)
    assert inspect.signature(model.forward).parameters.keys() == inspect.signature(plain.forward).parameters.keys()


def test_generation_works_after_the_switch():
    plain, model = tiny_policy().eval(), install_packed_forward(tiny_policy()).eval()
    ids = torch.tensor([[3, 4, 5]])
    want = plain.generate(ids, max_new_tokens=6, do_sample=False)
    assert model.generate(ids, max_new_tokens=6, do_sample=False).tolist() == want.tolist()


def test_what_is_saved_is_what_was_saved_before(tmp_path):
    plain, model = tiny_policy(), install_packed_forward(tiny_policy())
    assert model.state_dict().keys() == plain.state_dict().keys()
    plain.save_pretrained(tmp_path / "plain")
    model.save_pretrained(tmp_path / "packed")
    names = {p.name for p in (tmp_path / "plain").iterdir()}
    assert names == {p.name for p in (tmp_path / "packed").iterdir()}
    configs = [json.loads((tmp_path / d / "config.json").read_text()) for d in ("plain", "packed")]
    assert configs[0] == configs[1]
    loaded = type(model).from_pretrained(tmp_path / "packed", dtype=torch.float64)
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])


@float64_throughout()
def test_installing_twice_is_installing_once():
    model = install_packed_forward(install_packed_forward(tiny_policy()))
    ids = torch.tensor([[3, 4, 5]])
    torch.testing.assert_close(model(input_ids=ids).logits, tiny_policy()(input_ids=ids).logits, rtol=1e-9, atol=1e-9)


def test_a_deep_copy_is_independent():
    model = install_packed_forward(tiny_policy())
    row = pack_row(some_samples(), 4)
    before = model(**row, temperature=1.0).logprobs
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(2)
    torch.testing.assert_close(twin(**row, temperature=1.0).logprobs, before)
    ids = torch.tensor([[3, 4, 5]])
    assert not torch.allclose(twin(input_ids=ids).logits, model(input_ids=ids).logits)


@float64_throughout()
def test_a_peft_model_is_forwarded_packed_and_trains_only_its_adapter():
    samples = some_samples()
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)
    torch.manual_seed(3)
    wrapped = peft.get_peft_model(tiny_policy(), config).double()
    want = reference(wrapped, samples, 1.0)
    total(want).backward()
    expected = gradients(wrapped)
    install_packed_forward(wrapped)
    got = wrapped(**pack_row(samples, 4), temperature=1.0)
    torch.testing.assert_close(got.logprobs, want.logprobs, rtol=1e-9, atol=1e-9)
    total(got).backward()
    found = gradients(wrapped)
    assert found and all("lora_" in name for name in found)
    assert_same_gradients(found, expected)


def test_ddp_forwards_it_as_one_call(tmp_path):
    row, model = pack_row(some_samples(), 4), install_packed_forward(tiny_policy())
    total(model(**row, temperature=1.0)).backward()
    alone = gradients(model)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(model)
        total(wrapped(**row, temperature=1.0)).backward()
        assert_same_gradients(gradients(model), alone)
        assert len(score_tokens(wrapped, [1, 2, 3])) == 2
    finally:
        torch.distributed.destroy_process_group()


def test_accelerate_can_wrap_and_unwrap_it_under_mixed_precision():
    row = pack_row(some_samples(), 4)
    model = install_packed_forward(tiny_policy(dtype=torch.float32))
    want = model(**row, temperature=1.0)
    prepared = Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
    got = prepared(**row, temperature=1.0)
    assert isinstance(got, PolicyOutput) and got.logprobs.dtype == torch.float32
    torch.testing.assert_close(got.logprobs, want.logprobs, rtol=0, atol=0.2)
    assert not torch.equal(got.logprobs, want.logprobs)
    bare = extract_model_from_parallel(prepared, keep_fp32_wrapper=False)
    torch.testing.assert_close(bare(**row, temperature=1.0).logprobs, want.logprobs)


@float64_throughout()
def test_score_tokens_is_the_log_probability_of_each_next_token():
    model, ids = tiny_policy(), [5, 3, 9, 9, 1]
    logp = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    want = [logp[i, ids[i + 1]].item() for i in range(4)]
    install_packed_forward(model)
    assert score_tokens(model, ids) == pytest.approx(want, abs=1e-9)
    assert model.training
    with pytest.raises(ValueError, match="two tokens"):
        score_tokens(model, [5])


def test_an_adapter_on_the_head_is_refused():
    wrapped = peft.get_peft_model(tiny_policy("llama"), peft.LoraConfig(target_modules=["lm_head"]))
    with pytest.raises(ConfigError, match="lm_head"):
        install_packed_forward(wrapped)


def test_a_model_whose_attention_cannot_be_switched_is_refused(monkeypatch):
    model = tiny_policy()
    monkeypatch.setattr(type(model), "_can_set_attn_implementation", classmethod(lambda cls: False))
    with pytest.raises(ConfigError, match="AttentionInterface"):
        install_packed_forward(model)
