"""Every off-policy loss on tokens computed by hand: value, gradient and mask, with both signs of the advantage."""

import math

import pytest
import torch

from asyncgrpo_core.metrics import kind_of
from asyncgrpo_core.models.forward import PolicyOutput
from asyncgrpo_core.training.loss import LossSettings, async_grpo_loss
from asyncgrpo_core.training.offpolicy import TrainedTokens, decoupled_ppo

Q = 0.1  # the sampler's probability of every token below


def chosen(loss_type, **kwargs):
    return LossSettings(score_centering=False, loss_type=loss_type, **kwargs)


def run(settings, ratios, advantages, sample_index=None, normalizer=None):
    """(loss, gradient with respect to log p, metrics) through the function the trainer calls."""
    n = len(ratios)
    logp = (Q * torch.tensor(ratios, dtype=torch.float64)).log().requires_grad_()
    batch = {
        "sampler_logprobs": torch.full((n,), math.log(Q), dtype=torch.float64),
        "advantages": torch.tensor(advantages, dtype=torch.float64),
        "sample_index": torch.tensor(sample_index or [0] * n),
    }
    loss, sums = async_grpo_loss(PolicyOutput(logp, torch.zeros(n), None), batch, settings, normalizer or n)
    events = sums.events()
    assert all(kind_of(name) == kind for name, kind, _, _ in events)
    metrics = {name: a / b if kind == "mean" else a for name, kind, a, b in events}
    return loss.item(), torch.autograd.grad(loss, logp)[0].tolist(), metrics


def close(values, **kwargs):
    return pytest.approx(values, rel=1e-9, abs=1e-12, **kwargs)


# -- truncated importance sampling


@pytest.mark.parametrize("advantage", [1.5, -1.5])
@pytest.mark.parametrize(
    ("ratio", "cap", "weight"), [(0.4, 2.0, 0.4), (1.0, 2.0, 1.0), (3.0, 2.0, 2.0), (3.0, None, 3.0), (3.0, 0.5, 0.5)]
)
def test_tis_weighs_the_score_by_the_smaller_of_ratio_and_cap(ratio, cap, weight, advantage):
    loss, grad, metrics = run(chosen("tis", importance_ratio_cap=cap), [ratio], [advantage])
    assert loss == close(-advantage * weight * math.log(Q * ratio))
    assert grad == close([-advantage * weight])
    assert metrics["sampling/masked_mean"] == 0
    assert metrics["sampling/truncated_mean"] == (weight < ratio)


def test_f032_tis_trains_tokens_that_the_token_mask_would_drop():
    _, grad, _ = run(chosen("tis"), [0.1, 8.0], [1.0, 1.0])
    assert grad == close([-0.1 / 2, -2.0 / 2])


def test_tis_of_a_ratio_that_overflows_is_the_cap():
    logp = torch.zeros(1, requires_grad=True)
    batch = {
        "sampler_logprobs": torch.tensor([-200.0]),
        "advantages": torch.ones(1),
        "sample_index": torch.zeros(1, dtype=torch.int64),
    }
    loss, _ = async_grpo_loss(PolicyOutput(logp, torch.zeros(1), None), batch, chosen("tis"), 1)
    assert torch.autograd.grad(loss, logp)[0].item() == pytest.approx(-2.0)


# -- masks by sample

# Sample 0: ratios 2 and 0.5, product 1, mean 1. Sample 1: 2 and 4, product 8, geometric mean sqrt(8) = 2.83.
# Sample 2: 0.5 and 0.5, product 0.25, mean 0.5.
RATIOS, SAMPLES = [2.0, 0.5, 2.0, 4.0, 0.5, 0.5], [0, 0, 1, 1, 2, 2]
ADVANTAGES = [1.0, 1.0, -2.0, -2.0, 3.0, 3.0]


def test_the_sequence_mask_weighs_every_token_by_its_sample_s_product():
    settings = chosen("sequence_mask", clip_min=0.2, clip_max=5.0)  # drops sample 1 only
    loss, grad, metrics = run(settings, RATIOS, ADVANTAGES, SAMPLES)
    logp = [math.log(Q * r) for r in RATIOS]
    assert loss == close(-(1 * 1 * (logp[0] + logp[1]) + 3 * 0.25 * (logp[4] + logp[5])) / 6)
    assert grad == close([-1 / 6, -1 / 6, 0, 0, -0.75 / 6, -0.75 / 6])
    assert metrics["sampling/masked_mean"] == close(2 / 6)
    assert metrics["sampling/sequence_log_ratio/max"] == close(math.log(8))
    assert metrics["sampling/sequence_log_ratio/min"] == close(math.log(0.25))
    assert metrics["sampling/sequence_log_ratio/mean"] == close((math.log(8) + math.log(0.25)) / 3)


