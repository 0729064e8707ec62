"""Attention back ends on a GPU against the sdpa back end in float64 on the CPU, forward and backward, on trie rows."""

import pytest
import torch

from asyncgrpo_core.models.attention import packed_attention_forward
from asyncgrpo_core.models.attention_backends import flex
from asyncgrpo_core.models.forward import install_packed_forward
from asyncgrpo_core.models.row_plan import RowPlan
from asyncgrpo_core.packing import pack_row
from tests.unit.policy_cases import sharing_samples, tiny_policy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ROWS = {
    "roots": ([3, 170, 1, 64, 65, 2, 300], [-1] * 7),
    "tree": ([150, 30, 1, 1, 140, 2, 60, 90], [-1, 0, 1, 1, 0, 4, 4, -1]),
}


class _Layer(torch.nn.Module):
    num_key_value_groups = 2
    is_causal = True


def attend(device, dtype, backend, name, window, softcap, kv_heads):
    """Output and the gradients of q, k, v for the same numbers everywhere, as float64 on the CPU."""
    lengths, parents = ROWS[name]
    g = torch.Generator().manual_seed(0)
    n = sum(lengths)
    qkv = [torch.randn(1, h, n, 64, generator=g).bfloat16() for h in (4, kv_heads, kv_heads)]
    qkv = [x.to(device, dtype).requires_grad_() for x in qkv]
    plan = RowPlan.from_segments(
        torch.tensor([0, *lengths]).cumsum(0).to(device), torch.tensor(parents).to(device), backend
    )
    out, _ = packed_attention_forward(
        _Layer(), *qkv, None, sliding_window=window, softcap=softcap, packed_attention=plan
    )
    upstream = torch.randn(out.shape, generator=g).bfloat16().to(device, dtype)
    return [x.double().cpu() for x in (out, *torch.autograd.grad(out, qkv, upstream))]


@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (16, None), (None, 2.0)])
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("varlen", torch.bfloat16),
        ("flex", torch.bfloat16),
        ("flex", torch.float32),
        ("sdpa", torch.bfloat16),
        ("sdpa", torch.float32),
    ],
)
@pytest.mark.parametrize("name", ROWS)
def test_cuda_attention_equals_float64_on_the_cpu(name, backend, dtype, window, softcap, kv_heads):
    if backend == "varlen" and softcap is not None:
        pytest.skip("varlen cannot cap scores; choose_backend never gives it to such a model")
    want = attend("cpu", torch.float64, "sdpa", name, window, softcap, kv_heads)
    got = attend("cuda", dtype, backend, name, window, softcap, kv_heads)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 4e-3  # float32 products may run in TF32
    for mine, other in zip(got, want, strict=True):
        assert (mine - other).abs().max() <= tolerance * other.abs().max()


def test_flex_compiles_once_for_rows_of_one_padded_length():
    before = len(flex.compiled_shapes)
    for n in (500, 505, 512):
        plan = RowPlan.from_segments(torch.tensor([0, 300, n]).cuda(), torch.tensor([-1, 0]).cuda(), "flex")
        q, k = (torch.randn(1, h, n, 64, device="cuda", dtype=torch.bfloat16) for h in (8, 2))
        packed_attention_forward(_Layer(), q, k, k, None, packed_attention=plan)
    assert len(flex.compiled_shapes) <= before + 1


@pytest.mark.parametrize("backend", ["flex", "varlen", "sdpa"])
def test_a_bf16_row_on_the_gpu_equals_float64_on_the_cpu(backend):
    row = pack_row(sharing_samples(), 4)
    want = install_packed_forward(tiny_policy())(**row, temperature=0.9)
    model = install_packed_forward(tiny_policy(dtype=torch.bfloat16), backend).to("cuda")
    got = model(**{name: value.cuda() for name, value in row.items()}, temperature=0.9)
    got.logprobs.sum().backward()
    assert (got.logprobs.double().cpu() - want.logprobs).abs().max() < 0.25
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
