"""Off-policy losses against independent oracles: identities, enumeration, finite differences, order and packing."""

import itertools
import math

import numpy as np
import pytest
import torch

from asyncgrpo_core.models.forward import PolicyOutput
from asyncgrpo_core.training.loss import LossSettings, async_grpo_loss
from asyncgrpo_core.training.offpolicy import OFF_POLICY_LOSSES, TrainedTokens, dr_grpo_normalizer, num_trained_samples

ALL = sorted(OFF_POLICY_LOSSES)
EVERY = pytest.mark.parametrize("loss_type", ALL)
# Bounds at which every choice has kept, masked, clipped and truncated tokens among `tokens()` (asserted below).
BOUNDS = {
    "tis": {"importance_ratio_cap": 1.4},
    "cispo": {"epsilon": 0.2, "epsilon_high": 0.4},
    "sequence_mask": {"clip_min": 0.4, "clip_max": 4.0},
    "geometric_mask": {"clip_min": 0.8, "clip_max": 1.3, "importance_ratio_cap": 1.4},
    "gspo": {"epsilon": 0.05, "epsilon_high": 0.07, "clip_min": 0.7, "clip_max": 1.4},
    "decoupled_ppo": {"clip_min": 0.6, "clip_max": 1.8},
}
CLIPPED = LossSettings(score_centering=False)


def chosen(loss_type, **kwargs):
    return LossSettings(score_centering=False, loss_type=loss_type, **kwargs)


def tokens(seed=0, samples=12, spread=0.5, gap=True):
    """Random tokens of samples of different lengths, one of them without trained tokens; logp is a leaf."""
    g = torch.Generator().manual_seed(seed)
    lengths = [1 + i % 5 for i in range(samples)]
    labels = [i + (gap and i >= 3) for i in range(samples)]  # index 3 has no trained token
    index = torch.repeat_interleave(torch.tensor(labels), torch.tensor(lengths))
    n = len(index)
    logq = -0.1 - 2 * torch.rand(n, generator=g, dtype=torch.float64)
    drift = torch.randn(samples, generator=g, dtype=torch.float64)[index - (index > 3).long() * gap] * 0.3
    logp = (logq + drift + spread * torch.randn(n, generator=g, dtype=torch.float64)).requires_grad_()
    advantages = torch.randn(samples + 1, generator=g, dtype=torch.float64)[index]
    return TrainedTokens(logp, logq, advantages, index)


def loss_of(t, settings, normalizer=None):
    batch = {"sampler_logprobs": t.sampler_logprobs, "advantages": t.advantages, "sample_index": t.sample_index}
    policy = PolicyOutput(t.logprobs, torch.zeros(len(t.logprobs)), None)
    return async_grpo_loss(policy, batch, settings, normalizer or len(t.logprobs))


def gradient(t, settings, normalizer=None):
    return torch.autograd.grad(loss_of(t, settings, normalizer)[0], t.logprobs)[0]


# -- identities


@EVERY
def test_on_policy_every_choice_is_the_plain_policy_gradient(loss_type):
    t = tokens()
    t = t._replace(sampler_logprobs=t.logprobs.detach().clone())
    torch.testing.assert_close(gradient(t, chosen(loss_type)), -t.advantages / len(t.advantages), rtol=1e-12, atol=0)


def test_tis_without_cap_is_importance_sampling():
    t = tokens()
    expected = torch.autograd.grad((-t.advantages * t.log_ratio.exp()).sum(), t.logprobs)[0]
    for cap in (None, math.inf, 1e9):
        torch.testing.assert_close(gradient(t, chosen("tis", importance_ratio_cap=cap), 1), expected)