def test_the_sequence_mask_has_two_bounds():
    _, grad, metrics = run(chosen("sequence_mask", clip_min=0.5, clip_max=10.0), RATIOS, ADVANTAGES, SAMPLES)
    assert grad == close([-1 / 6, -1 / 6, 2 * 8 / 6, 2 * 8 / 6, 0, 0])
    assert metrics["sampling/masked_mean"] == close(2 / 6)


def test_a_long_sample_whose_product_overflows_is_masked_without_a_nan():
    """2,000 ratios of 2: the product is 2^2000, beyond float64."""
    loss, grad, metrics = run(chosen("sequence_mask"), [2.0] * 2000 + [1.0], [1.0] * 2001, [0] * 2000 + [1])
    assert math.isfinite(loss) and grad[:2000] == [0.0] * 2000 and grad[2000] == close(-1 / 2001)
    assert metrics["sampling/sequence_log_ratio/max"] == close(2000 * math.log(2))


def test_the_geometric_mask_judges_the_sample_and_weighs_the_token():
    settings = chosen("geometric_mask", clip_min=0.6, clip_max=3.0)  # drops sample 2; sample 1's 4 is truncated to 2
    loss, grad, metrics = run(settings, RATIOS, ADVANTAGES, SAMPLES)
    logp = [math.log(Q * r) for r in RATIOS]
    assert loss == close(-(2 * logp[0] + 0.5 * logp[1] - 2 * (2 * logp[2] + 2 * logp[3])) / 6)
    assert grad == close([-2 / 6, -0.5 / 6, 4 / 6, 4 / 6, 0, 0])
    assert metrics["sampling/masked_mean"] == close(2 / 6)
    assert metrics["sampling/truncated_mean"] == close(1 / 6)
    assert metrics["sampling/sequence_log_ratio/max"] == close(math.log(8) / 2)


def test_the_geometric_mask_does_not_depend_on_the_length():
    """Ratios of 1.1: kept at 2 tokens and at 200, where the product is 1.9e8 and the sequence mask drops them."""
    for n in (2, 200):
        settings = {"clip_min": 0.9, "clip_max": 1.3}
        _, geometric, _ = run(chosen("geometric_mask", **settings), [1.1] * n, [1.0] * n)
        _, sequence, _ = run(chosen("sequence_mask", **settings), [1.1] * n, [1.0] * n)
        assert geometric == close([-1.1 / n] * n)
        assert (sequence[0] == 0) == (n == 200)


def test_a_geometric_mask_without_cap_drops_an_infinite_ratio_without_a_nan():
    logp = torch.zeros(1, requires_grad=True)
    tokens = {
        "sampler_logprobs": torch.tensor([-200.0]),
        "advantages": torch.ones(1),
        "sample_index": torch.tensor([0]),
    }
    settings = chosen("geometric_mask", importance_ratio_cap=None)
    loss, _ = async_grpo_loss(PolicyOutput(logp, torch.zeros(1), None), tokens, settings, 1)
    assert torch.autograd.grad(loss, logp)[0].item() == 0


# -- CISPO


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize(("ratio", "weight"), [(0.5, 0.8), (0.9, 0.9), (1.2, 1.2), (2.0, 1.3)])
def test_cispo_clips_the_weight_and_keeps_the_gradient_of_both_signs(ratio, weight, advantage):
    loss, grad, metrics = run(chosen("cispo", epsilon_high=0.3), [ratio], [advantage])
    assert loss == close(-advantage * weight * math.log(Q * ratio))
    assert grad == close([-advantage * weight])
    assert metrics["sampling/truncated_mean"] == (weight != ratio)


@pytest.mark.parametrize("epsilon", [1.0, 7.0])
def test_cispo_without_lower_bound_is_tis(epsilon):
    ratios, advantages = [0.01, 0.7, 5.5], [1.0, -1.0, 1.0]
    a = run(chosen("cispo", epsilon=epsilon, epsilon_high=3.0), ratios, advantages)
    b = run(chosen("tis", importance_ratio_cap=4.0), ratios, advantages)
    assert a[:2] == (close(b[0]), close(b[1]))


# -- GSPO


@pytest.mark.parametrize(
    ("ratios", "advantage", "value", "clipped"),
    [
        ([2.0, 0.5], 1.0, 1.0, False),  # s = 1: single ratios outside the region do not clip
        ([1.1, 1.1], 2.0, 1.1, False),
        ([1.6, 0.9], 1.0, 1.2, True),  # s = 1.2 = sqrt(1.44), on the edge of the region
        ([1.5, 1.5], 1.0, 1.2, True),
        ([1.5, 1.5], -1.0, 1.5, False),
        ([0.6, 0.6], 1.0, 0.6, False),
        ([0.6, 0.6], -1.0, 0.8, True),
    ],
)
def test_gspo_clips_whole_samples(ratios, advantage, value, clipped):
    loss, grad, metrics = run(chosen("gspo", epsilon=0.2), ratios, [advantage] * 2)
    assert loss == close(-advantage * value)
    if ratios != [1.6, 0.9]:  # at the edge itself either one-sided gradient is right
        assert grad == close([0.0, 0.0] if clipped else [-advantage * value / 2] * 2)  # d s / d log p_t = s / T
        low = clipped and advantage < 0
        assert (metrics["clip_ratio/low_mean"], metrics["clip_ratio/high_mean"]) == (low, clipped and not low)
    assert metrics["sampling/importance_sampling_ratio/max"] == close(max(ratios))  # F054: the raw ones


