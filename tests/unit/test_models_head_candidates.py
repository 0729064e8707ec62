"""F133: the head over candidate sets, against a dense float64 softmax with everything outside the set at -inf."""

import math

import pytest
import torch

from asyncgrpo_core.models import head_candidates
from asyncgrpo_core.models.head import LogitTransform, chunked_log_probs
from tests.unit.test_models_head import TRANSFORMS, _LargestTensor

N, D, V, K = 9, 5, 13, 3


def recorded(seed=0, n=N, v=V, free=(), dtype=torch.float64):
    """Hidden states, head, and for each of n tokens a set with the sampled token and up to K of its top tokens.

    Tokens in `free` were drawn from the whole vocabulary.
    """
    g = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((n, D), (v, D), (v,))]
    sizes = torch.randint(1, v + 1, (n,), generator=g).tolist()
    sizes[0], sizes[-1] = 1, v
    sets = [sorted(torch.randperm(v, generator=g)[:size].tolist()) for size in sizes]
    for t in free:
        sets[t] = []
    target, top = torch.empty(n, dtype=torch.int64), torch.full((n, K), -1)
    for t, ids in enumerate(sets):
        ids = ids or list(range(v))
        drawn = [ids[i] for i in torch.randperm(len(ids), generator=g).tolist()]
        target[t] = drawn[0]
        some = drawn[:K] if t % 2 else drawn[1 : K + 1]  # the sampled token among the top ones, and not
        top[t, : len(some)] = torch.tensor(some, dtype=torch.int64)
    return [x.to(dtype).requires_grad_() for x in inputs], target, top, sets


def flat(sets):
    offsets = torch.tensor([0, *(len(s) for s in sets)]).cumsum(0)
    return torch.tensor([v for s in sets for v in s], dtype=torch.int64), offsets


def by_hand(inputs, target, top, sets, transform):
    """The formulas, one token at a time."""
    hidden, weight, bias = inputs
    z = (hidden @ weight.T + bias) * transform.scale
    if transform.softcap is not None:
        z = transform.softcap * torch.tanh(z / transform.softcap)
    z = z / transform.temperature
    logprobs, tops = [], []
    for t, ids in enumerate(sets):
        log_z = torch.logsumexp(z[t, ids] if ids else z[t], dim=-1)
        logprobs.append(z[t, target[t]] - log_z)
        inside = [v >= 0 and (not ids or v in ids) for v in top[t].tolist()]
        row = [z[t, v] - log_z if ok else z.new_tensor(-torch.inf) for v, ok in zip(top[t], inside, strict=True)]
        tops.append(torch.stack(row))
    full = z.log_softmax(-1)
    return torch.stack(logprobs), -(full.exp() * full).sum(-1), torch.stack(tops)


def total(logprobs, _entropy, top, seed=1):
    """A scalar with different coefficients everywhere; -inf entries count as nothing."""
    g = torch.Generator().manual_seed(seed)
    a = torch.randn(logprobs.shape, generator=g, dtype=torch.float64)
    b = torch.randn(top.shape, generator=g, dtype=torch.float64)
    return (a * logprobs).sum() + (b * torch.where(top.isneginf(), 0.0, top)).sum()


