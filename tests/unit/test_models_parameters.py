"""iter_server_parameters: the names and tensors of a checkpoint, ties, merged adapters (F138)."""

import weakref

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from asyncgrpo_core.errors import ConfigError
from asyncgrpo_core.models import parameters
from asyncgrpo_core.models.adapters import check_adapter
from asyncgrpo_core.models.forward import install_packed_forward, score_tokens
from asyncgrpo_core.models.parameters import iter_server_parameters
from tests.tiny_architectures import BUFFERED_ARCHITECTURES, NAMES, make_architecture, write_architecture
from tests.unit.deltanet_cases import policy as deltanet_policy
from tests.unit.policy_cases import tiny_policy

IDS = [3, 8, 1, 1, 12, 5]


def adapted(architecture="qwen3", **kwargs):
    torch.manual_seed(5)
    config = peft.LoraConfig(r=3, lora_alpha=5, init_lora_weights=False, **kwargs)
    return peft.get_peft_model(tiny_policy(architecture), config).double()


def test_a_tied_pair_is_sent_once_under_the_embeddings_name():
    model = tiny_policy("qwen3")
    names = [name for name, _ in iter_server_parameters(model)]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    assert len(names) == len(set(names))


def test_an_untied_model_sends_its_state_dict():
    model = tiny_policy("llama")
    sent = dict(iter_server_parameters(model))
    assert sent.keys() == model.state_dict().keys()
    assert all(torch.equal(sent[name], value) for name, value in model.state_dict().items())
    assert not any(value.requires_grad for value in sent.values())


@pytest.mark.parametrize(
    "kwargs",
    [
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj", "down_proj"], "use_dora": True},
        {"target_modules": ["v_proj"], "use_rslora": True, "modules_to_save": ["norm"]},
    ],
    ids=["lora", "dora", "modules_to_save"],
)
def test_the_merged_weights_compute_what_the_adapted_model_computes(kwargs):
    """F138: the adapter merged into the base is sent, and the base is unchanged."""
    model = adapted(**kwargs)
    if "modules_to_save" in kwargs:
        with torch.no_grad():
            model.get_base_model().model.norm.modules_to_save["default"].weight.mul_(1.5)
    install_packed_forward(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    want = score_tokens(model, IDS)
    sent = dict(iter_server_parameters(model))

    server = tiny_policy("qwen3", seed=99)
    assert sent.keys() == dict(server.named_parameters()).keys()
    server.load_state_dict(sent, strict=False)
    install_packed_forward(server)
    assert score_tokens(server, IDS) == pytest.approx(want, abs=1e-9)

    base = install_packed_forward(tiny_policy("qwen3"))
    assert score_tokens(base, IDS) != pytest.approx(want, abs=1e-3)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    "config",
    [
        peft.LoraConfig(r=3, target_modules=["q_proj"], trainable_token_indices=[3, 5]),
        peft.TrainableTokensConfig(token_indices=[3, 5], target_modules=["embed_tokens"]),
        peft.LNTuningConfig(target_modules=["input_layernorm", "norm"]),
        peft.LoraConfig(r=3, target_modules=["embed_tokens"]),
        peft.LoraConfig(r=3, target_modules=["q_proj"], bias="all", modules_to_save=["mlp"]),
        peft.VeraConfig(r=3, target_modules=["q_proj"]),
        peft.OFTConfig(r=0, oft_block_size=4, target_modules=["q_proj"]),
    ],
    ids=["rows_beside_lora", "rows", "norms", "embedding", "biases_and_modules", "shared_buffers", "rotations"],
)
def test_f138_whatever_an_adapter_trains_is_in_what_is_sent(config):
    """Oracle: the adapted model's own forward, after a change of everything that it trains."""
    model = peft.get_peft_model(tiny_policy("llama"), config).eval()
    check_adapter(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    sent = dict(iter_server_parameters(model))
    server, base = (tiny_policy("llama").eval() for _ in range(2))
    assert sent.keys() == server.state_dict().keys()
    server.load_state_dict(sent)
    ids = torch.tensor([IDS])
    torch.testing.assert_close(server(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-6)
    assert (base(ids).logits - model(ids).logits).abs().max() > 1e-3


def test_wrappers_do_not_change_the_names():
    model = tiny_policy("qwen3")
    wrapped = torch.nn.Module()
    wrapped.module = model
    assert [n for n, _ in iter_server_parameters(wrapped)] == [n for n, _ in iter_server_parameters(model)]


@pytest.mark.parametrize("architecture", [n for n in (*NAMES, *BUFFERED_ARCHITECTURES) if n != "qwen3_vl_moe"])
def test_f138_what_is_sent_is_what_save_pretrained_writes(architecture, tmp_path):
    """Names, shapes and values: a server that loads the checkpoint takes exactly these (towers are not sent, F189)."""
    model = make_architecture(architecture)
    model.save_pretrained(tmp_path)
    saved = {n: t for n, t in load_file(tmp_path / "model.safetensors").items() if not n.startswith("model.visual.")}
    sent = dict(iter_server_parameters(model))
    assert sent.keys() == saved.keys()
    assert all(torch.equal(sent[name], saved[name]) for name in saved)
    assert not any(tensor.requires_grad for tensor in sent.values())


def test_f138_the_experts_of_a_loaded_checkpoint_are_sent_one_by_one(tmp_path):
    make_architecture("qwen3_moe").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    held = dict(model.named_parameters())
    sent = dict(iter_server_parameters(model))
    fused = held["model.layers.1.mlp.experts.gate_up_proj"]
    assert not any("gate_up_proj" in name for name in sent)
    for expert, (gate, up) in enumerate(x.chunk(2) for x in fused):
        assert torch.equal(sent[f"model.layers.1.mlp.experts.{expert}.gate_proj.weight"], gate)
        assert torch.equal(sent[f"model.layers.1.mlp.experts.{expert}.up_proj.weight"], up)


def test_f138_experts_that_are_published_the_other_way_round_are_sent_so(tmp_path):
    """Qwen3-VL-MoE: what a published checkpoint holds is what is sent after it was loaded."""
    published = load_file(write_architecture(tmp_path, "qwen3_vl_moe", hidden_size=48) / "model.safetensors")
    sent = dict(iter_server_parameters(AutoModelForImageTextToText.from_pretrained(tmp_path)))
    assert sent["model.language_model.layers.0.mlp.experts.gate_up_proj"].shape == (4, 48, 64)
    assert sent.keys() == {name for name in published if not name.startswith("model.visual.")}
    assert all(torch.equal(sent[name], published[name]) for name in sent)


def test_f138_adapters_on_fused_experts_and_router_are_all_merged():
    """Two adapted parameters of one module are two nested wrappers; each has to be merged."""
    torch.manual_seed(5)
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"]
    config = peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj"], target_parameters=targets)

    model = peft.get_peft_model(make_architecture("qwen3_moe", dtype=torch.float64), config)
    sent = dict(iter_server_parameters(model))
    merged = model.merge_and_unload()
    wanted = dict(iter_server_parameters(merged))
    base = dict(iter_server_parameters(make_architecture("qwen3_moe", dtype=torch.float64)))
    assert sent.keys() == wanted.keys() == base.keys()
    changed = {name for name in base if not torch.equal(base[name], wanted[name])}
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "gate", "gate_proj", "up_proj", "down_proj"}
    for name, value in wanted.items():
        torch.testing.assert_close(sent[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn])
def test_weights_that_are_stored_quantised_are_not_sent(dtype):
    model = tiny_policy("qwen3")
    layer = model.model.layers[1].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach().to(dtype), requires_grad=False)
    with pytest.raises(ConfigError, match=r"Qwen3ForCausalLM is quantised \(model\.layers\.1\.mlp\.up_proj\.weight"):
        next(iter_server_parameters(model))


