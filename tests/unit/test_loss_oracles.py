"""The six oracles of the loss: REINFORCE, the dense formula, enumeration, finite differences, f = 1, and sums."""

import numpy as np
import pytest
import torch

from asyncgrpo_core.models.forward import PolicyOutput, install_packed_forward
from asyncgrpo_core.packing import pack_row
from asyncgrpo_core.training.loss import LossSettings, async_grpo_loss, centering_coefficients
from tests.unit.policy_cases import (
    assert_same_gradients,
    dense_logprobs,
    float64_throughout,
    gradients,
    make_sample,
    some_samples,
    tiny_policy,
    trained_ids,
)

V = 7
MODEL, HEAD = LossSettings(score_centering_tail="model"), LossSettings(score_centering_tail="head")
CLIPPED = LossSettings(score_centering=False, epsilon_high=0.3)


def distributions(seed, spread=0.8):
    """Log-probabilities of one position: trainer's (with the logits that carry gradient) and sampler's, float64."""
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(V, generator=g, dtype=torch.float64).requires_grad_()
    logq = (z.detach() + spread * torch.randn(V, generator=g, dtype=torch.float64)).log_softmax(-1)
    return z, logq


def gradient_at(z, logq, head, y, advantage, settings):
    """d loss / d logits of one position whose sampler reports the tokens `head`."""
    logp = z.log_softmax(-1)
    policy = PolicyOutput(logp[y][None], -(logp.exp() * logp).sum()[None].detach(), logp[head][None])
    batch = {
        "sampler_logprobs": logq[y][None],
        "advantages": torch.tensor([advantage], dtype=torch.float64),
        "sample_index": torch.zeros(1, dtype=torch.int64),
        "top_ids": head[None],
        "top_logprobs": logq[head][None],
    }
    loss, _ = async_grpo_loss(policy, batch, settings, 1)
    return torch.autograd.grad(loss, z)[0]


def scores(z):
    """s_v = grad log p_v for every v: rows of [V, V], in closed form onehot(v) - p."""
    return torch.eye(V, dtype=torch.float64) - z.detach().softmax(-1)


def masked_weights(z, logq, settings):
    r = (z.detach().log_softmax(-1) - logq).exp()
    return torch.where((r >= settings.clip_min) & (r <= settings.clip_max), r, 0.0)


def top(logq, k):
    return logq.argsort(descending=True)[:k]


# -- 1. on-policy: plain REINFORCE


@pytest.mark.parametrize("k", [1, 3, V])
def test_on_policy_the_default_is_exactly_reinforce(k):
    z, _ = distributions(0)
    logq = z.detach().log_softmax(-1)
    for y in range(V):
        got = gradient_at(z, logq, top(logq, k), y, 1.7, MODEL)
        torch.testing.assert_close(got, -1.7 * scores(z)[y], rtol=0, atol=1e-12)


def test_on_policy_the_head_estimator_is_reinforce_only_with_the_whole_vocabulary():
    z, _ = distributions(0)
    logq = z.detach().log_softmax(-1)
    full = gradient_at(z, logq, top(logq, V), 2, 1.0, HEAD)
    torch.testing.assert_close(full, -scores(z)[2], rtol=0, atol=1e-12)
    cut = gradient_at(z, logq, top(logq, 2), 2, 1.0, HEAD)
    assert (cut + scores(z)[2]).abs().max() > 0.01  # the spurious gradient that `model` removes


# -- 2. the whole vocabulary: the dense formula


def test_the_distributions_of_the_oracles_do_reach_the_mask():
    masked = [int((masked_weights(*distributions(seed, spread=1.2), MODEL) == 0).sum()) for seed in range(4)]
    assert all(0 < n < V for n in masked)


