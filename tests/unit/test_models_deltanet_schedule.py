"""What the recurrent layers gather from a trie row, and in which calls: against walking each token's path (F129)."""

import itertools

import numpy as np
import pytest
import torch

from asyncgrpo_core.models import deltanet_schedule
from asyncgrpo_core.models.deltanet import tree_convolution, tree_delta_rule
from asyncgrpo_core.models.deltanet_schedule import conv_patch, recurrence_schedule
from asyncgrpo_core.models.row_plan import RowPlan


def random_plan(seed, segments=14, longest=6):
    """A random forest in depth-first order, many segments of one or two tokens."""
    rng = np.random.default_rng(seed)
    parents, path = [], []
    for s in range(segments):
        del path[rng.integers(0, len(path) + 1) :]
        parents.append(path[-1] if path else -1)
        path.append(s)
    lengths = rng.integers(1, longest + 1, segments)
    cu_segments = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    return RowPlan.from_segments(cu_segments, torch.tensor(parents))


def path_of(plan, segment):
    """Row indices from the root to the end of `segment`."""
    bounds = plan.cu_segments.tolist()
    own = list(range(bounds[segment], bounds[segment + 1]))
    return own if plan.parents[segment] < 0 else path_of(plan, plan.parents[segment]) + own


def along_paths(plan, function, *tensors):
    """`function` on the path of every segment; of each, the segment's own outputs, in row order. [T, ...]"""
    own = []
    for s, length in enumerate(plan.lengths):
        path = torch.tensor(path_of(plan, s))
        own.append(function(*(x[path] for x in tensors))[-length:])
    return torch.cat(own)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kernel_size", [1, 2, 4, 9])
def test_f129_the_convolution_reads_each_tokens_own_predecessors(seed, kernel_size):
    plan, generator = random_plan(seed), torch.Generator().manual_seed(seed)
    x = torch.randn(plan.num_tokens, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(3, kernel_size, dtype=torch.float64, generator=generator)

    def convolve(inputs):  # [B, C, L]
        padded = torch.nn.functional.pad(inputs, (kernel_size - 1, 0))
        return torch.nn.functional.conv1d(padded, weight[:, None], groups=3)

    want = along_paths(plan, lambda path: convolve(path.t()[None])[0].t(), x)
    got = tree_convolution(convolve, x.t()[None], plan, kernel_size)[0].t()
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    scale = torch.randn(want.shape, dtype=torch.float64, generator=generator)
    grads = [torch.autograd.grad((out * scale).sum(), x, retain_graph=True)[0] for out in (got, want)]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


def decayed_sum(q, k, v, g, beta, initial_state=None, output_final_state=False, cu_seqlens=None):
    """A stand-in for the delta rule: out_t = state_t = exp(g_t) state_(t-1) + beta_t v_t, state [B, 1, 1]."""
    if cu_seqlens is not None:
        assert len(v) == 1 and (initial_state is None or len(initial_state) == len(cu_seqlens) - 1)
        parts = [
            decayed_sum(
                *(x[:, a:b] for x in (q, k, v, g, beta)), None if initial_state is None else initial_state[i : i + 1]
            )
            for i, (a, b) in enumerate(itertools.pairwise(cu_seqlens.tolist()))
        ]
        return torch.cat([out for out, _ in parts], 1), torch.cat([state for _, state in parts])
    state = torch.zeros_like(v[:, 0]) if initial_state is None else initial_state
    outputs = []
    for t in range(v.shape[1]):
        state = g[:, t].exp()[..., None] * state + beta[:, t][..., None] * v[:, t]
        outputs.append(state)
    return torch.stack(outputs, 1), state


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_f129_every_segment_starts_from_its_parents_final_state(seed, varlen, split, monkeypatch):
    if split:  # calls cost nothing: every length gets its own
        for name in ("_CHUNK", "_CALL_COST", "_ITERATION_COST"):
            monkeypatch.setattr(deltanet_schedule, name, int(name == "_CHUNK"))
    plan = random_plan(seed)
    torch.manual_seed(seed)
    tokens = plan.num_tokens
    q, k, v = (torch.randn(1, tokens, 1, 1, dtype=torch.float64, requires_grad=True) for _ in range(3))
    g, beta = (torch.rand(1, tokens, 1, dtype=torch.float64).sub(1).requires_grad_() for _ in range(2))

    def of_path(*path):
        return decayed_sum(*(x[None] for x in path))[0][0]

    want = along_paths(plan, of_path, *(x[0] for x in (q, k, v, g, beta)))
    got = tree_delta_rule(decayed_sum, (q, k, v, g, beta), plan, varlen=varlen, own_chunks=False)[0]
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    inputs = (v, g, beta)
    grads = [torch.autograd.grad((out * torch.arange(tokens)[:, None, None]).sum(), inputs) for out in (got, want)]
    for mine, other in zip(*grads, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-11, atol=1e-11)


def flat_plan(lengths, parents=None):
    cu_segments = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    return RowPlan.from_segments(cu_segments, None if parents is None else torch.tensor(parents))


def test_f129_a_plain_row_of_one_sample_gathers_nothing():
    plan = flat_plan([50])
    [[call]] = recurrence_schedule(plan, padded=True).depths
    assert conv_patch(plan, 4) is None and recurrence_schedule(plan, padded=True).restore is None
    assert (call.index, call.padding, call.initial, call.keep) == (None, None, None, None)


def test_f129_a_child_right_after_its_parent_needs_no_convolution_patch():
    patch = conv_patch(flat_plan([5, 4, 4], [-1, 0, 0]), 4)
    assert patch.num_windows == 1 and patch.positions.tolist() == [9, 10, 11]


def test_f129_segments_of_similar_length_are_one_call_and_a_long_one_among_short_ones_is_apart():
    group = flat_plan([2004, *[480 - 9 * i for i in range(8)]], [-1] + [0] * 8)
    assert [len(calls) for calls in recurrence_schedule(group, padded=True).depths] == [1, 1]
    uneven = recurrence_schedule(flat_plan([10_000] + [3] * 60), padded=True)
    assert [[(c.num_segments, c.length) for c in calls] for calls in uneven.depths] == [[(1, 10_000), (60, 3)]]
    assert recurrence_schedule(flat_plan([10_000] + [3] * 60), padded=False).num_calls == 1


@pytest.mark.parametrize("seed", range(5))
def test_f129_the_split_is_the_cheapest_of_all(seed):
    lengths = np.random.default_rng(seed).integers(1, 2500, 7).tolist()
    chunk, call, iteration = deltanet_schedule._CHUNK, deltanet_schedule._CALL_COST, deltanet_schedule._ITERATION_COST

    def cost(calls):
        return sum(call + max(-(-lengths[s] // chunk) for s in c) * (iteration + len(c)) for c in calls)

    chosen = deltanet_schedule._split(range(7), lengths)
    assert sorted(s for c in chosen for s in c) == list(range(7))
    assert cost(chosen) == min(cost(p) for p in partitions(list(range(7))))


def partitions(items):
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        yield [[items[0]], *rest]
        for i in range(len(rest)):
            yield [*rest[:i], [items[0], *rest[i]], *rest[i + 1 :]]
