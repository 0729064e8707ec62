"""The chunked head against a dense float64 softmax."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from asyncgrpo_core.models.head import LogitTransform, chunked_log_probs
from asyncgrpo_core.models.head_chunks import EagerChunks, FusedChunks, HeadCall

TRANSFORMS = {
    "plain": LogitTransform(),
    "temperature": LogitTransform(temperature=0.7),
    "scale": LogitTransform(temperature=1.3, scale=0.4),
    "softcap": LogitTransform(temperature=0.9, scale=1.5, softcap=2.0),
}


def case(n=7, d=5, v=11, k=3, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, d, generator=g, dtype=torch.float64).to(dtype)
    weight = torch.randn(v, d, generator=g, dtype=torch.float64).to(dtype)
    bias = torch.randn(v, generator=g, dtype=torch.float64).to(dtype)
    target = torch.randint(0, v, (n,), generator=g)
    top = torch.randint(0, v, (n, k), generator=g)
    if n and k:
        top[0, -1] = top[n // 2, 0] = -1
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), target, top


def dense(hidden, weight, bias, target, top, transform):
    z = (hidden @ weight.T + (0 if bias is None else bias)) * transform.scale
    if transform.softcap is not None:
        z = transform.softcap * torch.tanh(z / transform.softcap)
    logp = (z / transform.temperature).log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    gathered = logp.gather(1, top.clamp_min(0)).masked_fill(top < 0, -torch.inf)
    return logp.gather(1, target[:, None])[:, 0], entropy, gathered


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("chunk_elements", [11, 33, 10_000])
def test_values_equal_the_dense_softmax(name, chunk_elements):
    hidden, weight, bias, target, top = case()
    got = chunked_log_probs(hidden, weight, target, top, TRANSFORMS[name], bias=bias, chunk_elements=chunk_elements)
    for mine, want in zip(got, dense(hidden, weight, bias, target, top, TRANSFORMS[name]), strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("chunk_elements", [22, 10_000])
def test_gradients_equal_autograd_through_the_dense_softmax(name, chunk_elements):
    hidden, weight, bias, target, top = case()
    g = torch.Generator().manual_seed(1)
    a = torch.randn(7, generator=g, dtype=torch.float64)
    b = torch.randn(7, 3, generator=g, dtype=torch.float64)
    inputs = (hidden, weight, bias)

    def total(logprobs, _entropy, gathered):
        return (a * logprobs).sum() + (b * torch.where(top < 0, 0.0, gathered)).sum()

    want = torch.autograd.grad(total(*dense(*inputs, target, top, TRANSFORMS[name])), inputs)
    out = chunked_log_probs(hidden, weight, target, top, TRANSFORMS[name], bias=bias, chunk_elements=chunk_elements)
    for mine, other in zip(torch.autograd.grad(total(*out), inputs), want, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-11, atol=1e-11)


def test_gradcheck_of_the_hand_written_backward():
    hidden, weight, bias, target, top = case(n=3, d=2, v=4, k=2)

    def function(h, w, b):
        logprobs, _, gathered = chunked_log_probs(h, w, target, top, TRANSFORMS["softcap"], bias=b, chunk_elements=8)
        return logprobs, gathered[top >= 0]

    assert torch.autograd.gradcheck(function, (hidden, weight, bias))


def test_padding_ids_give_minus_infinity_and_take_no_gradient():
    hidden, weight, _, target, top = case()
    _, _, gathered = chunked_log_probs(hidden, weight, target, torch.full_like(top, -1), LogitTransform())
    assert torch.isneginf(gathered).all()
    gathered.sum().backward()
    assert hidden.grad is not None and hidden.grad.abs().max() == 0


def test_entropy_of_the_uniform_distribution_is_log_v_and_carries_no_gradient():
    hidden, weight = torch.zeros(2, 3, requires_grad=True), torch.randn(17, 3)
    _, entropy, _ = chunked_log_probs(
        hidden, weight, torch.tensor([0, 5]), torch.empty(2, 0, dtype=torch.int64), LogitTransform()
    )
    assert entropy.tolist() == pytest.approx([math.log(17)] * 2)
    assert not entropy.requires_grad


def test_float32_is_accurate_far_out_in_the_tails():
    """Logits of +-100: the naive exp overflows, the differences must survive."""
    weight = torch.tensor([[100.0], [99.0], [-100.0]])
    logprobs, entropy, top = chunked_log_probs(
        torch.ones(1, 1), weight, torch.tensor([2]), torch.tensor([[0, 1]]), LogitTransform()
    )
    z = math.log1p(math.exp(-1))
    assert logprobs.item() == pytest.approx(-200 - z, abs=2e-5)
    assert top[0].tolist() == pytest.approx([-z, -1 - z], abs=1e-5)  # float32 has 8e-6 at 100
    p = 1 / (1 + math.exp(-1))
    assert entropy.item() == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p), rel=1e-5)


def test_sixteen_bit_weights_give_float32_results_and_gradients_of_their_own_dtype():
    hidden, weight, bias, target, top = case(n=40, d=32, v=50, dtype=torch.bfloat16)
    logprobs, entropy, gathered = chunked_log_probs(hidden, weight, target, top, LogitTransform(), bias=bias)
    assert logprobs.dtype == entropy.dtype == gathered.dtype == torch.float32
    want = dense(hidden.double(), weight.double(), bias.double(), target, top, LogitTransform())
    torch.testing.assert_close(logprobs.double(), want[0], rtol=0, atol=0.15)
    (logprobs.sum() + gathered[top >= 0].sum()).backward()
    assert hidden.grad.dtype == weight.grad.dtype == bias.grad.dtype == torch.bfloat16


def test_autocast_multiplies_in_its_dtype_like_the_models_own_head():
    hidden, weight, _, target, top = case(n=6, d=16, v=20, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logprobs, _, _ = chunked_log_probs(hidden, weight, target, top, LogitTransform())
        logits = torch.nn.functional.linear(hidden, weight)
    assert logits.dtype == torch.bfloat16
    want = logits.float().log_softmax(-1).gather(1, target[:, None])[:, 0]
    torch.testing.assert_close(logprobs, want, rtol=0, atol=1e-6)
    logprobs.sum().backward()
    assert weight.grad.dtype == torch.float32


def test_no_positions_give_empty_results_and_zero_gradients():
    hidden, weight, _, target, top = case(n=0)
    logprobs, entropy, gathered = chunked_log_probs(hidden, weight, target, top, LogitTransform())
    assert logprobs.shape == entropy.shape == (0,) and gathered.shape == (0, 3)
    logprobs.sum().backward()
    assert weight.grad.abs().max() == 0


class _LargestTensor(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out


def test_the_tokens_by_vocabulary_matrix_never_exists():
    n, d, v = 256, 4, 200
    hidden, weight, _, target, top = case(n=n, d=d, v=v)
    with _LargestTensor() as seen:
        logprobs, _, gathered = chunked_log_probs(hidden, weight, target, top, LogitTransform(), chunk_elements=8 * v)
        (logprobs.sum() + gathered[top >= 0].sum()).backward()
    assert seen.largest <= 8 * v
    assert seen.largest < n * v / 10


@pytest.mark.parametrize(
    ("config", "want"),
    [
        ({}, LogitTransform(0.8, 1.0, None)),
        ({"final_logit_softcapping": 30.0}, LogitTransform(0.8, 1.0, 30.0)),
        ({"logits_scaling": 4.0}, LogitTransform(0.8, 0.25, None)),
        ({"logit_scale": 0.0625, "final_logit_softcapping": None}, LogitTransform(0.8, 0.0625, None)),
        ({"lm_head_multiplier": 3.0}, LogitTransform(0.8, 3.0, None)),
    ],
)
def test_what_a_config_does_to_its_logits(config, want):
    assert LogitTransform.from_config(SimpleNamespace(**config), 0.8) == want


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_greedy_sampling_has_no_distribution_to_train_on(temperature):
    with pytest.raises(ValueError, match="temperature must be above 0"):
        LogitTransform.from_config(SimpleNamespace(), temperature)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_the_functions_that_a_gpu_compiles_do_the_same_arithmetic(name):
    """Run uncompiled here; tests/gpu runs them compiled."""
    g = torch.Generator().manual_seed(0)
    raw = torch.randn(6, 17, generator=g) * 3
    ids, grad = torch.randint(0, 17, (6, 4), generator=g), torch.randn(6, 4, generator=g)
    ids[:, 3] = ids[:, 0]  # the sampled token among the top ones
    call = HeadCall(TRANSFORMS[name], torch.float32, 6, False)
    eager, fused = EagerChunks(call), FusedChunks(call, compiled=False)
    results = {chunk: chunk.statistics(raw.clone()) for chunk in (eager, fused)}
    for mine, other in zip(results[fused][:2], results[eager][:2], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    log_z = results[eager][0]
    torch.testing.assert_close(eager.again(raw.clone(), log_z), results[eager][2])
    found = fused.gradient(results[fused][2], log_z, ids, grad)
    torch.testing.assert_close(found, eager.gradient(results[eager][2], log_z, ids, grad), rtol=1e-5, atol=1e-6)


def near_certain(hidden, fused, monkeypatch):
    if fused:
        monkeypatch.setattr(HeadCall, "arithmetic", lambda call: FusedChunks(call, compiled=False))
    weight = torch.tensor([[7.0], [0.0], [-1.0]], dtype=torch.bfloat16)
    return chunked_log_probs(hidden, weight, torch.tensor([0]), torch.tensor([[0, 1]]), LogitTransform())


@pytest.mark.parametrize("fused", [False, True], ids=["eager", "fused"])
def test_a_near_certain_token_keeps_its_gradient_in_sixteen_bits(fused, monkeypatch):
    """1 - p of a token with p = 0.999: rounded apart, p and 1 would leave nothing of it."""
    hidden = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    logprobs, _, top = near_certain(hidden, fused, monkeypatch)
    (logprobs.sum() + 0.5 * top[0, 0]).backward()  # the sampled token is a top token too
    p = torch.tensor([7.0, 0.0, -1.0]).softmax(0)
    want = 1.5 * ((torch.tensor([1.0, 0.0, 0.0]) - p) @ torch.tensor([7.0, 0.0, -1.0]))
    assert hidden.grad.item() == pytest.approx(want.item(), rel=0.01)