@pytest.fixture(params=["ragged", "dense"])
def products(request, monkeypatch):
    """Both ways of multiplying, whatever the sizes of the sets."""
    share = math.inf if request.param == "ragged" else 0.0
    monkeypatch.setattr(head_candidates, "_DENSE_SHARE", {"cpu": share})
    return request.param


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("chunk_elements", [V, 2 * V, 10_000])
@pytest.mark.parametrize("free", [(), (2, 3, 7)], ids=["all_sets", "some_free"])
def test_f133_values_and_gradients_equal_the_formulas(products, name, chunk_elements, free):
    inputs, target, top, sets = recorded(free=free)
    hidden, weight, bias = inputs
    got = chunked_log_probs(
        hidden,
        weight,
        target,
        top,
        TRANSFORMS[name],
        bias=bias,
        candidates=flat(sets),
        chunk_elements=chunk_elements,
    )
    want = by_hand(inputs, target, top, sets, TRANSFORMS[name])
    for mine, other in zip(got, want, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
    assert not got[1].requires_grad
    mine, other = (torch.autograd.grad(total(*out), inputs) for out in (got, want))
    for a, b in zip(mine, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_f133_finite_differences(products):
    (hidden, weight, bias), target, top, sets = recorded(seed=3, n=4, v=6)

    def function(h, w, b):
        logprobs, _, gathered = chunked_log_probs(
            h, w, target, top, TRANSFORMS["softcap"], bias=b, candidates=flat(sets), chunk_elements=12
        )
        return logprobs, gathered[top >= 0]

    assert torch.autograd.gradcheck(function, (hidden, weight, bias))


def test_f133_a_set_of_one_token_is_certain_and_moves_nothing(products):
    (hidden, weight, _), target, top, _ = recorded()
    sets = [[int(y)] for y in target]
    top = target[:, None].repeat(1, 2)
    logprobs, entropy, gathered = chunked_log_probs(
        hidden, weight, target, top, LogitTransform(0.7), candidates=flat(sets)
    )
    assert logprobs.tolist() == [0.0] * N and gathered.abs().max() == 0
    assert entropy.min() > 0  # of the whole vocabulary
    (logprobs.sum() + gathered[:, 0].sum()).backward()
    assert hidden.grad.abs().max() == weight.grad.abs().max() == 0


def test_a_token_outside_its_set_has_probability_zero_and_no_gradient(products):
    (hidden, weight, _), _, _, _ = recorded()
    sets = [[1, 2]] * N
    target, top = torch.full((N,), 5), torch.tensor([[0, 1]] * N)
    logprobs, _, gathered = chunked_log_probs(hidden, weight, target, top, LogitTransform(), candidates=flat(sets))
    assert logprobs.isneginf().all() and gathered[:, 0].isneginf().all() and gathered[:, 1].isfinite().all()
    (logprobs.sum() + gathered[:, 0].sum()).backward()
    assert hidden.grad.abs().max() == weight.grad.abs().max() == 0


def test_the_whole_vocabulary_as_a_set_is_the_ordinary_head():
    (hidden, weight, bias), target, top, _ = recorded(seed=5)
    plain = chunked_log_probs(hidden, weight, target, top, TRANSFORMS["scale"], bias=bias)
    sets = chunked_log_probs(
        hidden, weight, target, top, TRANSFORMS["scale"], bias=bias, candidates=flat([list(range(V))] * N)
    )
    for a, b in zip(plain, sets, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_sixteen_bit_weights(products):
    (hidden, weight, bias), target, top, sets = recorded(seed=7, dtype=torch.bfloat16)
    got = chunked_log_probs(hidden, weight, target, top, LogitTransform(), bias=bias, candidates=flat(sets))
    assert got[0].dtype == got[2].dtype == torch.float32
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    want = by_hand(exact, target, top, sets, LogitTransform())
    torch.testing.assert_close(got[0].double(), want[0], rtol=0, atol=0.1)
    mine = torch.autograd.grad(total(*(x.double() for x in got)), (hidden, weight, bias))
    for a, b in zip(mine, torch.autograd.grad(total(*want), exact), strict=True):
        assert a.dtype == torch.bfloat16
        torch.testing.assert_close(a.double(), b, rtol=0.1, atol=0.1)


def test_a_second_backward_pass_over_the_same_graph_gives_the_same_gradient():
    for candidates in (None, True):
        (hidden, weight, _), target, top, sets = recorded()
        out = chunked_log_probs(
            hidden, weight, target, top, LogitTransform(), candidates=flat(sets) if candidates else None
        )
        loss = total(*out)
        first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
        again = torch.autograd.grad(loss, (hidden, weight))
        for a, b in zip(first, again, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_memory_is_one_chunk_and_the_sets():
    n, v, chunk = 256, 200, 8
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, 4, generator=g, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(v, 4, generator=g, dtype=torch.float64, requires_grad=True)
    sets = [[t % v, *sorted(range((t % v) + 1, min((t % v) + 4, v)))] for t in range(n)]
    target = torch.tensor([s[0] for s in sets])
    with _LargestTensor() as seen:
        logprobs, _, _ = chunked_log_probs(
            hidden,
            weight,
            target,
            target[:, None],
            LogitTransform(),
            candidates=flat(sets),
            chunk_elements=chunk * v,
        )
        logprobs.sum().backward()
    assert seen.largest <= chunk * v