@pytest.mark.parametrize("seed", range(3))
def test_gspo_of_samples_of_one_token_is_the_clipped_surrogate(seed):
    t = tokens(seed, spread=1.0)
    t = t._replace(sample_index=torch.arange(len(t.logprobs)))
    settings = chosen("gspo", epsilon_high=0.3)
    plain = LossSettings(score_centering=False, epsilon_high=0.3)
    assert loss_of(t, settings)[0].item() == pytest.approx(loss_of(t, plain)[0].item(), rel=1e-12)
    torch.testing.assert_close(gradient(t, settings), gradient(t, plain), rtol=1e-12, atol=0)
    a, b = dict(loss_of(t, settings)[1].means), dict(loss_of(t, plain)[1].means)
    assert {name: v.tolist() for name, v in a.items() if name in b} == {name: v.tolist() for name, v in b.items()}


def test_cispo_is_the_clipped_weight_times_the_score():
    t = tokens()
    weight = t.log_ratio.detach().exp().clamp(0.8, 1.4)
    want = -t.advantages * weight
    torch.testing.assert_close(gradient(t, chosen("cispo", epsilon_high=0.4), 1), want, rtol=1e-12, atol=0)


def test_masks_of_samples_of_one_token_are_token_masks():
    t = tokens(1)
    t = t._replace(sample_index=torch.arange(len(t.logprobs)))
    ratio = t.log_ratio.detach().exp()
    masked = torch.where((ratio >= 0.6) & (ratio <= 1.8), ratio, 0.0)
    bounds = {"clip_min": 0.6, "clip_max": 1.8}
    for settings in (
        chosen("sequence_mask", **bounds),
        chosen("geometric_mask", importance_ratio_cap=None, **bounds),
        chosen("decoupled_ppo", **bounds),
    ):
        torch.testing.assert_close(gradient(t, settings, 1), -t.advantages * masked, rtol=1e-12, atol=1e-15)


# -- enumeration: the unbiased ones are unbiased

V = 3


def test_the_sequence_weight_without_bounds_gives_the_exact_policy_gradient():
    """Sequences of two tokens, every one of the nine weighed by the sampler's probability."""
    g = torch.Generator().manual_seed(4)
    logits = torch.randn(1 + V, V, generator=g, dtype=torch.float64).requires_grad_()  # first token, second given first
    behind = (logits.detach() + torch.randn(1 + V, V, generator=g, dtype=torch.float64)).log_softmax(-1)
    reward = torch.randn(V, V, generator=g, dtype=torch.float64)
    logp = logits.log_softmax(-1)
    value = sum((logp[0, a] + logp[1 + a, b]).exp() * reward[a, b] for a, b in itertools.product(range(V), repeat=2))
    (exact,) = torch.autograd.grad(-value, logits)

    def expected(settings):
        total = 0
        for a, b in itertools.product(range(V), repeat=2):
            p = logits.log_softmax(-1)
            q = torch.stack([behind[0, a], behind[1 + a, b]])
            t = TrainedTokens(
                torch.stack([p[0, a], p[1 + a, b]]), q, reward[a, b].repeat(2), torch.zeros(2, dtype=torch.int64)
            )
            total = total + q.sum().exp() * torch.autograd.grad(loss_of(t, settings, 1)[0], logits)[0]
        return total

    unbounded = chosen("sequence_mask", clip_min=0.0, clip_max=math.inf)
    torch.testing.assert_close(expected(unbounded), exact, rtol=1e-10, atol=1e-12)
    per_token = expected(chosen("tis", importance_ratio_cap=None))
    assert (per_token - exact).abs().max() > 1e-3  # token weights ignore how the prefix came about


# -- finite differences of a small softmax model


