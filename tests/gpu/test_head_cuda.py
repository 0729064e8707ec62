"""The chunked head on a GPU, compiled and not, with and without candidate sets, against float64 on the CPU."""

import pytest
import torch

from asyncgrpo_core.models.head import LogitTransform, chunked_log_probs
from asyncgrpo_core.models.head_chunks import add_product, can_fuse
from tests.unit.test_models_head_candidates import flat

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

N, D, V, K = 300, 64, 1000, 4
TRANSFORMS = [LogitTransform(0.9), LogitTransform(0.9, scale=1.5, softcap=2.0)]


def scored(device, dtype, transform, sets, **settings):
    """Outputs, and the gradients of hidden states and weight, of the same numbers everywhere; float64 on the CPU."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=g).bfloat16() for shape in ((N, D), (V, D)))
    weight = weight / 8
    ids = [sorted(torch.randperm(V, generator=g)[: K + t % 7 * 9].tolist()) for t in range(N)]
    top = torch.tensor([row[:K] for row in ids])
    coefficients = torch.randn(N, 1 + K, generator=g)
    inputs = [x.to(device, dtype).requires_grad_() for x in (hidden, weight)]
    candidates = tuple(x.to(device) for x in flat(ids)) if sets else None
    out = chunked_log_probs(*inputs, top[:, 0].to(device), top.to(device), transform, candidates=candidates, **settings)
    a = coefficients.to(device)
    loss = (a[:, 0] * out[0]).sum() + (a[:, 1:] * out[2]).sum()
    return [x.detach().double().cpu() for x in (*out, *torch.autograd.grad(loss, inputs))]


@pytest.mark.parametrize("sets", [False, True], ids=["vocabulary", "sets"])
@pytest.mark.parametrize("transform", TRANSFORMS, ids=["plain", "softcap"])
@pytest.mark.parametrize("fused", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_f133_a_gpu_agrees_with_float64_on_the_cpu(dtype, fused, transform, sets):
    want = scored("cpu", torch.float64, transform, sets)
    got = scored("cuda", dtype, transform, sets, fused=fused, chunk_elements=128 * V)
    outputs, gradients = (0.03, 0.02) if dtype == torch.bfloat16 else (2e-3, 2e-3)  # float32 may run as tf32
    for mine, other, limit in zip(got, want, (outputs,) * 3 + (gradients,) * 2, strict=True):
        assert (mine - other).abs().max() <= limit * other.abs().max()


def test_the_weights_gradient_is_added_up_in_float32():
    """Many 16-bit products into one float32 sum, in place: none of them is rounded on the way."""
    g = torch.Generator().manual_seed(0)
    low, hidden = (torch.randn(64, n, generator=g).bfloat16().cuda() for n in (40, 24))
    total = torch.zeros(40, 24, device="cuda")
    place = total.data_ptr()
    for _ in range(50):
        add_product(total, low, hidden)
    want = 50 * (low.double().T @ hidden.double())
    assert total.data_ptr() == place
    assert (total - want).abs().max() <= 1e-5 * want.abs().max()


def test_torch_compile_works_here():
    assert can_fuse("cuda", torch.bfloat16)


def test_a_row_of_many_tokens_takes_the_memory_of_a_chunk():
    n, v = 8192, 50_000
    hidden = torch.randn(n, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(v, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, v, (n,), device="cuda")

    def one_pass():
        logprobs, _, _ = chunked_log_probs(hidden, weight, target, target[:, None], LogitTransform())
        logprobs.sum().backward()

    one_pass()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    one_pass()
    assert torch.cuda.max_memory_allocated() - before < n * v * 2 / 2  # half of the logits in 16 bits
