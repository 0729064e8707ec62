"""The SDPA back end where a bucket's mask or scores would be large."""

import pytest
import torch

from asyncgrpo_core.models.attention import packed_attention_forward
from asyncgrpo_core.models.attention_backends import sdpa
from asyncgrpo_core.models.row_plan import RowPlan
from tests.unit.test_models_attention import _Layer, dense_reference, row, visible_by_definition


@pytest.mark.parametrize("elements", [7, 100])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, None), (None, 1.5), (4, 1.5)])
@pytest.mark.parametrize("name", ["ragged", "group", "two_groups_under_a_system_prompt", "longer_than_a_flex_block"])
def test_masks_and_scores_that_would_be_large_are_made_part_by_part(name, window, softcap, elements, monkeypatch):
    if name == "longer_than_a_flex_block":
        elements *= 100
    q, k, v, plan = row(name)
    monkeypatch.setattr(sdpa, "_DENSE_ELEMENTS", elements)
    made = []
    additive, capped = sdpa.additive, sdpa.capped
    monkeypatch.setattr(sdpa, "additive", lambda seen, dtype: made.append(seen.numel()) or additive(seen, dtype))
    monkeypatch.setattr(
        sdpa, "capped", lambda *qkv_seen, **kw: made.append(4 * qkv_seen[3].numel()) or capped(*qkv_seen, **kw)
    )
    out, _ = packed_attention_forward(
        _Layer(), q, k, v, None, scaling=0.3, sliding_window=window, softcap=softcap, packed_attention=plan
    )
    want = dense_reference(q, k, v, visible_by_definition(name, window), 0.3, softcap)
    torch.testing.assert_close(out, want, rtol=1e-11, atol=1e-11)
    g = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    for a, b in zip(torch.autograd.grad(out, (q, k, v), g), torch.autograd.grad(want, (q, k, v), g), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    one_query = (4 if softcap else 1) * max(b.key_index.shape[1] for b in plan.buckets()[0])
    plain = plan.roots_only and window is None and softcap is None  # a fused kernel: neither mask nor scores
    assert bool(made) != plain and max(made, default=0) <= max(elements, one_query)
    assert not any(b.masks for b in plan.buckets()[0] if b.query_index.shape[1] * b.key_index.shape[1] > elements)


def test_a_padding_query_sees_a_key_too():
    """In one bucket, a short segment that starts late: its last padding query is beyond the window of all keys."""
    lengths, parents = [1, 100, 21, 80], [-1, 0, -1, 2]
    plan = RowPlan.from_segments(torch.tensor([0, *lengths]).cumsum(0), torch.tensor(parents))
    buckets, _ = plan.buckets()
    assert any(len(bucket.starts) == 2 for bucket in buckets)
    assert all(bucket.visible(window).any(-1).all() for bucket in buckets for window in (None, 1, 8))