class Softmax:
    """log p_y of N contexts under p = softmax(x W), float64; what is frozen at W0 is computed with numpy, by sample."""

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        self.index = np.repeat(np.arange(10), 1 + np.arange(10) % 4)
        n = len(self.index)
        self.x, self.w = rng.normal(size=(n, 4)), rng.normal(size=(4, 5)) * 0.7
        self.y = rng.integers(0, 5, n)
        self.advantages = rng.normal(size=10)[self.index]
        self.logq = self.logp(self.w) + rng.normal(size=n) * 0.4 + rng.normal(size=10)[self.index] * 0.3

    def logp(self, w):
        z = self.x @ w
        z = z - z.max(axis=1, keepdims=True)
        return (z - np.log(np.exp(z).sum(axis=1, keepdims=True)))[np.arange(len(self.y)), self.y]

    def by_torch(self, settings):
        w = torch.tensor(self.w, requires_grad=True)
        logp = (torch.tensor(self.x) @ w).log_softmax(-1).gather(1, torch.tensor(self.y)[:, None])[:, 0]
        t = TrainedTokens(logp, torch.tensor(self.logq), torch.tensor(self.advantages), torch.tensor(self.index))
        loss, _ = loss_of(t, settings)
        return torch.autograd.grad(loss, w)[0].numpy()


def in_range(value, s):
    return s.clip_min <= value <= s.clip_max


def frozen_weight(name, ratios, i, s):
    """The detached weight of token i of a sample with these ratios, written from the formulas."""
    product = math.prod(ratios)
    mean = product ** (1 / len(ratios))
    cap = math.inf if s.importance_ratio_cap is None else s.importance_ratio_cap
    return {
        "tis": min(ratios[i], cap),
        "cispo": min(max(ratios[i], 1 - s.epsilon), 1 + s.epsilon_upper),
        "sequence_mask": product if in_range(product, s) else 0.0,
        "geometric_mask": min(ratios[i], cap) if in_range(mean, s) else 0.0,
        "decoupled_ppo": ratios[i] if in_range(ratios[i], s) else 0.0,
    }[name]


def clip_by_hand(ratio, advantage, s):
    return min(ratio * advantage, min(max(ratio, 1 - s.epsilon), 1 + s.epsilon_upper) * advantage)


def oracle(model, name, s, w):
    """The loss at `w`, with everything that carries no gradient taken at `model.w`; sample by sample."""
    now, start, total = model.logp(w), model.logp(model.w), 0.0
    for sample in range(10):
        where = np.flatnonzero(model.index == sample)
        ratios = np.exp(start[where] - model.logq[where]).tolist()
        for i, t in enumerate(where):
            advantage = model.advantages[t]
            if name == "gspo":
                mean = math.prod(np.exp(now[where] - model.logq[where]).tolist()) ** (1 / len(where))
                total -= clip_by_hand(mean, advantage, s) * in_range(mean, s)
            elif name == "decoupled_ppo":
                weight = frozen_weight(name, ratios, i, s)
                total -= weight * clip_by_hand(math.exp(now[t] - start[t]), advantage, s)
            else:
                total -= advantage * frozen_weight(name, ratios, i, s) * now[t]
    return total / len(model.y)


@EVERY
@pytest.mark.parametrize("seed", range(2))
def test_finite_differences(loss_type, seed):
    model, settings, h = Softmax(seed), chosen(loss_type, **BOUNDS[loss_type]), 1e-6
    want = np.zeros_like(model.w)
    for i in np.ndindex(model.w.shape):
        step = np.zeros_like(model.w)
        step[i] = h
        up, down = (oracle(model, loss_type, settings, model.w + k * step) for k in (1, -1))
        want[i] = (up - down) / (2 * h)
    np.testing.assert_allclose(model.by_torch(settings), want, rtol=1e-6, atol=1e-8)
    assert np.abs(want).max() > 1e-2


@EVERY
def test_the_bounds_of_these_tests_do_act(loss_type):
    t = tokens()
    out = OFF_POLICY_LOSSES[loss_type](t, chosen(loss_type, **BOUNDS[loss_type]))
    if loss_type not in ("tis", "cispo"):
        assert 0 < out.kept.sum() < len(out.kept)
    if out.truncated is not None:
        assert 0 < out.truncated.sum() < len(out.truncated)
    flows = torch.autograd.grad(out.per_token.sum(), t.logprobs)[0] != 0
    assert bool(flows.any())
    if loss_type == "gspo":  # clipped samples beside the masked ones
        assert int(flows.sum()) < int(out.kept.sum())


