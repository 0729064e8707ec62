"""What only a model's own code says is found out when the policy is loaded, before a server is waited for."""

import copy
import sys
import types

import peft
import pytest
import torch
import transformers as hf

from asyncgrpo_core.errors import ConfigError
from asyncgrpo_core.models import probe
from asyncgrpo_core.models.forward import causal_model, install_packed_forward
from asyncgrpo_core.models.probe import check_packed_forward
from asyncgrpo_core.training.config import AsyncGRPOConfig
from asyncgrpo_core.training.trainer_parts import load_parts
from tests.tiny_architectures import HYBRID_ARCHITECTURES, NAMES, make_architecture
from tests.unit.policy_cases import _SHAPE, ARCHITECTURES, tiny_policy
from tests.unit.test_models_loading import tokenizer

LOSES_THE_PLAN = {
    "stablelm": (hf.StableLmForCausalLM, hf.StableLmConfig),
    "nemotron": (hf.NemotronForCausalLM, hf.NemotronConfig),
}
BIDIRECTIONAL = {"bert": (hf.BertLMHeadModel, hf.BertConfig), "roberta": (hf.RobertaForCausalLM, hf.RobertaConfig)}


def made(model_class, config_class, **fields):
    return model_class(config_class(**_SHAPE, **fields))


def everything(model):
    return {name: (tensor.data_ptr(), tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}


@pytest.mark.parametrize("name", LOSES_THE_PLAN)
def test_a_model_that_keeps_the_plan_from_its_attention_is_refused_when_it_is_loaded(name, tmp_path):
    args = AsyncGRPOConfig(output_dir=str(tmp_path), use_cpu=True)
    with pytest.raises(ConfigError, match="Attention .*does not hand its keyword arguments on"):
        load_parts(made(*LOSES_THE_PLAN[name]), args, tokenizer(eos_token="</s>", pad_token="<pad>"), None)


@pytest.mark.parametrize("name", BIDIRECTIONAL)
def test_attention_in_both_directions_is_refused(name):
    """Their configs have no field that says so: as decoders they would be causal, as they are loaded they are not."""
    model = made(*BIDIRECTIONAL[name])
    with pytest.raises(ConfigError, match="attends in both directions"):
        check_packed_forward(install_packed_forward(model))


def test_a_decoder_that_is_the_head_is_refused():
    """ModernBERT's decoder calls its head `decoder`, which is what `get_decoder` then finds."""
    model = made(hf.ModernBertDecoderForCausalLM, hf.ModernBertDecoderConfig)
    with pytest.raises(ConfigError, match="has no decoder under a language-model head"):
        install_packed_forward(model)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("architecture", ["qwen3", "gemma2_softcap"])
def test_one_layer_that_loses_the_plan_is_enough(architecture, layer, monkeypatch):
    model = install_packed_forward(tiny_policy(architecture))
    attention = model.model.layers[layer].self_attn
    original = attention.forward
    monkeypatch.setattr(attention, "forward", lambda *a, packed_attention, **kw: original(*a, **kw))
    with pytest.raises(ConfigError, match="does not hand its keyword arguments on"):
        check_packed_forward(model)


def test_a_model_whose_layers_never_ask_is_refused(monkeypatch):
    model = install_packed_forward(tiny_policy())
    for layer in model.model.layers:
        monkeypatch.setattr(layer.self_attn, "forward", lambda hidden_states, **kw: (hidden_states, None))
    with pytest.raises(ConfigError, match="does not hand its keyword arguments on"):
        check_packed_forward(model)


@pytest.mark.parametrize("make", [*ARCHITECTURES, *NAMES])
def test_what_trains_is_let_through_and_left_as_it_was(make):
    model = tiny_policy(make) if make in ARCHITECTURES else make_architecture(make)
    install_packed_forward(model)
    before = {name: (pointer, tensor.clone()) for name, (pointer, tensor) in everything(model).items()}
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    random, graphs = torch.get_rng_state(), copy.copy(torch._dynamo.utils.counters["stats"])
    check_packed_forward(model)
    assert torch.equal(torch.get_rng_state(), random)
    assert torch._dynamo.utils.counters["stats"] == graphs
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    after = everything(model)
    assert after.keys() == before.keys()
    for name, (pointer, tensor) in after.items():
        assert pointer == before[name][0] and torch.equal(tensor, before[name][1])
        assert tensor.grad is None
    assert model.training and all(p.requires_grad for p in causal_model(model).get_decoder().parameters())


def test_it_needs_no_weights_and_every_rank_gets_the_same_answer():
    """Under FSDP only rank 0 may have read them."""
    with torch.device("meta"):
        fine, bad = tiny_policy(), made(*LOSES_THE_PLAN["nemotron"])
    check_packed_forward(install_packed_forward(fine))
    assert {p.device.type for p in fine.parameters()} == {"meta"}
    with pytest.raises(ConfigError, match="NemotronAttention"):
        check_packed_forward(install_packed_forward(bad))


def test_adapters_autocast_and_16_bits_change_nothing():
    adapter = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny_policy(dtype=torch.bfloat16), adapter)
    with torch.autocast("cpu", torch.bfloat16):
        check_packed_forward(install_packed_forward(model))
        assert torch.is_autocast_enabled("cpu")
    bad = peft.get_peft_model(made(*LOSES_THE_PLAN["stablelm"]), adapter)
    with pytest.raises(ConfigError, match="StableLmAttention"):
        check_packed_forward(install_packed_forward(bad))


