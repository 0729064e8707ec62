"""Attention of trie rows against one dense mask over the whole row, in float64; and who computes it."""

import logging

import pytest
import torch
from torch import nn

from asyncgrpo_core.errors import ConfigError
from asyncgrpo_core.models import attention as attention_module
from asyncgrpo_core.models.attention import choose_backend, packed_attention_forward
from asyncgrpo_core.models.attention_backends import flex, hub
from asyncgrpo_core.models.attention_backends.hub import HubUnavailable
from asyncgrpo_core.models.row_plan import RowPlan
from asyncgrpo_core.models.support import DeviceTraits

# lengths of the segments, and their parents
ROWS = {
    "one": ([9], [-1]),
    "equal": ([6] * 5, [-1] * 5),
    "ragged": ([3, 17, 1, 8, 9, 2, 30, 5, 16, 1], [-1] * 10),
    "singles": ([1, 1, 1], [-1, -1, -1]),
    "group": ([20, 7, 9, 8, 1], [-1, 0, 0, 0, 0]),
    "chain_of_singles": ([1, 1, 1, 2, 1, 1], [-1, 0, 1, 2, 1, 0]),
    "two_groups_under_a_system_prompt": ([5, 12, 7, 8, 3, 6, 6, 1, 4], [-1, 0, 1, 1, 0, 4, 4, 4, -1]),
    "deep": ([2] * 9 + [3], [-1, 0, 1, 2, 3, 4, 5, 6, 7, -1]),
    "longer_than_a_flex_block": ([140, 30, 5, 150, 2, 1, 60], [-1, 0, 1, 0, 3, 3, -1]),
}


class _Layer(nn.Module):
    num_key_value_groups = 2
    is_causal = True


def row(name, heads=4, kv_heads=2, dim=8, seed=0, backend="sdpa"):
    lengths, parents = ROWS[name]
    g = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    shapes = (heads, kv_heads, kv_heads)
    q, k, v = (torch.randn(1, h, n, dim, generator=g, dtype=torch.float64).requires_grad_() for h in shapes)
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return q, k, v, RowPlan.from_segments(offsets, torch.tensor(parents), backend)


def visible_by_definition(name, window=None, rows=ROWS):
    """Token by token: a token sees itself and what precedes it on the path of its segment."""
    lengths, parents = rows[name]
    segment = [s for s, n in enumerate(lengths) for _ in range(n)]
    path_of = []
    for s in range(len(lengths)):
        above = path_of[parents[s]] if parents[s] >= 0 else []
        path_of.append(above + [t for t in range(len(segment)) if segment[t] == s])
    seen = torch.zeros(len(segment), len(segment), dtype=torch.bool)
    for t, s in enumerate(segment):
        path = path_of[s][: path_of[s].index(t) + 1]
        seen[t, path[-window:] if window else path] = True
    return seen