# -- order, packing, ranks


@EVERY
def test_neither_the_order_of_tokens_nor_the_labels_of_samples_matter(loss_type):
    t, settings = tokens(), chosen(loss_type, **BOUNDS[loss_type])
    loss, sums = loss_of(t, settings)
    order = torch.randperm(len(t.logprobs), generator=torch.Generator().manual_seed(9))
    labels = torch.randperm(40, generator=torch.Generator().manual_seed(8))
    logp = t.logprobs.detach()[order].requires_grad_()
    mixed = TrainedTokens(logp, t.sampler_logprobs[order], t.advantages[order], labels[t.sample_index[order]])
    other, other_sums = loss_of(mixed, settings)
    assert other.item() == pytest.approx(loss.item(), rel=1e-12)
    torch.testing.assert_close(gradient(mixed, settings), gradient(t, settings)[order], rtol=1e-12, atol=1e-15)
    for (name, kind, a, b), (*same, c, d) in zip(sums.events(), other_sums.events(), strict=True):
        assert same == [name, kind] and (a, b) == (pytest.approx(c, rel=1e-12), d)


@EVERY
def test_f037_two_rows_or_two_ranks_equal_one_row(loss_type):
    """Each divides by the trained tokens of all: losses, gradients and sums add up. One of them may be empty."""
    t, settings = tokens(gap=False), chosen(loss_type, **BOUNDS[loss_type])
    n = len(t.logprobs)
    cut = int((t.sample_index < 5).sum())
    loss, sums = loss_of(t, settings)
    total, merged, pieces = 0.0, None, []
    for part, shift in ((slice(0, cut), 0), (slice(cut, cut), 0), (slice(cut, n), 5)):
        logp = t.logprobs.detach()[part].requires_grad_()
        piece = TrainedTokens(logp, t.sampler_logprobs[part], t.advantages[part], t.sample_index[part] - shift)
        part_loss, part_sums = loss_of(piece, settings, n)
        pieces.append(torch.autograd.grad(part_loss, logp)[0])
        total, merged = total + part_loss.item(), part_sums if merged is None else merged.merge(part_sums)
    assert total == pytest.approx(loss.item(), rel=1e-12)
    torch.testing.assert_close(torch.cat(pieces), gradient(t, settings), rtol=1e-12, atol=1e-15)
    for (name, _, a, b), (_, _, c, d) in zip(sums.events(), merged.events(), strict=True):
        assert (a, b) == (pytest.approx(c, rel=1e-12), d), name


@EVERY
def test_float32_is_close_to_float64(loss_type):
    t, settings = tokens(), chosen(loss_type, **BOUNDS[loss_type])
    single = TrainedTokens(
        t.logprobs.detach().float().requires_grad_(), t.sampler_logprobs.float(), t.advantages.float(), t.sample_index
    )
    got = gradient(single, settings)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), gradient(t, settings), rtol=1e-5, atol=1e-7)


# -- Dr. GRPO's divisor


def test_dr_grpo_divides_by_a_constant_per_sample():
    """A token weighs 1 / (samples * budget) whether its sample or its neighbours are long or short."""
    t = tokens(gap=True)
    assert num_trained_samples(t.sample_index) == 12  # the 13th has no trained token
    normalizer = dr_grpo_normalizer(num_trained_samples(t.sample_index), 50)
    assert normalizer == 600.0
    t = t._replace(sampler_logprobs=t.logprobs.detach().clone())
    torch.testing.assert_close(gradient(t, CLIPPED, normalizer), -t.advantages / 600, rtol=1e-12, atol=0)
    for bad in ((0, 50), (3, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            dr_grpo_normalizer(*bad)
