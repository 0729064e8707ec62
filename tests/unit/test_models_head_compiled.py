"""The compiled head's functions on a CPU, compiled without code generation (dynamo's graphs, run as they are)."""

import functools

import pytest
import torch

from asyncgrpo_core.models import head_chunks
from asyncgrpo_core.models.head import LogitTransform


@pytest.fixture
def without_code_generation(monkeypatch):
    monkeypatch.setattr(head_chunks.torch, "compile", functools.partial(torch.compile, backend="eager"))
    head_chunks._compiled.cache_clear()
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=8):  # its own default
        yield
    head_chunks._compiled.cache_clear()
    torch._dynamo.reset()


def test_more_temperatures_and_dtypes_than_dynamo_keeps_by_itself(without_code_generation):
    """In torch 2.11 all share one limit, beyond which a function that is compiled as a whole raises (seen there)."""
    generator = torch.Generator().manual_seed(0)
    for i in range(12):
        transform = LogitTransform(0.5 + 0.1 * i, softcap=None if i % 2 else 3.0)
        statistics, gradient_ = head_chunks._compiled(transform)
        plain_statistics, plain_gradient_ = head_chunks.fused_functions(transform)
        for dtype in (torch.bfloat16, torch.float32):
            raw = torch.randn(5 + i, 64, generator=generator).to(dtype)
            log_z, entropy = statistics(raw)
            want_log_z, want_entropy = plain_statistics(raw)
            assert torch.equal(log_z, want_log_z) and torch.equal(entropy, want_entropy)
            total = torch.randn(5 + i, generator=generator)
            mine, other = raw.clone(), raw.clone()
            gradient_(mine, log_z, total)
            plain_gradient_(other, log_z, total)
            assert torch.equal(mine, other)
    assert torch._dynamo.config.recompile_limit >= 2 * 12
