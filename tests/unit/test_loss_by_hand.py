"""Single tokens by hand: masking, clipping, centring, padding, and every metric of the loss."""

import math

import pytest
import torch

from asyncgrpo_core.errors import ConfigError
from asyncgrpo_core.models.forward import PolicyOutput
from asyncgrpo_core.training.loss import LossSettings, async_grpo_loss

CLIPPED = LossSettings(score_centering=False)


def run(p, q, advantages, settings, *, top_p=None, top_q=None, valid=None, sample_index=None, normalizer=None):
    """Loss, gradient with respect to the log-probabilities of y (and of the head), and the metrics.

    p, q: probabilities of the sampled tokens. top_p, top_q: probabilities [N, k] of the head.
    """
    n = len(p)
    logp = torch.tensor(p, dtype=torch.float64).log().requires_grad_()
    head_p = torch.tensor(top_p or [[]] * n, dtype=torch.float64).log().requires_grad_()
    head_q = torch.tensor(top_q or [[]] * n, dtype=torch.float64).log()
    ok = torch.ones(head_q.shape, dtype=torch.bool) if valid is None else torch.tensor(valid)
    batch = {
        "sampler_logprobs": torch.tensor(q, dtype=torch.float64).log(),
        "advantages": torch.tensor(advantages, dtype=torch.float64),
        "sample_index": torch.tensor(sample_index or [0] * n),
        "top_ids": torch.where(ok, 1, -1),
        "top_logprobs": torch.where(ok, head_q, -torch.inf),
    }
    top = torch.where(ok, head_p, -torch.inf) if settings.score_centering else None
    policy = PolicyOutput(logp, torch.full((n,), 0.25, dtype=torch.float64), top)
    loss, sums = async_grpo_loss(policy, batch, settings, normalizer or n)
    grads = torch.autograd.grad(loss, (logp, head_p), allow_unused=True)
    metrics = {name: a / b if kind == "mean" else a for name, kind, a, b in sums.events()}
    return loss.item(), grads[0].tolist(), None if grads[1] is None else grads[1].tolist(), metrics


# -- the ratio and its mask


@pytest.mark.parametrize(("ratio", "trained"), [(0.4, False), (0.51, True), (1.0, True), (4.99, True), (6.0, False)])
def test_f031_f032_tokens_outside_the_range_are_dropped(ratio, trained):
    q = 0.0625
    loss, grad, _, metrics = run([q * ratio], [q], [1.0 if ratio <= 1 else -1.0], CLIPPED)  # signs that are not clipped
    assert (loss != 0) == (grad[0] != 0) == trained
    assert metrics["sampling/masked_mean"] == (0 if trained else 1)


def test_f032_the_bounds_are_the_configs():
    narrow = LossSettings(score_centering=False, clip_min=0.9, clip_max=1.1)
    assert run([0.3], [0.25], [1.0], narrow)[0] == 0
    wide = LossSettings(score_centering=False, clip_min=0.0, clip_max=100.0)
    assert run([0.9], [0.01], [-1.0], wide)[0] == pytest.approx(90)


def test_f038_masked_tokens_stay_in_the_denominator():
    """Ratios 1 and 6: the loss is half of the one token's."""
    alone, *_ = run([0.25], [0.25], [2.0], CLIPPED)
    half, grad, _, metrics = run([0.25, 0.6], [0.25, 0.1], [2.0, 2.0], CLIPPED)
    assert alone == pytest.approx(-2.0)
    assert half == pytest.approx(-1.0) and grad == pytest.approx([-1.0, 0.0])
    assert metrics["sampling/masked_mean"] == 0.5


def test_a_ratio_that_overflows_is_masked_without_a_nan():
    loss, grad, _, metrics = run([0.5, 0.5], [1e-320, 0.5], [1.0, 1.0], CLIPPED)
    assert loss == pytest.approx(-0.5) and grad == pytest.approx([0.0, -0.5])
    assert metrics["sampling/importance_sampling_ratio/max"] > 1e300
    loss, grad, top_grad, _ = run([0.5], [1e-320], [1.0], LossSettings(), top_p=[[0.5]], top_q=[[1e-320]])
    assert math.isfinite(loss) and math.isfinite(grad[0]) and math.isfinite(top_grad[0][0])


# -- the clipped surrogate (F035, F036)