@pytest.mark.parametrize("settings", [MODEL, HEAD], ids=["model", "head"])
@pytest.mark.parametrize("seed", range(4))
def test_with_the_whole_vocabulary_it_is_the_dense_formula(settings, seed):
    z, logq = distributions(seed, spread=1.2)
    q, w, s = logq.exp(), masked_weights(z, logq, settings), scores(z)
    for y in range(V):
        want = -0.9 * (w[y] * s[y] - ((q * w)[:, None] * s).sum(0))
        got = gradient_at(z, logq, top(logq, V), y, 0.9, settings)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


# -- 3. constant advantage: the expectation over the sampler, by enumeration (F033)


def expected_gradient(z, logq, k, settings):
    return sum(logq[y].exp() * gradient_at(z, logq, top(logq, k), y, 1.0, settings) for y in range(V))


@pytest.mark.parametrize("settings", [MODEL, HEAD], ids=["model", "head"])
@pytest.mark.parametrize("seed", range(4))
def test_f033_a_constant_advantage_moves_nothing_on_average(settings, seed):
    z, logq = distributions(seed, spread=1.2)
    torch.testing.assert_close(
        expected_gradient(z, logq, V, settings), torch.zeros(V, dtype=torch.float64), rtol=0, atol=1e-10
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("k", [1, 3, 5])
def test_f033_nor_with_a_proportional_tail(seed, k):
    """q = rho p outside the head: the assumption of `model` holds and the expectation is 0."""
    z, logq = distributions(seed)
    p, q = z.detach().softmax(-1), logq.exp().clone()
    head = top(logq, k)
    outside = torch.ones(V, dtype=torch.bool).index_fill(0, head, False)
    q[outside] = p[outside] * (q[outside].sum() / p[outside].sum())
    proportional = q.log()
    got = sum(q[y] * gradient_at(z, proportional, head, y, 1.0, MODEL) for y in range(V))
    torch.testing.assert_close(got, torch.zeros(V, dtype=torch.float64), rtol=0, atol=1e-10)
    biased = sum(q[y] * gradient_at(z, proportional, head, y, 1.0, HEAD) for y in range(V))
    assert biased.abs().max() > 1e-3


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("k", [1, 3, 5])
def test_f033_for_other_tails_the_residual_is_what_the_theory_says(seed, k):
    z, logq = distributions(seed, spread=1.2)
    p, q, s = z.detach().softmax(-1), logq.exp(), scores(z)
    head = top(logq, k)
    outside = torch.ones(V, dtype=torch.bool).index_fill(0, head, False)
    w = masked_weights(z, logq, MODEL)
    rho = q[outside].sum() / p[outside].sum()
    alpha = 1.0 if MODEL.clip_min <= 1 / rho <= MODEL.clip_max else 0.0  # rho * (1 / rho), when in range
    left_by_model = -(((q * w - alpha * p)[:, None] * s)[outside]).sum(0)
    left_by_head = -(((q * w)[:, None] * s)[outside]).sum(0)
    torch.testing.assert_close(expected_gradient(z, logq, k, MODEL), left_by_model, rtol=0, atol=1e-10)
    torch.testing.assert_close(expected_gradient(z, logq, k, HEAD), left_by_head, rtol=0, atol=1e-10)


# -- 4. finite differences on a two-layer model in float64


def surrogate(model, samples, frozen, settings):
    """The loss written out densely, sample by sample, with the weights of score centering frozen."""
    total, count = 0.0, 0
    for sample, weights in zip(samples, frozen, strict=True):
        logp = dense_logprobs(model, sample)
        y = trained_ids(sample)
        logp_y = logp.gather(1, y[:, None])[:, 0]
        if settings.score_centering:
            w_y, c = weights
            total = total - sample.advantage * ((w_y * logp_y).sum() - (c * logp).sum())
        else:
            total = total + clipped_by_hand(logp_y, sample, settings).sum()
        count += len(y)
    return total / count


def recorded(sample):
    return torch.from_numpy(sample.sequence.sampler_logprobs[sample.sequence.loss_mask]).double()


def clipped_by_hand(logp_y, sample, settings):
    r = (logp_y - recorded(sample)).exp()
    clipped = r.clamp(1 - settings.epsilon, 1 + settings.epsilon_upper)
    value = -torch.minimum(r * sample.advantage, clipped * sample.advantage)
    return value * ((r >= settings.clip_min) & (r <= settings.clip_max))


def frozen_weights(model, samples, settings):
    """w_y [N] and c scattered over the vocabulary [N, V], from the formulas, one token at a time."""
    out = []
    with torch.no_grad():
        for sample in samples:
            p = dense_logprobs(model, sample).exp()
            ids, logq = sample.sequence.top.ids, sample.sequence.top.logprobs
            w, c = torch.zeros(len(p), dtype=p.dtype), torch.zeros_like(p)
            for t, (y, q_y) in enumerate(zip(trained_ids(sample).tolist(), recorded(sample).tolist(), strict=True)):
                r = p[t, y].item() / np.exp(q_y)
                w[t] = r if settings.clip_min <= r <= settings.clip_max else 0.0
                q = {int(v): float(np.exp(np.float64(x))) for v, x in zip(ids[t], logq[t], strict=True)}
                rho = (1 - sum(q.values())) / (1 - sum(p[t, v].item() for v in q))
                for v, q_v in q.items():
                    r_v = p[t, v].item() / q_v
                    c[t, v] = q_v * r_v if settings.clip_min <= r_v <= settings.clip_max else 0.0
                    if settings.score_centering_tail == "model" and settings.clip_min <= 1 / rho <= settings.clip_max:
                        c[t, v] -= p[t, v]
            out.append((w, c))
    return out


@pytest.mark.parametrize("settings", [MODEL, HEAD, CLIPPED], ids=["model", "head", "clipped"])
@float64_throughout()
def test_finite_differences_of_a_two_layer_model(settings):
    samples = some_samples(seed=3, count=3)
    model, packed = tiny_policy(seed=1), install_packed_forward(tiny_policy(seed=1))
    row = pack_row(samples, 4)
    loss, _ = async_grpo_loss(packed(**row, temperature=1.0), row, settings, len(row["target_ids"]))
    loss.backward()
    found = gradients(packed)
    frozen = frozen_weights(model, samples, settings)
    h, checked = 1e-6, 0
    for name, parameter in model.named_parameters():
        flat = parameter.data.view(-1)
        for i in np.random.default_rng(len(name)).choice(flat.numel(), 1):
            values = []
            for step in (h, -h):
                flat[i] += step
                with torch.no_grad():
                    values.append(float(surrogate(model, samples, frozen, settings)))
                flat[i] -= step
            want = (values[0] - values[1]) / (2 * h)
            assert found[name].view(-1)[i].item() == pytest.approx(want, rel=1e-4, abs=1e-7), (name, i)
            checked += abs(want) > 1e-5
    assert checked > 12


# -- 5. other weights


def test_with_weight_one_the_coefficient_is_q_minus_rho_p():
    z, logq = distributions(5)
    logp, head = z.detach().log_softmax(-1), top(logq, 3)
    p, q = logp[head].exp(), logq[head].exp()
    valid = torch.ones(1, 3, dtype=torch.bool)
    c = centering_coefficients(logp[head][None], logq[head][None], valid, torch.ones_like, with_tail=True)
    torch.testing.assert_close(c[0], q - (1 - q.sum()) / (1 - p.sum()) * p, rtol=0, atol=1e-12)


def test_with_untruncated_importance_weights_nothing_is_left_to_centre():
    z, logq = distributions(6)
    logp, head = z.detach().log_softmax(-1), top(logq, 3)
    valid = torch.ones(1, 3, dtype=torch.bool)
    c = centering_coefficients(logp[head][None], logq[head][None], valid, lambda r: r, with_tail=True)
    torch.testing.assert_close(c, torch.zeros_like(c), rtol=0, atol=1e-12)


# -- 6. ranks, micro-batches and packing


def loss_gradient(samples, settings, normalizer=None, parts=1):
    """Gradient of one row holding all samples, or of several rows whose losses are added."""
    model = install_packed_forward(tiny_policy())
    for part in np.array_split(np.arange(len(samples)), parts):
        row = pack_row([samples[i] for i in part], 4 if settings.score_centering else 0)
        total = normalizer or len(row["target_ids"])
        loss, _ = async_grpo_loss(model(**row, temperature=0.9), row, settings, total)
        loss.backward()
    return gradients(model)


ALL = pytest.mark.parametrize("settings", [MODEL, HEAD, CLIPPED], ids=["model", "head", "clipped"])


@ALL
@float64_throughout()
def test_the_gradient_of_a_packed_microbatch_equals_that_of_its_samples_one_by_one(settings):
    samples = some_samples(seed=11, count=9)
    count = sum(s.sequence.num_trained for s in samples)
    packed = loss_gradient(samples, settings)
    assert_same_gradients(packed, loss_gradient(samples, settings, count, parts=9), 1e-8)
    model = tiny_policy()  # and by transformers' own forward, from the written-out formula
    surrogate_at(model, samples, settings, 0.9).backward()
    assert_same_gradients(packed, gradients(model), 1e-8)


def surrogate_at(model, samples, settings, temperature):
    """`surrogate` at a temperature: the dense oracle on a model whose logits are divided by it."""
    head = model.get_output_embeddings()
    handle = head.register_forward_hook(lambda _m, _i, out: out / temperature)
    try:
        return surrogate(model, samples, frozen_weights(model, samples, settings), settings)
    finally:
        handle.remove()


@ALL
@float64_throughout()
def test_f037_two_ranks_with_unequal_tokens_equal_one_rank(settings):
    """Each rank divides by the trained tokens of all ranks, so their gradients add up to the one rank's."""
    samples = some_samples(seed=12, count=6)
    count = sum(s.sequence.num_trained for s in samples)
    halves = [sum(s.sequence.num_trained for s in samples[:3]), sum(s.sequence.num_trained for s in samples[3:])]
    assert halves[0] != halves[1]
    assert_same_gradients(
        loss_gradient(samples, settings), loss_gradient(samples, settings, normalizer=count, parts=2), 1e-10
    )


@ALL
def test_f037_a_step_is_the_mean_of_its_microbatches(settings):
    rng = np.random.default_rng(0)
    samples = [make_sample(rng, 3, 4) for _ in range(4)]  # micro-batches of equal trained tokens
    whole = loss_gradient(samples, settings)
    accumulated = loss_gradient(samples, settings, parts=2)
    assert_same_gradients(whole, {name: g / 2 for name, g in accumulated.items()}, 1e-10)


def test_f037_unequal_microbatches_weigh_the_same():
    samples = [make_sample(np.random.default_rng(n), 2, n) for n in (2, 5)]
    assert samples[0].sequence.num_trained != samples[1].sequence.num_trained
    first, second = loss_gradient(samples[:1], MODEL), loss_gradient(samples[1:], MODEL)
    both = loss_gradient(samples, MODEL, parts=2)
    assert_same_gradients(both, {name: first[name] + second[name] for name in both}, 1e-10)


def test_an_empty_rank_adds_nothing():
    samples = some_samples(seed=14, count=3)
    model = install_packed_forward(tiny_policy())
    row = pack_row([], 4)
    loss, sums = async_grpo_loss(model(**row, temperature=1.0), row, MODEL, 5)
    loss.backward()
    assert loss.item() == 0 and not any(g.any() for g in gradients(model).values())
    full = pack_row(samples, 4)
    _, other = async_grpo_loss(model(**full, temperature=1.0), full, MODEL, 5)
    assert sums.merge(other).events() == other.events()