def test_one_layer_is_converted_at_a_time():
    """What the experts of one layer became is gone before the next layer's is made."""
    model = make_architecture("qwen3_moe", num_hidden_layers=4)
    alive: dict[str, list[weakref.ref]] = {}
    for name, tensor in iter_server_parameters(model):
        if ".experts." not in name:
            continue
        layer = name.split(".")[2]
        alive.setdefault(layer, []).append(weakref.ref(tensor))
        del tensor
        assert not any(ref() is not None for other, refs in alive.items() if other != layer for ref in refs)
    assert alive.keys() == {"0", "1", "2", "3"}


def test_a_conversion_over_several_layers_is_refused(monkeypatch):
    """Sent layer by layer it would lack tensors, silently."""

    def stacked(model, tensors):
        out = dict(tensors)
        norms = [out.pop(name) for name in list(out) if name.endswith("input_layernorm.weight")]
        if len(norms) > 1:
            out["model.norms"] = torch.stack(norms)
        elif norms:
            out["model.norm_of_one"] = norms[0]
        return out

    monkeypatch.setattr(parameters, "revert_weight_conversion", stacked)
    with pytest.raises(ConfigError, match=r"Qwen3ForCausalLM.*model\.norm"):
        list(iter_server_parameters(tiny_policy("qwen3")))


def test_olmo_hybrid_has_the_names_of_vllms_class():
    """transformers saves others, which that class does not know."""
    model = deltanet_policy("olmo_hybrid", torch.float32)
    names = {name for name, _ in iter_server_parameters(model)}
    layer = "model.layers.0"
    assert {f"{layer}.input_layernorm.weight", f"{layer}.post_attention_layernorm.weight"} <= names
    assert {f"{layer}.linear_attn.{part}_conv1d.weight" for part in "qkv"} <= names
    assert not any("attention_layer_norm" in name or "feedforward_layer_norm" in name for name in names)


def test_what_training_does_not_change_is_told_apart():
    model = make_architecture("gemma4")
    frozen = model.model.norm.weight
    frozen.requires_grad_(False)
    constant = {name for name, tensor in iter_server_parameters(model) if isinstance(tensor, torch.nn.Buffer)}
    assert constant == {"model.norm.weight", *(f"model.layers.{i}.layer_scalar" for i in range(2))}
    kept = dict(iter_server_parameters(model))["model.norm.weight"]
    assert kept.data_ptr() == frozen.data_ptr()


def test_frozen_experts_stay_constant_through_their_conversion():
    model = make_architecture("qwen3_moe")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".experts." not in name)
    sent = dict(iter_server_parameters(model))
    assert {name for name, tensor in sent.items() if isinstance(tensor, torch.nn.Buffer)} == {
        name for name in sent if ".experts." in name
    }
