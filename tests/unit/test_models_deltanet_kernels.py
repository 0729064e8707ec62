"""Kernels for gated DeltaNet that do not work on the device are found at load, and not used (F129)."""

import importlib
import itertools
import logging
import re
import sys
import types
from types import SimpleNamespace

import pytest
import torch
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

from asyncgrpo_core.errors import ConfigError
from asyncgrpo_core.models import deltanet
from asyncgrpo_core.models.deltanet_kernels import keep_working_kernels
from asyncgrpo_core.models.forward import install_packed_forward
from asyncgrpo_core.training import trainer_parts
from tests.unit.deltanet_cases import CASES, SAMPLES, policy, tree_row, weighted
from tests.unit.policy_cases import assert_same_gradients, gradients

RULE, CONVOLUTION = "torch_chunk_gated_delta_rule", "causal_conv1d_fn"
CPU = torch.device("cpu")
LOW = [torch.bfloat16, torch.float16]


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


def changed(name, change):
    """Another gradient of one of the delta rule's tensors."""

    def fault(tensors, options, call):
        return {**tensors, name: _Changed.apply(tensors[name], change)}, options

    return fault


def without_state(tensors, options, call):
    return tensors, {**options, "initial_state": None}


def state_of_the_first(tensors, options, call):
    """All sequences of a call start from the same one's state."""
    return tensors, {**options, "initial_state": None if call.states is None else call.states[:1]}


def exploding(tensors, options, call):
    """exp(sum of g) and exp(-sum of g) apart, which overflows where a head forgets fast."""
    apart = (-tensors["g"].float().cumsum(1)).exp()
    return {**tensors, "v": tensors["v"] * (apart / apart).unsqueeze(-1).to(tensors["v"].dtype)}, options


def from_the_second_run_on(tensors, options, call):
    return ({**tensors, "v": tensors["v"] * (1 + (call.run > 3))}), options


def one_token_is_lost(tensors, options, call):
    """Of segments that have one token."""
    alone = tensors["v"].shape[1] == 1
    return {**tensors, "v": _Changed.apply(tensors["v"], lambda g: 0 * g) if alone else tensors["v"]}, options


WRONG = "computes the .* wrong"
FAULTS = {
    "refuses the backward pass": (changed("g", refused), "RuntimeError: this Triton computes wrong gradients"),
    "wrong gradient of the decay": (changed("g", lambda g: 0.8 * g), "the gradient of g wrong"),
    "no gradient of the decay": (changed("g", lambda g: 0 * g), "the gradient of g wrong"),
    "no gradient of the keys": (changed("k", lambda g: 0 * g), "the gradient of .* wrong"),
    "not a number": (changed("beta", one_element_is_nan), "the gradient of .* off by inf"),
    "every segment starts from nothing": (without_state, WRONG),
    "every segment starts from the first one's state": (state_of_the_first, WRONG),
    "overflows where a head forgets": (exploding, "off by inf"),
    "wrong from the second run on": (from_the_second_run_on, WRONG),
    "no gradient of a token that is alone": (one_token_is_lost, "the gradient of .* wrong: a segment of 1 tokens"),
}


@pytest.fixture
def kernels(monkeypatch):
    """`kernels(model, name, function)`: as if transformers had found a library with `function`; its module."""

    def choose(model, name, function):
        module = importlib.import_module(type(model).__module__)
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


