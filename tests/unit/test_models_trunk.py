"""Which trunk kernels are chosen, and that compiled layers change nothing but the speed."""

import pytest
import torch

from asyncgrpo_core.errors import ConfigError
from asyncgrpo_core.models import trunk
from asyncgrpo_core.models.compiler import compiler_works
from asyncgrpo_core.models.forward import install_packed_forward
from asyncgrpo_core.models.trunk import choose_trunk, compile_layers, compiled_graphs, prepare_trunk
from asyncgrpo_core.packing import pack_row
from tests.unit.policy_cases import gradients, sharing_samples, tiny_policy

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def choose(requested="auto", architecture="qwen3", device=CUDA, wrapped=False, world_size=1):
    config = tiny_policy(architecture).config.get_text_config()
    return choose_trunk(requested, device=device, text_config=config, wrapped=wrapped, world_size=world_size)


@pytest.mark.parametrize(
    ("case", "want", "why"),
    [
        ({}, "compile", "dense block"),
        ({"architecture": "mistral_window"}, "compile", "dense block"),
        ({"architecture": "gemma3_text"}, "compile", "dense block"),
        ({"architecture": "qwen3_moe"}, "eager", "experts"),
        ({"device": CPU}, "eager", "cpu"),
        ({"wrapped": True}, "eager", "adapter"),
        ({"world_size": 2}, "eager", "several ranks"),
        ({"requested": "eager"}, "eager", "asked"),
        ({"requested": "compile", "device": CPU}, "compile", "asked"),
    ],
)
def test_the_choice_and_its_reason(case, want, why, monkeypatch):
    monkeypatch.setattr(trunk, "compiler_works", lambda device_type: True)
    choice, reason = choose(**case)
    assert choice == want and why in reason


def test_auto_stays_eager_where_nothing_can_be_compiled(monkeypatch):
    monkeypatch.setattr(trunk, "compiler_works", lambda device_type: False)
    assert choose() == ("eager", "torch.compile does not work here")


def test_a_compiler_that_fails_is_told_once_and_never_raised(monkeypatch, caplog):
    """Without CUDA the probe's own tensor cannot be made: any failure means that nothing can be compiled."""

    def broken(function):
        raise RuntimeError("no C compiler found\nat length")

    monkeypatch.setattr(torch, "compile", broken)
    compiler_works.cache_clear()
    assert not compiler_works("cuda") and not compiler_works("cuda") and not compiler_works("cpu")
    (record,) = caplog.records
    assert "RuntimeError: no C compiler found" in record.getMessage()
    compiler_works.cache_clear()


def test_an_unknown_name_is_refused():
    with pytest.raises(ConfigError, match="'liger' is unknown"):
        choose("liger")


def test_a_model_without_a_list_of_layers_is_refused():
    with pytest.raises(ConfigError, match="no list of layers"):
        compile_layers(torch.nn.Linear(2, 2))


def test_layers_stay_as_they_are_on_a_cpu():
    model = install_packed_forward(tiny_policy())
    assert prepare_trunk(model, "auto", device=CPU, world_size=1) == "eager"
    assert all(layer._compiled_call_impl is None for layer in model.model.layers)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_layers_compute_the_same_and_compile_once_for_all_layers_and_lengths(checkpointing, monkeypatch):
    """Traced by dynamo with the `eager` code generator: what is traced is what inductor would get."""
    torch._dynamo.reset()
    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self, **kwargs: compile_module(self, backend="eager", **kwargs)
    )
    rows = [pack_row(sharing_samples(seed)[: 13 - 2 * seed], 4) for seed in range(4)]
    plain, model = (install_packed_forward(tiny_policy()) for _ in range(2))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    assert prepare_trunk(model, "compile", device=CPU, world_size=1) == "compile"
    before, graphs = compiled_graphs(), []
    for row in rows:
        want, got = plain(**row, temperature=1.0), model(**row, temperature=1.0)
        torch.testing.assert_close(got.logprobs, want.logprobs, rtol=1e-6, atol=1e-6)
        want.logprobs.sum().backward()
        got.logprobs.sum().backward()
        expected = gradients(plain)
        for name, value in gradients(model).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)
        graphs.append(compiled_graphs() - before)
    assert 0 < graphs[0] <= 6
    assert graphs[-1] == graphs[0]  # neither another layer nor another length compiled anything
