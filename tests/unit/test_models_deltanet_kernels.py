"""Kernels for gated DeltaNet that do not work on the device are found at load, and not used (F129)."""

import importlib
import itertools
import logging
import re
import sys
import types

import pytest
import torch
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

from asyncgrpo_core.models import deltanet
from asyncgrpo_core.models.deltanet_kernels import keep_working_kernels
from asyncgrpo_core.models.forward import install_packed_forward
from tests.unit.deltanet_cases import CASES, SAMPLES, policy, tree_row, weighted
from tests.unit.policy_cases import assert_same_gradients, gradients

RULE, CONVOLUTION = "torch_chunk_gated_delta_rule", "causal_conv1d_fn"
CPU = torch.device("cpu")


class _Changed(torch.autograd.Function):
    """The same value; `change` makes another gradient of it."""

    @staticmethod
    def forward(ctx, value, change):
        ctx.change = change
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.change(gradient), None


def refused(_gradient):
    raise RuntimeError("this Triton computes wrong gradients here, please install another")


def one_element_is_nan(gradient):
    gradient = gradient.clone()
    gradient[..., 0, 0] = torch.nan
    return gradient


# Which argument of the delta rule or of the convolution gets which gradient.
FAULTS = {
    "refuses the backward pass": ("g", refused, "RuntimeError: this Triton computes wrong gradients"),
    "wrong gradient of the decay": ("g", lambda gradient: 0.8 * gradient, "computes the gradient of .* wrong"),
    "no gradient of the keys": ("k", lambda gradient: 0 * gradient, "computes the gradient of .* wrong"),
    "not a number": ("beta", one_element_is_nan, "computes the gradient of .* wrong: inf"),
}


@pytest.fixture
def kernels(monkeypatch):
    """`kernels(name, function)` lets transformers choose `function` as if a library with it were installed."""

    def choose(name, function):
        module = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
        package, func_name = {RULE: ("fla", "chunk_gated_delta_rule"), CONVOLUTION: ("causal_conv1d", name)}[name]
        library = types.ModuleType(package)
        inner = types.ModuleType(f"{package}.ops")
        for holder in (library, inner):
            setattr(holder, func_name, function)
        inner.gated_delta_rule = inner
        library.ops = inner
        function.__module__ = f"{package}.ops.gated_delta_rule"
        monkeypatch.setitem(sys.modules, package, library)
        own = deltanet.transformers_own(getattr(module, name))
        chosen = use_kernel_func_from_hub_with_fallback(func_name, package)(own)
        monkeypatch.setattr(module, name, getattr(module, name))  # restored afterwards
        deltanet.set_function(module, name, chosen)
        assert deltanet.uses_kernel(getattr(module, name))
        return module

    return choose


def delta_rule(fault=None):
    """A stand-in for fla's: the same arguments, and transformers' own function for each sequence."""
    module = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    own = deltanet.transformers_own(module.torch_chunk_gated_delta_rule)
    seen = []

    def chunk_gated_delta_rule(
        q, k, v, g, beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=None
    ):
        bounds = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
        seen.append(len(bounds) - 1)
        tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
        if fault is not None:
            tensors[fault[0]] = _Changed.apply(tensors[fault[0]], fault[1])
        found = [
            own(
                *(x[:, a:b] for x in tensors.values()),
                initial_state=None if initial_state is None else initial_state[i : i + 1],
                output_final_state=True,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            )
            for i, (a, b) in enumerate(itertools.pairwise(bounds))
        ]
        states = torch.cat([state for _, state in found]) if output_final_state else None
        return torch.cat([out for out, _ in found], 1), states

    chunk_gated_delta_rule.seen = seen
    return chunk_gated_delta_rule


def warnings_of_ours(caplog):
    return [record.getMessage() for record in caplog.records if record.name.startswith("asyncgrpo_core")]


def results(model):
    row = tree_row(SAMPLES["forks_at_every_depth"])
    logprobs = model(**row).logprobs
    weighted(logprobs).backward()
    return logprobs.detach(), gradients(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAULTS)
def test_f129_a_delta_rule_that_fails_is_replaced_by_pytorchs_code(name, dtype, kernels, caplog):
    fault = FAULTS[name]
    model = install_packed_forward(policy(dtype=torch.float32))
    want = results(model)
    model.zero_grad()
    broken = delta_rule(fault)
    module = kernels(RULE, broken)
    with caplog.at_level(logging.WARNING):
        keep_working_kernels(model, device=CPU, dtype=dtype)
    (message,) = warnings_of_ours(caplog)
    assert message.startswith(f"The kernel that transformers chose for {RULE} cannot")
    assert re.search(fault[2], message)
    assert broken.seen and not deltanet.uses_kernel(getattr(module, RULE))
    broken.seen.clear()
    got = results(model)
    assert not broken.seen and torch.equal(got[0], want[0])
    assert_same_gradients(got[1], want[1], 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_f129_a_delta_rule_that_works_is_kept_and_nothing_else_changes(dtype, kernels, caplog):
    model = install_packed_forward(policy(dtype=torch.float32))
    right = delta_rule()
    module = kernels(RULE, right)
    before, random_state = getattr(module, RULE), torch.get_rng_state()
    with caplog.at_level(logging.WARNING):
        keep_working_kernels(model, device=CPU, dtype=dtype)
    assert not warnings_of_ours(caplog) and getattr(module, RULE) is before
    assert max(right.seen) > 1, "the trial has to hand several segments to one call"
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_f129_only_the_kernel_that_fails_is_replaced(kernels, caplog):
    model = install_packed_forward(policy(dtype=torch.float32))
    module = kernels(RULE, delta_rule())
    own = deltanet.transformers_own(getattr(module, CONVOLUTION))

    def shifted(hidden_states, weight, bias=None, activation=None):
        return own(hidden_states.roll(1, -1), weight, bias, activation=activation)

    kernels(CONVOLUTION, shifted)
    with caplog.at_level(logging.WARNING):
        keep_working_kernels(model, device=CPU, dtype=torch.float32)
    assert [CONVOLUTION in message for message in warnings_of_ours(caplog)] == [True]
    assert deltanet.uses_kernel(getattr(module, RULE)) and not deltanet.uses_kernel(getattr(module, CONVOLUTION))


@pytest.mark.parametrize("case", CASES)
def test_f129_without_a_kernel_nothing_is_tried(case, monkeypatch):
    model = install_packed_forward(policy(case, torch.float32))
    monkeypatch.setattr("asyncgrpo_core.models.deltanet_kernels._try_kernels", pytest.fail)
    keep_working_kernels(model, device=CPU, dtype=torch.float32)