def test_gspo_drops_a_sample_out_of_range():
    loss, grad, metrics = run(chosen("gspo"), [6.0, 7.0, 0.3, 1.0], [-1.0, -1.0, -1.0, 1.0], [0, 0, 1, 2])
    assert loss == close(-1 / 4) and grad == close([0, 0, 0, -1 / 4])
    assert metrics["sampling/masked_mean"] == 0.75


# -- decoupled PPO


def test_decoupled_ppo_with_one_forward_is_the_masked_importance_weighted_policy_gradient():
    """u = 1 for every epsilon: nothing is clipped, and the weight is masked as in the reference."""
    ratios, advantages = [0.4, 0.6, 1.5, 4.0, 6.0], [1.0, -1.0, 1.0, -1.0, 1.0]
    for epsilon in (0.0, 0.2):
        loss, grad, metrics = run(chosen("decoupled_ppo", epsilon=epsilon), ratios, advantages)
        weights = [0, 0.6, 1.5, 4.0, 0]
        assert loss == close(-sum(a * w for a, w in zip(advantages, weights, strict=True)) / 5)
        if epsilon:  # at epsilon 0 the kink of the minimum sits at u = 1 itself
            assert grad == close([-a * w / 5 for a, w in zip(advantages, weights, strict=True)])
        assert metrics["clip_ratio/region_mean"] == 0 and metrics["sampling/masked_mean"] == close(2 / 5)
        assert metrics["sampling/importance_sampling_ratio/max"] == close(6.0)


@pytest.mark.parametrize(
    ("update", "advantage", "value", "flows"),
    [
        (1.1, 1.0, 1.1, True),
        (1.5, 1.0, 1.2, False),
        (1.5, -1.0, 1.5, True),
        (0.5, 1.0, 0.5, True),
        (0.5, -1.0, 0.8, False),
    ],
)
def test_decoupled_ppo_clips_around_the_proximal_policy(update, advantage, value, flows):
    """The weight 2 = p_prox / q multiplies the surrogate of u = p / p_prox."""
    logp = torch.tensor([2 * Q * update], dtype=torch.float64).log().requires_grad_()
    proximal = torch.tensor([2 * Q], dtype=torch.float64).log()
    sampler = torch.tensor([Q], dtype=torch.float64).log()
    tokens = TrainedTokens(logp, sampler, torch.tensor([advantage], dtype=torch.float64), torch.tensor([0]))
    out = decoupled_ppo(tokens, chosen("decoupled_ppo"), proximal)
    assert out.per_token.item() == close(-2 * advantage * value)
    grad = torch.autograd.grad(out.per_token.sum(), logp)[0].item()
    assert grad == close(-2 * advantage * value if flows else 0.0)
    assert out.trust_ratio.item() == close(update)


def test_no_gradient_reaches_the_proximal_policy():
    logp = torch.tensor([0.5]).log().requires_grad_()
    proximal = torch.tensor([0.45]).log().requires_grad_()
    tokens = TrainedTokens(logp, torch.tensor([0.4]).log(), torch.ones(1), torch.tensor([0]))
    out = decoupled_ppo(tokens, chosen("decoupled_ppo"), proximal)
    assert torch.autograd.grad(out.per_token.sum(), (logp, proximal), allow_unused=True)[1] is None


# -- all of them


@pytest.mark.parametrize("loss_type", ["tis", "sequence_mask", "geometric_mask", "cispo", "gspo", "decoupled_ppo"])
def test_f054_raw_ratios_are_recorded_before_masking(loss_type):
    *_, metrics = run(chosen(loss_type), [0.1, 1.0, 9.0], [1.0, -1.0, 1.0], [0, 1, 2])
    assert metrics["sampling/importance_sampling_ratio/min"] == close(0.1)
    assert metrics["sampling/importance_sampling_ratio/mean"] == close(10.1 / 3)
    assert metrics["sampling/importance_sampling_ratio/max"] == close(9.0)
    assert metrics["sampling/sampling_logp_difference/max"] == close(math.log(10))


@pytest.mark.parametrize("loss_type", ["tis", "sequence_mask", "geometric_mask", "cispo", "gspo", "decoupled_ppo"])
def test_f038_masked_tokens_stay_in_the_denominator(loss_type):
    loss, grad, _ = run(chosen(loss_type), [1.0, 1.0], [2.0, 0.0], [0, 1], normalizer=8)
    assert grad == close([-2 / 8, 0.0]) and math.isfinite(loss)