@pytest.mark.parametrize(
    ("ratio", "advantage", "epsilon_high", "loss", "flows"),
    [
        (1.0, 1.0, None, -1.0, True),
        (1.1, 2.0, None, -2.2, True),
        (1.5, 1.0, None, -1.2, False),  # clipped from above
        (1.5, -1.0, None, 1.5, True),  # a worse token that became likelier is still pushed down
        (0.6, 1.0, None, -0.6, True),
        (0.6, -1.0, None, 0.8, False),  # clipped from below
        (1.25, 1.0, 0.28, -1.25, True),  # F036: asymmetric upper bound
        (1.5, 1.0, 0.28, -1.28, False),
        (0.6, -1.0, 0.28, 0.8, False),
    ],
)
def test_f035_f036_the_clipped_surrogate_by_hand(ratio, advantage, epsilon_high, loss, flows):
    settings = LossSettings(score_centering=False, epsilon_high=epsilon_high)
    got, grad, _, _ = run([0.1 * ratio], [0.1], [advantage], settings)
    assert got == pytest.approx(loss)
    assert grad[0] == pytest.approx(-ratio * advantage if flows else 0.0)  # d r / d log p = r


# -- score centering (F034)


def test_f034_the_head_estimator_by_hand():
    """w_y = 2; head ratios 1.5, 0.25 (masked) and 2: coefficients are the kept p_v."""
    p, q = [[0.45, 0.05, 0.2]], [[0.3, 0.2, 0.1]]
    settings = LossSettings(score_centering_tail="head")
    loss, grad, top_grad, metrics = run([0.2], [0.1], [1.5], settings, top_p=p, top_q=q)
    centre = 0.45 * math.log(0.45) + 0.2 * math.log(0.2)
    assert loss == pytest.approx(-1.5 * (2 * math.log(0.2) - centre))
    assert grad == pytest.approx([-3.0])
    assert top_grad[0] == pytest.approx([1.5 * 0.45, 0.0, 1.5 * 0.2])
    assert metrics["sampling/sampler_mass"] == pytest.approx(0.6)


def test_the_model_estimator_by_hand():
    """Same head; the tail has rho = 0.4 / 0.3, 1 / rho = 0.75 is in range: c_v = kept p_v - p_v."""
    p, q = [[0.45, 0.05, 0.2]], [[0.3, 0.2, 0.1]]
    _, grad, top_grad, _ = run([0.2], [0.1], [1.5], LossSettings(), top_p=p, top_q=q)
    assert grad == pytest.approx([-3.0])
    assert top_grad[0] == pytest.approx([0.0, -1.5 * 0.05, 0.0], abs=1e-12)


def test_the_model_estimator_with_a_tail_out_of_range_is_the_head_estimator():
    """rho = 0.7 / 0.1: the tail's ratio 1/7 is masked, so nothing of it is folded in."""
    p, q = [[0.5, 0.4]], [[0.2, 0.1]]
    a = run([0.5], [0.5], [1.0], LossSettings(score_centering_tail="model"), top_p=p, top_q=q)
    b = run([0.5], [0.5], [1.0], LossSettings(score_centering_tail="head"), top_p=p, top_q=q)
    assert a[:3] == b[:3]


def test_a_sampled_token_that_is_masked_keeps_its_centering_term():
    loss, grad, top_grad, _ = run([0.6], [0.1], [1.0], LossSettings(), top_p=[[0.6, 0.1]], top_q=[[0.1, 0.6]])
    assert grad == [0.0] and loss != 0
    assert top_grad[0] == pytest.approx([-0.6, -0.1])  # rho = 1: alpha = 1, both head ratios masked


def test_padding_of_the_head_is_ignored():
    full = run([0.2], [0.1], [1.0], LossSettings(), top_p=[[0.45, 0.2]], top_q=[[0.3, 0.25]])
    padded = run(
        [0.2], [0.1], [1.0], LossSettings(), top_p=[[0.45, 0.9, 0.2]], top_q=[[0.3, 0.9, 0.25]],
        valid=[[True, False, True]],
    )  # fmt: skip
    assert padded[0] == pytest.approx(full[0]) and padded[3] == pytest.approx(full[3])
    assert padded[2][0] == pytest.approx([full[2][0][0], 0.0, full[2][0][1]])


def test_a_position_whose_head_is_all_padding_is_importance_weighted_reinforce():
    loss, grad, top_grad, metrics = run(
        [0.2], [0.1], [3.0], LossSettings(), top_p=[[0.5]], top_q=[[0.5]], valid=[[False]]
    )
    assert loss == pytest.approx(-3.0 * 2 * math.log(0.2)) and grad == pytest.approx([-6.0])
    assert top_grad == [[0.0]] and metrics["sampling/sampler_mass"] == 0


