"""What is refused because packed rows would compute it wrongly, and which kernel a device takes."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers as hf

from asyncgrpo_core.errors import ConfigError
from asyncgrpo_core.models.forward import install_packed_forward
from asyncgrpo_core.models.support import (
    DeviceTraits,
    check_config,
    check_model,
    check_transformers,
    device_traits,
    freeze_outside_text_model,
    head_dims,
    hub_attention_kernel,
    longest_sample,
    outside_text_model,
)
from asyncgrpo_core.packing import pack_row
from tests.unit.policy_cases import ARCHITECTURES, dense_logprobs, make_sample, some_samples, tiny_policy, trained_ids

AMD, HOPPER, BLACKWELL, RTX_50 = (
    DeviceTraits(rocm=True, major=9),
    DeviceTraits(rocm=False, major=9),
    DeviceTraits(rocm=False, major=10),
    DeviceTraits(rocm=False, major=12),
)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("device", [None, HOPPER], ids=["cpu", "hopper"])
def test_architectures_that_packed_rows_compute_right_are_let_through(architecture, device):
    model = tiny_policy(architecture)
    check_config(model.config, device)
    check_model(model)
    assert outside_text_model(model) == set()
    freeze_outside_text_model(model)
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("make", [hf.GptOssConfig, hf.GraniteSWAConfig, hf.MiMoV2FlashConfig])
def test_f008_attention_sinks_are_refused(make):
    with pytest.raises(ConfigError, match=f"{make.__name__}.*attention sinks"):
        check_config(make(), None)


def test_f008_sinks_are_found_in_a_loaded_model():
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes = {"head_dim": 8, "intermediate_size": 8, "vocab_size": 23, "num_local_experts": 2, "pad_token_id": 0}
    model = hf.GptOssForCausalLM(hf.GptOssConfig(**small, **sizes))
    with pytest.raises(ConfigError, match=r"layers\.0\.self_attn\.sinks.*attention sinks"):
        check_model(model)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (hf.JambaConfig(num_hidden_layers=4, attn_layer_period=2, attn_layer_offset=0), "Layer 1 .*a Mamba layer"),
        (hf.BambaConfig(num_hidden_layers=3, attn_layer_indices=[0, 1]), "Layer 2 .*a Mamba layer"),
        (hf.FalconH1Config(num_hidden_layers=2), "Layer 0 .*'hybrid' layer .attention and Mamba"),
        (hf.MambaConfig(num_hidden_layers=2), "Layer 0 of MambaConfig is a Mamba layer"),
        (hf.RecurrentGemmaConfig(num_hidden_layers=3), "Layer 0 .*'recurrent' layer"),
        (hf.Lfm2Config(num_hidden_layers=2, layer_types=["full_attention", "conv"]), "Layer 1 .*'conv' layer"),
        (hf.MiniMaxConfig(num_hidden_layers=2), "linear attention layer of minimax"),
        (hf.RwkvConfig(num_hidden_layers=2), r"RwkvConfig \(rwkv\) keeps a recurrent state"),
        (hf.Llama4TextConfig(num_hidden_layers=4), "Layer 0 .*'chunked_attention' layer"),
    ],
    ids=["jamba", "bamba", "falcon_h1", "mamba", "recurrent_gemma", "lfm2", "minimax", "rwkv", "llama4"],
)
def test_f009_layers_that_are_not_causal_attention_are_named(config, named):
    with pytest.raises(ConfigError, match=named):
        check_config(config, None)


def test_f009_a_recurrent_model_without_a_config_that_says_so_is_found_by_its_class():
    class Stateful(torch.nn.Module):
        _is_stateful = True

    with pytest.raises(ConfigError, match="Stateful keeps a recurrent state"):
        check_model(Stateful())


@pytest.mark.parametrize(
    "make", [hf.Qwen3NextConfig, hf.Qwen3_5TextConfig, hf.Qwen3_5MoeTextConfig, hf.OlmoHybridConfig]
)
def test_f004_gated_deltanet_needs_a_new_transformers(make):
    config = make(num_hidden_layers=4)
    for old in ("5.2.0", "5.14.1"):
        with pytest.raises(ConfigError, match=rf"Layer 0 .*gated DeltaNet.*>=5\.15\.0; {old}"):
            check_config(config, None, transformers_version=old)
    for new in ("5.15.0", "5.15.0.dev0", "6.0.0"):
        check_config(config, None, transformers_version=new)


def test_f004_a_vision_language_config_is_judged_by_its_text_part():
    with pytest.raises(ConfigError, match="gated DeltaNet"):
        check_config(hf.Qwen3_5Config(), None, transformers_version="5.14.1")
    check_config(hf.Qwen3_5Config(), None)
    check_config(hf.Qwen3VLConfig(), None)


def test_f009_linear_attention_with_the_same_settings_but_other_layers_is_refused_by_name():
    config = hf.Qwen4ExpTextConfig(num_hidden_layers=4, layer_types=["linear_attention"] * 4)
    with pytest.raises(
        ConfigError, match="Layer 0 of Qwen4ExpTextConfig is a linear attention layer of qwen4_exp_text"
    ):
        check_config(config, None)


@pytest.mark.parametrize(("version", "fine"), [("5.2.0", True), ("5.19.0", True), ("5.1.9", False), ("4.57.1", False)])
def test_f004_transformers_has_a_floor(version, fine):
    if fine:
        check_transformers(version)
        return
    with pytest.raises(ConfigError, match=rf"transformers {version} .*transformers>=5\.2\.0"):
        check_transformers(version)


@pytest.mark.parametrize(
    ("hip", "major", "kernel"),
    [
        ("6.4.1", 9, "kernels-community/aiter-flash-attn"),
        ("7.0", 12, "kernels-community/aiter-flash-attn"),
        (None, 8, "kernels-community/flash-attn3"),
        (None, 9, "kernels-community/flash-attn3"),
        (None, 10, "kernels-community/flash-attn4"),
        (None, 12, "kernels-community/flash-attn4"),
    ],
)
def test_f010_the_kernel_follows_the_device(hip, major, kernel):
    assert hub_attention_kernel(device_traits(SimpleNamespace(major=major, minor=0), hip)) == kernel


@pytest.mark.parametrize(
    ("device", "named"), [(AMD, "AMD"), (BLACKWELL, "Blackwell"), (RTX_50, "Blackwell"), (HOPPER, None), (None, None)]
)
def test_f011_capped_attention_logits_are_refused_on_amd_and_blackwell(device, named):
    capped = hf.Gemma2Config(num_hidden_layers=2)
    check_config(hf.Gemma2Config(num_hidden_layers=2, attn_logit_softcapping=None), device)
    if named is None:
        check_config(capped, device)
        return
    with pytest.raises(ConfigError, match=rf"attn_logit_softcapping=50\.0.*{named}"):
        check_config(capped, device)


def test_attention_that_is_not_causal_is_refused():
    with pytest.raises(ConfigError, match="use_bidirectional_attention"):
        check_config(hf.Gemma3TextConfig(num_hidden_layers=2, use_bidirectional_attention=True), None)
    with pytest.raises(ConfigError, match="encoder-decoder"):
        check_config(hf.T5Config(), None)


def test_a_window_that_is_only_in_the_mask_is_refused_because_a_row_would_lose_it():
    """The refusal is needed: without it, a packed row of this model differs from its samples forwarded alone."""
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    config = hf.Qwen2MoeConfig(
        vocab_size=23,
        num_hidden_layers=2,
        pad_token_id=0,
        use_sliding_window=True,
        sliding_window=2,
        layer_types=["sliding_attention", "full_attention"],
        shared_expert_intermediate_size=8,
        initializer_range=0.3,
        attn_implementation="eager",
        experts_implementation="eager",
        **shape,
        **experts,
    )
    with pytest.raises(ConfigError, match="Layer 0 .*window through the mask"):
        check_config(config, None)
    model, samples = hf.Qwen2MoeForCausalLM(config).double(), some_samples(count=3)
    want = torch.cat([dense_logprobs(model, s).gather(1, trained_ids(s)[:, None])[:, 0] for s in samples])
    got = install_packed_forward(model)(**pack_row(samples, 0), temperature=1.0).logprobs
    assert not torch.allclose(got, want, atol=1e-3)


@pytest.mark.parametrize("kind", [hf.PhimoeConfig, hf.DogeConfig])
def test_a_window_of_all_layers_that_is_only_in_the_mask_is_refused_where_it_can_cut(kind):
    with pytest.raises(ConfigError, match=f"{kind.__name__} applies its sliding window through the mask"):
        check_config(kind(max_position_embeddings=64, sliding_window=63), None)
    check_config(kind(max_position_embeddings=64, sliding_window=64), None)
    check_config(kind(max_position_embeddings=64, sliding_window=None), None)


@pytest.mark.parametrize(
    ("config", "want"),
    [
        (hf.Qwen3Config(hidden_size=64, num_attention_heads=4, head_dim=32), (32, 32)),
        (hf.Qwen2Config(hidden_size=64, num_attention_heads=4), (16, 16)),
        (hf.Gemma4TextConfig(), (512, 512)),  # 256 where attention slides
        (hf.DeepseekV3Config(), (192, 128)),  # its head_dim is 64
        (SimpleNamespace(hidden_size=64), None),
    ],
)
def test_the_largest_attention_head_of_any_layer_counts(config, want):
    assert head_dims(config) == want


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 2,
    "long_factor": [4.0] * 2,
}
SMALL = {"hidden_size": 16, "num_attention_heads": 4, "pad_token_id": 0}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
LENGTHS = {
    "longrope": (
        hf.Phi3ForCausalLM,
        hf.Phi3Config,
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 12},
    ),
    "dynamic": (hf.LlamaForCausalLM, hf.LlamaConfig, {"rope_parameters": DYNAMIC, "max_position_embeddings": 12}),
}


@pytest.mark.parametrize(
    ("config", "want"),
    [
        (hf.Phi3Config(**SMALL, rope_parameters=LONGROPE, original_max_position_embeddings=12), 12),
        (hf.LlamaConfig(rope_parameters=DYNAMIC, max_position_embeddings=40), 40),
        (hf.LlamaConfig(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}), None),
        (hf.Gemma3TextConfig(rope_parameters={"full_attention": DYNAMIC}, max_position_embeddings=40), 40),
        (hf.Gemma3TextConfig(), None),
        (hf.GPT2Config(), None),
    ],
)
def test_frequencies_that_follow_the_longest_sample_are_known(config, want):
    assert longest_sample(config) == want


@pytest.mark.parametrize("name", LENGTHS)
def test_no_sample_may_change_the_rotary_frequencies_of_its_neighbours(name, monkeypatch, caplog):
    """Beside a longer sample a short one got other log-probabilities; up to the bound they are what they are alone."""
    monkeypatch.setitem(ARCHITECTURES, name, LENGTHS[name])
    rng = np.random.default_rng(0)
    short, fits, long = (make_sample(rng, 2, n) for n in (3, 10, 11))
    model = install_packed_forward(tiny_policy(name))
    assert "--max-model-len 12" in caplog.text
    with torch.no_grad():
        both = model(**pack_row([short, fits], 4), temperature=1.0).logprobs
        for sample, got in zip((short, fits), both.split([3, 10]), strict=True):
            alone = model(**pack_row([sample], 4), temperature=1.0).logprobs
            torch.testing.assert_close(got, alone, rtol=1e-6, atol=1e-6)
        for samples in ([short, long], [long]):
            with pytest.raises(ConfigError, match=r"A sample has 13 tokens; above 12 .*rotary.*--max-model-len 12"):
                model(**pack_row(samples, 4), temperature=1.0)