def dense_reference(q, k, v, visible, scale, softcap=None):
    """Every pair of the whole row is scored, and the mask says which of them may see each other."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return (weights @ v).transpose(1, 2)


@pytest.mark.parametrize("backend", ["sdpa", "flex"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4], ids=["mqa", "gqa", "mha"])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, None), (None, 1.5), (4, 1.5), (1000, None)])
@pytest.mark.parametrize("name", ROWS)
def test_f121_f124_every_token_sees_its_path_and_nothing_else(name, window, softcap, kv_heads, backend):
    """`flex` is torch's own dense evaluation of the block mask here, forward only; compiled it runs in tests/gpu."""
    q, k, v, plan = row(name, kv_heads=kv_heads, backend=backend)
    if backend == "flex":
        q, k, v = (x.detach() for x in (q, k, v))
    out, weights = packed_attention_forward(
        _Layer(), q, k, v, None, scaling=0.3, sliding_window=window, softcap=softcap, packed_attention=plan
    )
    want = dense_reference(q, k, v, visible_by_definition(name, window), 0.3, softcap)
    assert weights is None
    torch.testing.assert_close(out, want, rtol=1e-11, atol=1e-11)
    if backend == "flex":
        return
    g = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    mine = torch.autograd.grad(out, (q, k, v), g)
    for a, b in zip(mine, torch.autograd.grad(want, (q, k, v), g), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


class _VarlenByDefinition:
    """A flash kernel's contract in float64: sequence by sequence, causal from the end, grouped heads.

    What they make of a window differs: in flash-attn4 of 2025 -1 is a number like any other and None means no bound;
    aiter raises a ValueError for a right bound.
    """

    def __init__(self):
        self.calls, self.repository = [], ""

    def flash_attn_varlen_func(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
        window_size=None, softcap=0.0,
    ):  # fmt: skip
        assert causal
        left, right = window_size or (-1, -1)
        if "aiter" in self.repository and right != -1:
            raise ValueError("window_size_right is not supported yet in the Triton Backend")
        if "flash-attn4" in self.repository and window_size is not None:
            assert left >= 0, "a window that nothing is in"
        self.calls.append((max_seqlen_q, max_seqlen_k, tuple(k.shape)))
        outputs = []
        for s in range(len(cu_seqlens_q) - 1):
            a, b, c, d = (int(x) for x in (*cu_seqlens_q[s : s + 2], *cu_seqlens_k[s : s + 2]))
            assert b - a <= max_seqlen_q and d - c <= max_seqlen_k
            distance = torch.arange(d - c - (b - a), d - c)[:, None] - torch.arange(d - c)[None]
            visible = (distance >= 0) & ((distance <= left) if left >= 0 else True)
            parts = [x.transpose(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d])]
            outputs.append(dense_reference(*parts, visible, softmax_scale, softcap or None)[0])
        return torch.cat(outputs), None