@pytest.mark.parametrize("mass", [1.0, 1.0 + 1e-7])
def test_a_head_that_covers_everything_has_floored_tails(mass):
    """Both tails at the floor: rho = 1, and the coefficients stay finite although 1 - mass may be negative."""
    top = [[0.75 * mass, 0.25 * mass]]
    loss, _, top_grad, _ = run([0.75], [0.75], [1.0], LossSettings(), top_p=top, top_q=top)
    assert math.isfinite(loss)
    assert top_grad[0] == pytest.approx([0.0, 0.0], abs=1e-9)


def test_zero_advantage_gives_no_gradient():
    _, grad, top_grad, _ = run([0.2], [0.1], [0.0], LossSettings(), top_p=[[0.4]], top_q=[[0.3]])
    assert grad == [0.0] and top_grad == [[0.0]]


# -- metrics


def test_f053_f054_f055_sampling_metrics_by_hand():
    p, q = [0.2, 0.3, 0.7, 0.1], [0.1, 0.3, 0.1, 0.2]  # ratios 2, 1, 7 (masked), 0.5
    *_, m = run(p, q, [1.0] * 4, LossSettings(clip_min=0.4), top_p=[[0.5]] * 4, top_q=[[0.6], [0.7], [0.8], [0.9]])
    gaps = [math.log(2), 0.0, math.log(7), math.log(2)]
    assert m["sampling/sampling_logp_difference/mean"] == pytest.approx(sum(gaps) / 4)
    assert m["sampling/sampling_logp_difference/max"] == pytest.approx(math.log(7))
    assert m["sampling/importance_sampling_ratio/min"] == pytest.approx(0.5)
    assert m["sampling/importance_sampling_ratio/mean"] == pytest.approx(10.5 / 4)
    assert m["sampling/importance_sampling_ratio/max"] == pytest.approx(7)
    assert m["sampling/masked_mean"] == 0.25
    assert m["sampling/sampler_mass"] == pytest.approx(0.75)
    assert m["entropy"] == pytest.approx(0.25)


@pytest.mark.parametrize("score_centering", [False, True])
def test_f057_f058_clip_ratios_by_hand(score_centering):
    """Two samples of four tokens. Low: r < 0.8 and A < 0. High: r > 1.3 and A > 0."""
    ratios = [0.7, 0.9, 1.5, 0.6, 1.25, 1.4, 1.5, 0.7]  # 1.25 is inside only by epsilon_high
    advantages = [-1.0] * 4 + [1.0] * 4
    settings = LossSettings(score_centering=score_centering, epsilon_high=0.3)
    top = {"top_p": [[0.5]] * 8, "top_q": [[0.5]] * 8} if score_centering else {}
    *_, m = run([0.1 * r for r in ratios], [0.1] * 8, advantages, settings, sample_index=[0] * 4 + [1] * 4, **top)
    assert m["clip_ratio/low_mean"] == 2 / 8 and m["clip_ratio/high_mean"] == 2 / 8
    assert m["clip_ratio/region_mean"] == 4 / 8
    assert m["clip_ratio/low_min"] == 0  # sample 1 has none, sample 0 half
    assert m["clip_ratio/high_max"] == 0.5
    assert ("sampling/sampler_mass" in m) == score_centering


def test_a_token_without_advantage_is_not_clipped():
    *_, m = run([0.07, 0.15], [0.1, 0.1], [0.0, 0.0], CLIPPED)
    assert m["clip_ratio/region_mean"] == m["clip_ratio/low_mean"] == m["clip_ratio/high_mean"] == 0


def test_per_sample_extremes_ignore_samples_without_trained_tokens():
    """Sample 1 has no trained token: its fraction is not 0, it does not exist."""
    *_, m = run([0.07, 0.06], [0.1, 0.1], [-1.0, -1.0], CLIPPED, sample_index=[0, 2])
    assert m["clip_ratio/low_min"] == 1.0


# -- refusals


def test_misuse_is_refused():
    with pytest.raises(ValueError, match="normalizer"):
        run([0.1], [0.1], [1.0], CLIPPED, normalizer=-1)
    policy = PolicyOutput(torch.zeros(1), torch.zeros(1), None)
    batch = {name: torch.zeros(1) for name in ("sampler_logprobs", "advantages", "sample_index")}
    with pytest.raises(ValueError, match="num_sampler_logprobs"):
        async_grpo_loss(policy, batch, LossSettings(), 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"score_centering_tail": "body"}, "body"),
        ({"clip_min": 5.0, "clip_max": 0.5}, "clip_min=5.0"),
        ({"clip_min": -1.0}, "clip_min=-1.0"),
        ({"epsilon": -0.1}, "epsilon=-0.1"),
        ({"epsilon_high": -0.2}, "epsilon_high=-0.2"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        LossSettings(**settings)