def delta_rule(model, fault=None):
    """A stand-in for fla's: the same arguments, and transformers' own function for each sequence."""
    own = deltanet.transformers_own(getattr(importlib.import_module(type(model).__module__), RULE))
    seen = []

    def chunk_gated_delta_rule(
        q, k, v, g, beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=None
    ):
        bounds = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
        seen.append(SimpleNamespace(segments=len(bounds) - 1, dtype=q.dtype))
        found = []
        for i, (a, b) in enumerate(itertools.pairwise(bounds)):
            tensors = {n: x[:, a:b] for n, x in zip("qkvgb", (q, k, v, g, beta), strict=True)}
            tensors["beta"] = tensors.pop("b")
            options = {"initial_state": None if initial_state is None else initial_state[i : i + 1]}
            if fault is not None:
                tensors, options = fault(tensors, options, SimpleNamespace(run=len(seen), states=initial_state))
            options |= {"output_final_state": True, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
            found.append(own(*tensors.values(), **options))
        states = torch.cat([state for _, state in found]) if output_final_state else None
        return torch.cat([out for out, _ in found], 1), states

    chunk_gated_delta_rule.seen = seen
    return chunk_gated_delta_rule


def warnings_of_ours(caplog):
    ours = (record for record in caplog.records if record.name.startswith("asyncgrpo_core"))
    return [record.getMessage() for record in ours if record.levelno >= logging.WARNING]


def results(model):
    row = tree_row(SAMPLES["forks_at_every_depth"])
    logprobs = model(**row).logprobs
    weighted(logprobs).backward()
    return logprobs.detach(), gradients(model)


def ready(case="qwen3_5", dtype=torch.float32):
    return install_packed_forward(policy(case, dtype))


@pytest.mark.parametrize("case", [case for case in CASES if case != "kernel_of_2"])
@pytest.mark.parametrize("name", FAULTS)
def test_f129_a_delta_rule_that_fails_is_replaced_by_pytorchs_code(name, case, kernels, caplog):
    fault, said = FAULTS[name]
    model = ready(case)
    want = results(model)
    model.zero_grad()
    broken = delta_rule(model, fault)
    module = kernels(model, RULE, broken)
    with caplog.at_level(logging.WARNING):
        keep_working_kernels(model, device=CPU, dtype=torch.float32)
    (message,) = warnings_of_ours(caplog)
    assert message.startswith(f"The kernel that transformers chose for {RULE} cannot")
    assert re.search(said, message), message
    assert broken.seen and not deltanet.uses_kernel(getattr(module, RULE))
    broken.seen.clear()
    got = results(model)
    assert not broken.seen and torch.equal(got[0], want[0])
    assert_same_gradients(got[1], want[1], 1e-6)


@pytest.mark.parametrize(("dtype", "right", "wrong"), [(torch.float32, 1.01, 1.04), (torch.bfloat16, 1.02, 1.1)])
def test_f129_how_far_a_kernel_may_be_off(dtype, right, wrong, kernels, caplog):
    heads = {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "hidden_size": 32}  # smaller ones round more
    for factor in (right, wrong):
        model = install_packed_forward(policy(dtype=torch.float32, **heads))

        def scaled(tensors, options, call, factor=factor):
            return {**tensors, "v": tensors["v"] * factor}, options

        module = kernels(model, RULE, delta_rule(model, scaled))
        keep_working_kernels(model, device=CPU, dtype=dtype)
        assert deltanet.uses_kernel(getattr(module, RULE)) is (factor == right)


@pytest.mark.parametrize(
    ("held", "dtype"),
    [
        *[(torch.float32, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)],
        *[(dtype, dtype) for dtype in (torch.bfloat16, torch.float64)],
    ],
)
@pytest.mark.parametrize("case", CASES)
def test_f129_a_delta_rule_that_works_is_kept_and_nothing_else_changes(case, dtype, held, kernels, caplog):
    model = ready(case, held)
    right = delta_rule(model)
    module = kernels(model, RULE, right)
    chosen, random_state = getattr(module, RULE).chosen, torch.get_rng_state()
    with caplog.at_level(logging.WARNING):
        keep_working_kernels(model, device=CPU, dtype=dtype)
    assert not warnings_of_ours(caplog) and getattr(module, RULE).unplanned is chosen
    assert max(call.segments for call in right.seen) > 1, "the trial has to hand several segments to one call"
    assert {call.dtype for call in right.seen} == {dtype}, "it has to be tried at the precision that trains"
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    "around",
    [torch.no_grad, torch.inference_mode, lambda: torch.device("meta"), lambda: torch.autocast("cpu", torch.bfloat16)],
)
def test_f129_the_trial_does_not_depend_on_what_is_around_it(around, kernels, caplog):
    model = ready()
    module = kernels(model, RULE, delta_rule(model))
    with around():
        keep_working_kernels(model, device=CPU, dtype=torch.float32)
    assert deltanet.uses_kernel(getattr(module, RULE)) and not warnings_of_ours(caplog)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_f129_the_trial_does_not_depend_on_the_default_dtype(default, kernels, caplog):
    model = ready()
    module = kernels(model, RULE, delta_rule(model))
    torch.set_default_dtype(default)
    try:
        keep_working_kernels(model, device=CPU, dtype=torch.float32)
    finally:
        torch.set_default_dtype(torch.float32)
    assert deltanet.uses_kernel(getattr(module, RULE)) and not warnings_of_ours(caplog)