@pytest.mark.parametrize(
    ("traits", "window", "softcap"),
    [
        (DeviceTraits(rocm=False, major=9), None, None),
        (DeviceTraits(rocm=False, major=9), 3, None),
        (DeviceTraits(rocm=False, major=9), None, 1.5),
        (DeviceTraits(rocm=False, major=10), None, None),
        (DeviceTraits(rocm=False, major=10), 3, None),
        (DeviceTraits(rocm=True, major=9), None, None),
        (DeviceTraits(rocm=True, major=9), 3, None),
    ],
)
@pytest.mark.parametrize("name", ROWS)
def test_f010_f128_hub_kernels_get_the_keys_of_each_path(name, traits, window, softcap, monkeypatch):
    kernel = _VarlenByDefinition()

    def load_kernel(repository):
        kernel.repository = repository
        return kernel

    monkeypatch.setattr(hub, "load_kernel", load_kernel)
    monkeypatch.setattr(attention_module, "current_device_traits", lambda: traits)
    q, k, v, plan = row(name, backend="hub")
    out, _ = packed_attention_forward(
        _Layer(), q, k, v, None, scaling=0.3, sliding_window=window, softcap=softcap, packed_attention=plan
    )
    want = dense_reference(q, k, v, visible_by_definition(name, window), 0.3, softcap)
    torch.testing.assert_close(out, want, rtol=1e-11, atol=1e-11)
    g = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    for a, b in zip(torch.autograd.grad(out, (q, k, v), g), torch.autograd.grad(want, (q, k, v), g), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    gathered = sum(start + length for start, length in zip(plan.starts, plan.lengths, strict=True))
    assert kernel.calls[0][2][0] == gathered


def test_the_default_scale_is_one_over_root_of_the_head_size():
    q, k, v, plan = row("group")
    out, _ = packed_attention_forward(_Layer(), q, k, v, None, packed_attention=plan)
    want = dense_reference(q, k, v, visible_by_definition("group"), 8**-0.5)
    torch.testing.assert_close(out, want, rtol=1e-11, atol=1e-11)


def test_buckets_hold_every_query_once_and_waste_little():
    g = torch.Generator().manual_seed(0)
    lengths = [*torch.randint(20, 41, (128,), generator=g).tolist(), 300]
    lengths += [100, *torch.randint(20, 41, (32,), generator=g).tolist()]
    parents = [-1] * 130 + [129] * 32
    plan = RowPlan.from_segments(torch.tensor([0, *lengths]).cumsum(0), torch.tensor(parents))
    buckets, restore = plan.buckets()
    flat = torch.cat([b.query_index.flatten() for b in buckets])
    assert flat[restore].tolist() == list(range(sum(lengths)))
    assert len(flat) <= 1.3 * sum(lengths)
    assert len(buckets) <= 8
    assert sum(len(b.starts) for b in buckets) == len(lengths)


def test_short_segments_share_a_bucket_whatever_their_ratio():
    plan = RowPlan.from_segments(torch.tensor([0, *range(1, 10)]).cumsum(0))
    assert len(plan.buckets()[0]) == 1


def test_a_root_shares_no_bucket_with_a_continuation_of_its_size():
    """Its causal mask is what kernels have built in."""
    plan = RowPlan.from_segments(torch.tensor([0, 4, 104, 208]), torch.tensor([-1, 0, -1]))
    assert [(bucket.causal, bucket.starts.tolist()) for bucket in plan.buckets()[0]] == [
        (True, [0]), (False, [4]), (True, [0])
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("offsets", "parents", "message"),
    [
        ([0], [], "cu_segments"),
        ([0, 3, 3], [-1, -1], "cu_segments"),
        ([1, 4], [-1], "cu_segments"),
        ([0, 4, 2], [-1, -1], "cu_segments"),
        ([0, 4, 6], [-1], "2 segments have 1 parents"),
        ([0, 4, 6], [-1, 1], "does not come before"),
        ([0, 4], [-2], "does not come before"),
        ([0, 1, 2, 3, 4], [-1, 0, 0, 1], "not depth first"),
    ],
)
def test_segments_that_are_no_trie_are_refused(offsets, parents, message):
    with pytest.raises(ValueError, match=message):
        RowPlan.from_segments(torch.tensor(offsets), torch.tensor(parents, dtype=torch.int64))


@pytest.mark.parametrize("name", ["s_aux", "position_bias"])
def test_attention_that_packed_rows_cannot_give_is_refused(name):
    q, k, v, plan = row("one")
    with pytest.raises(ConfigError, match=name):
        packed_attention_forward(_Layer(), q, k, v, None, packed_attention=plan, **{name: torch.zeros(4)})


HOPPER = DeviceTraits(rocm=False, major=9)


def choose(requested="auto", device="cuda", dtype=torch.bfloat16, softcap=None, head_dims=(128, 128)):
    traits = HOPPER if device == "cuda" else None
    return choose_backend(
        requested, device=torch.device(device), dtype=dtype, softcap=softcap, traits=traits, head_dims=head_dims
    )


@pytest.fixture
def no_hub(monkeypatch):
    def unavailable(repository):
        raise HubUnavailable(f"{repository}: no route to host")

    monkeypatch.setattr(attention_module, "load_kernel", unavailable)
    monkeypatch.setattr(flex, "usable", lambda: True)


@pytest.mark.parametrize(
    ("case", "want"),
    [
        ({}, "flex"),
        ({"dtype": torch.float16}, "flex"),
        ({"softcap": 30.0}, "flex"),
        ({"dtype": torch.float32}, "flex"),
        ({"head_dims": (512, 512)}, "flex"),
        ({"head_dims": (20, 20)}, "flex"),
        ({"head_dims": (192, 128)}, "flex"),
        ({"device": "cpu"}, "sdpa"),
        ({"device": "cpu", "dtype": torch.float64, "softcap": 30.0}, "sdpa"),
    ],
)
def test_auto_follows_device_dtype_and_model_when_the_hub_is_away(no_hub, case, want):
    assert choose(**case).backend == want


def test_a_hub_that_cannot_be_reached_gives_one_warning_that_says_why(no_hub, caplog):
    with caplog.at_level(logging.WARNING):
        assert choose().backend == "flex"
    (record,) = caplog.records
    assert "kernels-community/flash-attn3: no route to host" in record.getMessage()


def test_without_a_compiler_for_flex_attention_auto_takes_what_runs(no_hub, monkeypatch):
    monkeypatch.setattr(flex, "usable", lambda: False)
    assert choose().backend == "varlen"
    assert (
        choose(softcap=30.0).backend
        == choose(dtype=torch.float32).backend
        == choose(head_dims=(512, 512)).backend
        == "sdpa"
    )


@pytest.mark.parametrize("backend", ["varlen", "flex", "hub"])
def test_a_dropout_that_a_back_end_would_leave_out_is_refused(backend):
    q, k, v, plan = row("group", backend=backend)
    with pytest.raises(ConfigError, match="drops out attention weights .*'" + backend):
        packed_attention_forward(_Layer(), q, k, v, None, dropout=0.1, packed_attention=plan)
    out, _ = packed_attention_forward(_Layer(), q, k, v, None, dropout=0.9, packed_attention=row("group")[3])
    assert not torch.allclose(out, dense_reference(q, k, v, visible_by_definition("group"), 8**-0.5))


def test_auto_takes_the_hubs_kernel_where_it_can_be_had(monkeypatch):
    asked = []
    monkeypatch.setattr(attention_module, "load_kernel", asked.append)
    choice = choose()
    assert choice.backend == "hub" and "flash-attn3" in choice.reason and asked == ["kernels-community/flash-attn3"]


def test_the_hub_library_offline_counts_as_unavailable():
    """The real `kernels` package, with HF_HUB_OFFLINE and an empty cache as in every test run."""
    hub.load_kernel.cache_clear()
    with pytest.raises(HubUnavailable, match="kernels-community/flash-attn3"):
        hub.load_kernel("kernels-community/flash-attn3")


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ({"requested": "fast"}, "unknown"),
        ({"requested": "varlen", "device": "cpu"}, "needs a GPU"),
        ({"requested": "hub", "dtype": torch.float32}, "16-bit"),
        ({"requested": "varlen", "head_dims": (512, 512)}, "up to 256"),
        ({"requested": "hub", "head_dims": (20, 20)}, "a multiple of 8"),
        ({"requested": "hub", "head_dims": (192, 128)}, "equal heads"),
        ({"requested": "varlen", "softcap": 30.0}, "cannot cap"),
        ({"requested": "flex", "device": "cpu"}, "compiled for GPUs"),
        ({"requested": "hub"}, "cannot be used: kernels-community/flash-attn3: no route"),
    ],
)
def test_a_back_end_that_does_not_fit_is_refused(no_hub, case, message):
    with pytest.raises(ConfigError, match=message):
        choose(**case)


def test_flex_is_refused_where_nothing_can_be_compiled(monkeypatch):
    """Uncompiled it would make a row's scores dense: a 79,000-token row would ask for hundreds of gigabytes."""
    monkeypatch.setattr(flex, "usable", lambda: False)
    with pytest.raises(ConfigError, match=r"needs torch\.compile"):
        choose("flex")


def test_what_is_asked_for_is_taken(monkeypatch):
    monkeypatch.setattr(flex, "usable", lambda: True)
    assert choose("flex").backend == "flex" and choose("varlen").backend == "varlen"
    assert choose("sdpa").backend == "sdpa" and choose("sdpa", device="cpu").backend == "sdpa"


def test_under_autocast_queries_left_in_float32_are_computed_in_its_dtype():
    """Norms and rotary embeddings leave float32 behind: without the cast a GPU would fall off its flash kernels."""
    q, k, v, plan = row("group")
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = packed_attention_forward(_Layer(), q.float(), k.bfloat16(), v.bfloat16(), None, packed_attention=plan)
    assert out.dtype == torch.bfloat16
