"""Gated DeltaNet hybrids on a GPU: trie rows in bfloat16 against float64, and the time a tree saves.

Uses whatever delta rule is installed: `fla`'s kernels, else transformers' PyTorch code. Run with `-s` for the table.
"""

import contextlib
import importlib
import itertools
import time

import numpy as np
import pytest
import torch

from asyncgrpo_core.models import deltanet
from asyncgrpo_core.models.deltanet_kernels import keep_working_kernels
from asyncgrpo_core.models.deltanet_schedule import recurrence_schedule
from asyncgrpo_core.models.forward import install_packed_forward
from asyncgrpo_core.models.probe import check_packed_forward
from asyncgrpo_core.models.row_plan import RowPlan
from tests.unit.deltanet_cases import CUTS, alone, policy, random_tokens, tree_row, weighted
from tests.unit.policy_cases import float64_throughout, gradients

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "initializer_range": 0.05,
    "linear_num_key_heads": 6,  # heads as in the smoke run: fla searches its settings for each kind of heads
    "linear_num_value_heads": 12,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
# The layers of Qwen3.5-0.8B, four of its twenty-four.
LARGE = {
    **SMALL,
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_attention_heads": 8,
    "head_dim": 256,
    "initializer_range": 0.02,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}


def on_gpu(row):
    return {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in row.items()}


def ready(model):
    """As the trainer loads it: kernels that do not work on this GPU are replaced."""
    install_packed_forward(model)
    keep_working_kernels(model, device=torch.device("cuda"), dtype=torch.bfloat16)
    return model


@contextlib.contextmanager
def transformers_own_functions(model):
    """Its PyTorch delta rule and convolution, which take float64 and a CPU, whatever kernels are installed."""
    module = importlib.import_module(type(model).__module__)
    before = {name: getattr(module, name) for name in deltanet.MIXING_FUNCTIONS}
    for name, function in before.items():
        setattr(module, name, deltanet.transformers_own(function))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)


def conversations():
    """Two groups with a common system prompt, second turns, and completions from one token to several chunks."""
    rng = np.random.default_rng(0)
    system = random_tokens(rng, 70)
    prompts = [system + random_tokens(rng, n) for n in (64, 3)]
    first = [p + random_tokens(rng, n) for p, n in itertools.product(prompts, (1, 2, 65, 130))]
    return first + [first[3] + random_tokens(rng, n) for n in (1, 40)]


@pytest.mark.parametrize("case", ["qwen3_5", "qwen3_next"])
@pytest.mark.parametrize("cut", ["as_it_branches", "short_segments"])
def test_f129_bfloat16_trees_are_as_close_to_float64_as_samples_forwarded_alone(case, cut):
    """Bound: mean and largest error at most 1.5 and 2 times those of the samples alone in bfloat16, and the error of
    the whole gradient at most 1.5 times theirs."""
    samples = conversations()
    exact_model = policy(case, **SMALL)
    with float64_throughout(), transformers_own_functions(exact_model):
        exact = alone(exact_model, samples)
        weighted(exact).backward()
    found = {}
    for name in ("alone", "tree"):
        model = policy(case, torch.bfloat16, **SMALL, experts_implementation="batched_mm").cuda()
        ready(model)
        if name == "alone":
            logprobs = alone(model, samples)
        else:
            logprobs = model(**on_gpu(tree_row(samples, CUTS[cut]))).logprobs
        weighted(logprobs).backward()
        error = (logprobs.double().cpu() - exact.detach()).abs()
        found[name] = error.mean().item(), error.max().item(), gradients(model)
    want = gradients(exact_model)
    norm = sum(g.square().sum() for g in want.values()).sqrt()
    mean, largest, gradient = (
        {name: f[i] if i < 2 else _distance(f[2], want) / norm for name, f in found.items()} for i in range(3)
    )
    print(f"\n{case} {cut}: mean {mean} largest {largest} gradient {gradient}")
    assert mean["tree"] <= 1.5 * mean["alone"] and largest["tree"] <= 2 * largest["alone"]
    assert gradient["tree"] <= 1.5 * gradient["alone"]


@pytest.mark.parametrize("case", ["qwen3_5", "qwen3_next"])
def test_the_check_at_load_leaves_the_gpu_usable(case):
    """Before, `fla`'s kernels got tensors without data there: an illegal memory access, at the next call of torch."""
    pytest.importorskip("fla")
    model = install_packed_forward(policy(case, torch.bfloat16, **SMALL).cuda())
    check_packed_forward(model)
    torch.cuda.synchronize()
    assert torch.ones(1, device="cuda").item() == 1


def _distance(a, b):
    return sum((a[name].double().cpu() - value).square().sum() for name, value in b.items()).sqrt()


def test_f129_time_of_a_tree_and_of_a_plain_row():
    """4 groups of 8 completions of 480 tokens over a prompt of 2,004, as in the trainer's benchmark."""
    model = ready(policy("qwen3_5", torch.bfloat16, **LARGE).cuda())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    plain = ([2484] * 32, [-1] * 32, [0] * 32)
    tree = ([2004, *[480] * 8] * 4, [p for g in range(4) for p in (-1, *[9 * g] * 8)], [0, *[2004] * 8] * 4)
    seconds = {}
    for name, (lengths, parents, starts) in {"plain": plain, "tree": tree}.items():
        torch.cuda.reset_peak_memory_stats()
        row = _row(lengths, parents, starts)
        seconds[name] = _time(model, row)
        plan = RowPlan.from_segments(row["cu_segments"], row["parents"])
        calls = [recurrence_schedule(plan, padded=padded).num_calls for padded in (True, False)]
        peak = torch.cuda.max_memory_allocated() / 2**30
        print(
            f"\n{name}: {sum(lengths):,} tokens, {1e3 * seconds[name]:.0f} ms forward and backward of 4 layers, "
            f"{peak:.1f} GiB, delta rule calls per layer {calls[0]} padded or {calls[1]} end to end"
        )
    print(f"tree {seconds['plain'] / seconds['tree']:.2f} times as fast; {79_488 / 23_376:.2f} fewer tokens")
    assert seconds["tree"] < seconds["plain"]


def _row(lengths, parents, starts):
    tokens = sum(lengths)
    generator = torch.Generator().manual_seed(0)
    positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)])
    cu_segments = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    ends = cu_segments[1:].tolist()
    trained = torch.cat([torch.arange(end - 480, end - 1) for end, n in zip(ends, lengths, strict=True) if n != 2004])
    return on_gpu(
        {
            "input_ids": torch.randint(3, 32_000, (1, tokens), generator=generator),
            "position_ids": positions[None],
            "cu_segments": cu_segments,
            "parents": torch.tensor(parents),
            "target_positions": trained,
            "target_ids": torch.randint(3, 32_000, (len(trained),), generator=generator),
            "temperature": 1.0,
        }
    )


def _time(model, row, repeats=3):
    """Seconds of a forward and backward, the fastest of some after one to warm up."""
    found = []
    for _ in range(1 + repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        model(**row).logprobs.sum().backward()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
        model.zero_grad(set_to_none=True)
    return min(found[1:])