@pytest.mark.parametrize("broken", [(CONVOLUTION,), (RULE,), (RULE, CONVOLUTION)])
def test_f129_only_the_kernels_that_fail_are_replaced(broken, kernels, caplog):
    model = ready()
    rule = delta_rule(model, changed("g", refused) if RULE in broken else None)
    module = kernels(model, RULE, rule)
    own = deltanet.transformers_own(getattr(module, CONVOLUTION))

    def convolution(hidden_states, weight, bias=None, activation=None):
        shift = 1 if CONVOLUTION in broken else 0
        return own(hidden_states.roll(shift, -1), weight, bias, activation=activation)

    kernels(model, CONVOLUTION, convolution)
    with caplog.at_level(logging.WARNING):
        keep_working_kernels(model, device=CPU, dtype=torch.float32)
    messages = warnings_of_ours(caplog)
    assert len(messages) == len(broken) and all(any(name in message for message in messages) for name in broken)
    assert all(deltanet.uses_kernel(getattr(module, name)) is (name not in broken) for name in (RULE, CONVOLUTION))


def test_f129_what_failed_for_one_dtype_is_tried_again_for_another(kernels):
    model = ready()

    def not_in_16_bits(tensors, options, call):
        if tensors["q"].dtype in LOW:
            raise NotImplementedError("float32 only")
        return tensors, options

    module = kernels(model, RULE, delta_rule(model, not_in_16_bits))
    for dtype, works in ((torch.bfloat16, False), (torch.float32, True), (torch.float16, False)):
        keep_working_kernels(model, device=CPU, dtype=dtype)
        assert deltanet.uses_kernel(getattr(module, RULE)) is works


@pytest.mark.parametrize("where", ["kernel", "PyTorch's code"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_f129_a_full_or_broken_device_is_no_fault_of_the_kernel(error, where, kernels, monkeypatch):
    model = ready()

    def fails(tensors, options, call):
        raise error("CUDA error")

    module = kernels(model, RULE, delta_rule(model, fails if where == "kernel" else None))
    if where != "kernel":
        monkeypatch.setattr(deltanet, "transformers_own", lambda function: lambda *args, **kwargs: fails(*[None] * 3))
    with pytest.raises(error):
        keep_working_kernels(model, device=CPU, dtype=torch.float32)
    assert deltanet.uses_kernel(getattr(module, RULE))


def test_f129_where_pytorchs_code_does_not_run_the_kernel_stays(kernels, caplog, monkeypatch):
    model = ready()
    module = kernels(model, RULE, delta_rule(model))

    def unable(*args, **kwargs):
        raise RuntimeError("no triangular solver here")

    monkeypatch.setattr(deltanet, "transformers_own", lambda function: unable)
    keep_working_kernels(model, device=CPU, dtype=torch.float32)
    assert deltanet.uses_kernel(getattr(module, RULE)) and "were not tried" in warnings_of_ours(caplog)[0]


def test_f129_the_trainer_tries_them_when_it_loads_a_policy(kernels, monkeypatch, tmp_path):
    model = policy(dtype=torch.float32)
    module = kernels(install_packed_forward(model), RULE, delta_rule(model, without_state))
    monkeypatch.setattr(trainer_parts, "load_policy", lambda *args, **kwargs: model)
    monkeypatch.setattr(trainer_parts, "load_processing_class", lambda *args: None)
    args = trainer_parts.AsyncGRPOConfig(output_dir=str(tmp_path), use_cpu=True)
    trainer_parts.load_parts(model, args, object(), None)
    assert not deltanet.uses_kernel(getattr(module, RULE))


def test_f129_kernels_that_change_with_the_mode_are_refused():
    model = ready()
    model._use_kernels = True
    with pytest.raises(ConfigError, match="use_kernels"):
        keep_working_kernels(model, device=CPU, dtype=torch.float32)


@pytest.mark.parametrize("case", CASES)
def test_f129_without_a_kernel_nothing_is_tried(case, monkeypatch):
    model = ready(case)
    monkeypatch.setattr("asyncgrpo_core.models.deltanet_kernels._try_kernels", pytest.fail)
    keep_working_kernels(model, device=CPU, dtype=torch.float32)
