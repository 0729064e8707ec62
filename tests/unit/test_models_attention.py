"""Packed attention against one dense block-diagonal mask, in float64."""

import pytest
import torch
from torch import nn

from asyncgrpo_core.errors import ConfigError
from asyncgrpo_core.models.attention import AttentionPlan, choose_backend, packed_attention_forward

LENGTHS = {
    "one": [9],
    "equal": [6] * 5,
    "ragged": [3, 17, 1, 8, 9, 2, 30, 5, 16, 1],
    "singles": [1, 1, 1],
}


class _Layer(nn.Module):
    num_key_value_groups = 2
    is_causal = True


def row(lengths, heads=4, kv_heads=2, dim=8, seed=0):
    g = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    shapes = (heads, kv_heads, kv_heads)
    q, k, v = (torch.randn(1, h, n, dim, generator=g, dtype=torch.float64).requires_grad_() for h in shapes)
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return q, k, v, AttentionPlan.from_cu_seqlens(offsets)


def dense_reference(q, k, v, lengths, scale, window=None, softcap=None):
    """Every pair of the whole row is scored, and the mask says which of them may see each other."""
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    position = torch.arange(sum(lengths))
    visible = (segment[:, None] == segment[None]) & (position[:, None] >= position[None])
    if window is not None:
        visible &= position[:, None] - position[None] < window
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return (weights @ v).transpose(1, 2)


@pytest.mark.parametrize("kv_heads", [1, 2, 4], ids=["mqa", "gqa", "mha"])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, None), (None, 1.5), (4, 1.5), (100, None)])
@pytest.mark.parametrize("name", LENGTHS)
def test_every_segment_sees_itself_and_nothing_else(name, window, softcap, kv_heads):
    lengths = LENGTHS[name]
    q, k, v, plan = row(lengths, kv_heads=kv_heads)
    out, weights = packed_attention_forward(
        _Layer(), q, k, v, None, scaling=0.3, sliding_window=window, softcap=softcap, packed_attention=plan
    )
    want = dense_reference(q, k, v, lengths, 0.3, window, softcap)
    assert weights is None
    torch.testing.assert_close(out, want, rtol=1e-11, atol=1e-11)
    g = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    mine = torch.autograd.grad(out, (q, k, v), g)
    for a, b in zip(mine, torch.autograd.grad(want, (q, k, v), g), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_the_default_scale_is_one_over_root_of_the_head_size():
    q, k, v, plan = row([4, 3])
    out, _ = packed_attention_forward(_Layer(), q, k, v, None, packed_attention=plan)
    torch.testing.assert_close(out, dense_reference(q, k, v, [4, 3], 8**-0.5), rtol=1e-11, atol=1e-11)


def test_buckets_hold_every_token_once_and_waste_little():
    g = torch.Generator().manual_seed(0)
    lengths = [*torch.randint(20, 41, (128,), generator=g).tolist(), 300]
    plan = AttentionPlan.from_cu_seqlens(torch.tensor([0, *lengths]).cumsum(0))
    buckets, restore = plan.padded()
    flat = torch.cat([b.index for b in buckets])
    assert flat[restore].tolist() == list(range(sum(lengths)))
    assert len(flat) <= 1.3 * sum(lengths)
    assert len(buckets) <= 4
    assert sum(b.num_segments for b in buckets) == len(lengths)


@pytest.mark.parametrize("offsets", [[0], [0, 3, 3], [1, 4], [0, 4, 2]])
def test_offsets_that_are_no_segments_are_refused(offsets):
    with pytest.raises(ValueError, match="cu_seqlens"):
        AttentionPlan.from_cu_seqlens(torch.tensor(offsets))


@pytest.mark.parametrize("name", ["s_aux", "position_bias"])
def test_attention_that_packed_rows_cannot_give_is_refused(name):
    q, k, v, plan = row([3])
    with pytest.raises(ConfigError, match=name):
        packed_attention_forward(_Layer(), q, k, v, None, packed_attention=plan, **{name: torch.zeros(4)})


@pytest.mark.parametrize(
    ("device", "dtype", "softcap", "want"),
    [
        ("cuda", torch.bfloat16, None, "varlen"),
        ("cuda", torch.float16, None, "varlen"),
        ("cuda", torch.float32, None, "padded"),
        ("cuda", torch.bfloat16, 30.0, "padded"),
        ("cpu", torch.bfloat16, None, "padded"),
    ],
)
def test_the_back_end_follows_device_and_dtype(device, dtype, softcap, want):
    assert choose_backend(torch.device(device), dtype, softcap=softcap) == want
