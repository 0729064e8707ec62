"""iter_server_parameters: names, ties and merged adapters (F138)."""

import peft
import pytest
import torch

from asyncgrpo_core.models.forward import install_packed_forward, score_tokens
from asyncgrpo_core.models.parameters import iter_server_parameters
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


def test_wrappers_do_not_change_the_names():
    model = tiny_policy("qwen3")
    wrapped = torch.nn.Module()
    wrapped.module = model
    assert [n for n, _ in iter_server_parameters(wrapped)] == [n for n, _ in iter_server_parameters(model)]
