"""A vision-language checkpoint trained on text: loaded whole, the text model trains, the rest is frozen."""

from types import SimpleNamespace

import peft
import pytest
import torch
from transformers import AutoModelForImageTextToText, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from asyncgrpo_core.models.forward import causal_model, install_packed_forward
from asyncgrpo_core.models.loading import load_policy
from asyncgrpo_core.models.parameters import iter_server_parameters
from asyncgrpo_core.models.support import outside_text_model
from asyncgrpo_core.packing import pack_row
from tests.unit.policy_cases import (
    VOCAB,
    assert_same_gradients,
    dense_logprobs,
    float64_throughout,
    gradients,
    some_samples,
    trained_ids,
)


def config():
    return SimpleNamespace(
        model_init_kwargs=None, dtype="float32", trust_remote_code=False, router_aux_loss_coef=None, use_cpu=True
    )


def tiny_vision_language_model():
    torch.manual_seed(0)
    text = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "pad_token_id": 0,
        "eos_token_id": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 16,
        "patch_size": 4,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    ids = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    settings = Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=False,
        attn_implementation="eager",
        **{name: VOCAB - 1 - i for i, name in enumerate(ids)},
    )
    return Qwen3VLForConditionalGeneration(settings).train()


@pytest.fixture
def vision_language_folder(tmp_path):
    tiny_vision_language_model().save_pretrained(tmp_path)
    return tmp_path


def test_f188_f189_a_vision_language_checkpoint_is_loaded_whole_and_its_text_model_trains(
    vision_language_folder, monkeypatch
):
    calls = []
    original = AutoModelForImageTextToText.from_pretrained.__func__

    def from_pretrained(cls, *args, **kwargs):
        calls.append(cls)
        return original(cls, *args, **kwargs)

    monkeypatch.setattr(AutoModelForImageTextToText, "from_pretrained", classmethod(from_pretrained))
    model = load_policy(str(vision_language_folder), config())
    assert calls == [AutoModelForImageTextToText] and isinstance(model, Qwen3VLForConditionalGeneration)
    assert model.eos_token_ids == [2]
    parameters = dict(model.named_parameters())
    frozen = {name for name, p in parameters.items() if not p.requires_grad}
    tower = {name for name in parameters if name.startswith("model.visual.")}
    assert frozen == tower == outside_text_model(model) and len(tower) > 10
    assert {"lm_head.weight", "model.language_model.embed_tokens.weight"} <= parameters.keys() - frozen


def test_f189_an_adapter_that_reaches_the_tower_is_frozen_with_it(vision_language_folder):
    adapter = peft.LoraConfig(r=2, target_modules="all-linear")
    model = load_policy(str(vision_language_folder), config(), peft_config=adapter)
    adapters = [(n, p.requires_grad) for n, p in causal_model(model).named_parameters() if "lora_" in n]
    assert {on for n, on in adapters if "visual" in n} <= {False}
    assert {on for n, on in adapters if "language_model" in n} == {True}


@float64_throughout()
def test_f188_a_row_of_text_equals_its_samples_forwarded_alone_by_the_vision_language_model():
    samples = some_samples(count=2)
    plain = tiny_vision_language_model().double()
    model = load_policy(tiny_vision_language_model().double(), config())
    want = torch.cat([dense_logprobs(plain, s).gather(1, trained_ids(s)[:, None])[:, 0] for s in samples])
    install_packed_forward(model)
    got = model(**pack_row(samples, 0), temperature=1.0).logprobs
    torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-8)
    weight = torch.linspace(0.5, 1.5, len(want), dtype=torch.float64)
    (weight * want).sum().backward()
    (weight * got).sum().backward()
    expected = {name: g for name, g in gradients(plain).items() if "visual" not in name}
    assert_same_gradients(gradients(model), expected)


@pytest.mark.parametrize("adapter", [None, peft.LoraConfig(r=2, target_modules="all-linear")], ids=["full", "adapter"])
def test_f189_the_tower_is_not_sent_to_the_server(adapter):
    plain = tiny_vision_language_model()
    model = load_policy(tiny_vision_language_model(), config(), peft_config=adapter)
    sent = {name for name, _ in iter_server_parameters(model)}
    assert sent == {name for name, _ in plain.named_parameters() if not name.startswith("model.visual.")}