def test_a_deep_model_costs_as_much_as_its_first_layers(monkeypatch):
    model = install_packed_forward(made(hf.LlamaForCausalLM, hf.LlamaConfig))
    model.model.layers.extend(copy.deepcopy(model.model.layers[0]) for _ in range(30))
    model.config.num_hidden_layers = 32
    ran = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda *_: ran.append(1))
    check_packed_forward(model)
    assert len(ran) == probe._LAYERS + 1


class _Scaled(hf.LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = self.change(out.logits)
        return out


@pytest.mark.parametrize(
    "change",
    [
        lambda z: z * 1.1,
        lambda z: 30 * torch.tanh(z / 30),
        lambda z: z + torch.arange(z.shape[-1]) / 10,
        lambda z: z.clamp(-10, 10),
        lambda z: z.roll(1, dims=-1),
    ],
    ids=["scale", "cap", "bias", "clamp", "order"],
)
def test_logits_that_the_chunked_head_would_not_make_are_refused(change):
    model = made(_Scaled, hf.LlamaConfig)
    model.change = lambda z: z
    check_packed_forward(install_packed_forward(model))
    model.change = change
    with pytest.raises(ConfigError, match="_Scaled makes its logits in a way of its own"):
        check_packed_forward(model)
    model.change = lambda z: z + 7.0  # which no softmax sees
    check_packed_forward(model)


@pytest.mark.parametrize(
    ("model_class", "config_class", "field", "value"),
    [
        (hf.GraniteForCausalLM, hf.GraniteConfig, "logits_scaling", 2.5),
        (hf.HyperCLOVAXForCausalLM, hf.HyperCLOVAXConfig, "logits_scaling", 0.125),
        (hf.CohereForCausalLM, hf.CohereConfig, "logit_scale", 0.0625),
        (hf.Gemma2ForCausalLM, hf.Gemma2Config, "final_logit_softcapping", 30.0),
    ],
)
def test_the_heads_that_transform_their_logits_are_really_asked(model_class, config_class, field, value, monkeypatch):
    """With a transform that forgets the field each of them is refused, with the real one none."""
    model = install_packed_forward(made(model_class, config_class, **{field: value}))
    check_packed_forward(model)
    original = probe.LogitTransform.from_config

    def forgetful(config, temperature):
        config = copy.deepcopy(config)
        vars(config)[field] = None  # past the checks of an assignment
        return original(config, temperature)

    monkeypatch.setattr(probe.LogitTransform, "from_config", forgetful)
    with pytest.raises(ConfigError, match="makes its logits in a way of its own"):
        check_packed_forward(model)


@pytest.mark.parametrize("name", HYBRID_ARCHITECTURES)
def test_f129_recurrent_layers_are_passed_by_and_attention_after_them_is_asked(name, monkeypatch):
    """fla's kernels, given tensors without data, read address 0: the process had no GPU any more (seen on an H200)."""
    model = install_packed_forward(make_architecture(name))
    layer = model.model.layers[0].linear_attn
    monkeypatch.setattr(type(layer), "forward", lambda *_args, **_kwargs: pytest.fail("it was run"))
    check_packed_forward(model)
    assert "forward" not in vars(layer)
    if "moe" in name or name == "qwen3_next":  # the experts of layer 0 want data
        return
    attention = model.model.layers[1].self_attn
    original = attention.forward
    monkeypatch.setattr(attention, "forward", lambda *a, packed_attention, **kw: original(*a, **kw))
    with pytest.raises(ConfigError, match="does not hand its keyword arguments on"):
        check_packed_forward(model)


def test_no_triton_kernel_starts(monkeypatch):
    """Triton itself is not there on a CPU; what the check relies on is that a kernel starts through this method."""

    class JITFunction:
        def run(self, *_args, **_kwargs):
            pytest.fail("it was run")

    for name in ("triton", "triton.runtime", "triton.runtime.jit"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules["triton.runtime.jit"], "JITFunction", JITFunction, raising=False)
    launch, started = JITFunction.run, []
    model = install_packed_forward(tiny_policy())

    def forward(x):
        started.append(x)
        return JITFunction().run(x)

    monkeypatch.setattr(model.model.layers[0].mlp, "forward", forward)
    check_packed_forward(model)
    assert started and JITFunction.run is launch


def test_f129_a_model_of_recurrent_layers_alone_is_not_said_to_lose_the_plan():
    check_packed_forward(install_packed_forward(make_architecture("qwen3_5", layer_types=["linear_attention"] * 2)))


def test_f129_a_recurrent_layer_that_does_not_get_the_plan_is_refused(monkeypatch):
    """Nothing would notice at the first row: attention asks for the plan, and the recurrence runs over samples."""
    model = install_packed_forward(make_architecture("qwen3_5"))
    layer = model.model.layers[0]
    original = layer.forward
    monkeypatch.setattr(layer, "forward", lambda *a, packed_attention, **kw: original(*a, **kw))
    with pytest.raises(ConfigError, match="The decoder layer around Qwen3_5GatedDeltaNet"):
        check_packed_forward(model)
