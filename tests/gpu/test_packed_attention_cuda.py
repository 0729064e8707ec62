"""Variable-length FlashAttention on a GPU against the padded back end in float64 on the CPU, forward and backward."""

import pytest
import torch

from asyncgrpo_core.models.attention import RowPlan, choose_backend, packed_attention_forward
from asyncgrpo_core.models.forward import install_packed_forward
from asyncgrpo_core.packing import pack_row
from tests.unit.policy_cases import some_samples, tiny_policy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LENGTHS = [3, 170, 1, 64, 65, 2, 300]


class _Layer(torch.nn.Module):
    num_key_value_groups = 2
    is_causal = True


def attend(device, dtype, window, kv_heads):
    """Output and the gradients of q, k, v for the same numbers everywhere, as float64 on the CPU."""
    g = torch.Generator().manual_seed(0)
    n = sum(LENGTHS)
    qkv = [torch.randn(1, h, n, 64, generator=g).bfloat16() for h in (4, kv_heads, kv_heads)]
    qkv = [x.to(device, dtype).requires_grad_() for x in qkv]
    plan = RowPlan.from_segments(torch.tensor([0, *LENGTHS]).cumsum(0).to(device))
    out, _ = packed_attention_forward(_Layer(), *qkv, None, sliding_window=window, packed_attention=plan)
    upstream = torch.randn(out.shape, generator=g).bfloat16().to(device, dtype)
    return [x.double().cpu() for x in (out, *torch.autograd.grad(out, qkv, upstream))]


@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_cuda_attention_equals_float64_on_the_cpu(dtype, window, kv_heads):
    want = attend("cpu", torch.float64, window, kv_heads)
    got = attend("cuda", dtype, window, kv_heads)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 2e-3
    assert choose_backend(torch.device("cuda"), dtype, softcap=None) == (
        "varlen" if dtype == torch.bfloat16 else "padded"
    )
    for mine, other in zip(got, want, strict=True):
        assert (mine - other).abs().max() <= tolerance * other.abs().max()


def test_a_bf16_row_on_the_gpu_equals_float64_on_the_cpu():
    row = pack_row(some_samples(count=12), 4)
    want = install_packed_forward(tiny_policy())(**row, temperature=0.9)
    model = install_packed_forward(tiny_policy(dtype=torch.bfloat16)).to("cuda")
    got = model(**{name: value.cuda() for name, value in row.items()}, temperature=0.9)
    got.logprobs.sum().backward()
    assert (got.logprobs.double().cpu() - want.logprobs).abs().max() < 0.25
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
