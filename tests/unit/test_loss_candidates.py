"""F133: both losses on tokens drawn from recorded candidate sets, against the formulas written out in float64."""

import numpy as np
import pytest
import torch

from asyncgrpo_core.models.forward import install_packed_forward
from asyncgrpo_core.packing import pack_row
from asyncgrpo_core.training.loss import LossSettings, async_grpo_loss
from asyncgrpo_core.types import CandidateSets, TopLogprobs
from tests.unit.policy_cases import (
    VOCAB,
    assert_same_gradients,
    dense_logprobs,
    float64_throughout,
    gradients,
    make_sample,
    tiny_policy,
    trained_ids,
)

MODEL, HEAD = LossSettings(score_centering_tail="model"), LossSettings(score_centering_tail="head")
CLIPPED = LossSettings(score_centering=False, epsilon_high=0.3)
ALL = pytest.mark.parametrize("settings", [MODEL, HEAD, CLIPPED], ids=["model", "head", "clipped"])
TEMPERATURE = 0.9


def restricted_samples(k, seed=0, sizes=(1, 2, 3, 4, 6, VOCAB), spread=0.7, model=None):
    """Samples whose tokens were drawn from sets of these sizes, with the sampler's top k of each.

    The sampler is random, or `model` itself: on-policy.
    """
    rng = np.random.default_rng(seed)
    samples = [make_sample(rng, 3, 4), make_sample(rng, 1, 1), make_sample(rng, 5, 6)]
    turn = iter(range(1000))
    for sample in samples:
        seq = sample.sequence
        places, sets, rows = np.flatnonzero(seq.loss_mask), [], []
        for t in places:
            ids = np.sort(rng.permutation(VOCAB)[: sizes[next(turn) % len(sizes)]])
            seq.token_ids[t] = rng.choice(ids)
            sets.append(ids.tolist())
        for t, ids in zip(places, sets, strict=True):
            z = rng.normal(size=len(ids)) * spread
            if model is not None:
                with torch.no_grad():
                    z = dense_logprobs(model, sample, TEMPERATURE)[int((places < t).sum()), ids].numpy()
            logq = z - np.log(np.exp(z).sum())
            seq.sampler_logprobs[t] = logq[ids.index(seq.token_ids[t])]
            best = np.argsort(-logq)[:k]
            rows.append({ids[i]: logq[i] for i in best})
        seq.top = TopLogprobs.from_dicts(rows)
        seq.sampling_mask = CandidateSets.from_lists(sets)
    return samples


def written_out(model, samples, settings):
    """The loss, token by token, from dense log-probabilities renormalised over each token's set."""
    total, count = 0.0, 0
    for sample in samples:
        seq = sample.sequence
        logp = dense_logprobs(model, sample, TEMPERATURE)
        recorded = seq.sampler_logprobs[seq.loss_mask].astype(np.float64)
        for t, (y, ids) in enumerate(zip(trained_ids(sample).tolist(), seq.sampling_mask.tolist(), strict=True)):
            inside = logp[t] - torch.logsumexp(logp[t, ids], dim=0)  # over the set; read there only
            top = {v: x for v, x in zip(seq.top.ids[t], seq.top.logprobs[t], strict=True) if v >= 0}
            total = total + token_loss(inside, y, ids, recorded[t], top, sample.advantage, settings)
            count += 1
    return total / count


def token_loss(logp, y, ids, log_q_y, top, advantage, settings):
    r = (logp[y] - log_q_y).exp()
    in_range = settings.clip_min <= r.item() <= settings.clip_max
    if not settings.score_centering:
        clipped = r.clamp(1 - settings.epsilon, 1 + settings.epsilon_upper)
        return -torch.minimum(r * advantage, clipped * advantage) if in_range else 0.0 * r
    p = logp.detach().exp()
    q = {int(v): float(np.exp(np.float64(x))) for v, x in top.items()}
    alpha = 0.0
    if settings.score_centering_tail == "model" and len(q) < len(ids):
        rho = (1 - sum(q.values())) / (1 - sum(p[v].item() for v in q))
        alpha = 1.0 if settings.clip_min <= 1 / rho <= settings.clip_max else 0.0  # rho * (1 / rho)
    w_y = r.item() if in_range else 0.0
    centre = 0.0
    for v, q_v in q.items():
        r_v = p[v].item() / q_v
        w_v = r_v if settings.clip_min <= r_v <= settings.clip_max else 0.0
        centre = centre + (q_v * w_v - alpha * p[v].item()) * logp[v]
    return -advantage * (w_y * logp[y] - centre)


def of_the_product(samples, settings, k, model=None):
    packed = install_packed_forward(model or tiny_policy(seed=1))
    row = pack_row(samples, k if settings.score_centering else 0)
    loss, sums = async_grpo_loss(packed(**row, temperature=TEMPERATURE), row, settings, len(row["target_ids"]))
    loss.backward()
    return loss.item(), gradients(packed), sums


@pytest.mark.parametrize("k", [2, 4, VOCAB])
@ALL
@float64_throughout()
def test_f133_loss_and_gradient_are_the_formulas_over_the_sets(settings, k):
    samples = restricted_samples(k)
    loss, found, _ = of_the_product(samples, settings, k)
    model = tiny_policy(seed=1)
    want = written_out(model, samples, settings)
    want.backward()
    assert loss == pytest.approx(want.item(), abs=1e-9)
    assert_same_gradients(found, gradients(model), 1e-8)


@ALL
@float64_throughout()
def test_f133_finite_differences_of_a_two_layer_model(settings):
    """Of the written-out loss with its weights frozen at the start."""
    samples = restricted_samples(3, seed=4)
    _, found, _ = of_the_product(samples, settings, 3)
    model = tiny_policy(seed=1)
    start = {id(s): dense_logprobs(model, s, TEMPERATURE).detach() for s in samples}
    h, checked = 1e-6, 0
    for name, parameter in model.named_parameters():
        flat = parameter.data.view(-1)
        i = int(np.random.default_rng(len(name)).integers(flat.numel()))
        values = []
        for step in (h, -h):
            flat[i] += step
            with torch.no_grad():
                values.append(frozen(model, samples, start, settings))
            flat[i] -= step
        want = (values[0] - values[1]) / (2 * h)
        assert found[name].view(-1)[i].item() == pytest.approx(want, rel=1e-4, abs=1e-7), (name, i)
        checked += abs(want) > 1e-5
    assert checked > 10


def frozen(model, samples, start, settings):
    """`written_out` as a function of the weights alone: ratios and coefficients are those of `start`."""
    total, count = 0.0, 0
    for sample in samples:
        seq = sample.sequence
        now, then = dense_logprobs(model, sample, TEMPERATURE), start[id(sample)]
        recorded = seq.sampler_logprobs[seq.loss_mask].astype(np.float64)
        for t, (y, ids) in enumerate(zip(trained_ids(sample).tolist(), seq.sampling_mask.tolist(), strict=True)):
            top = {v: x for v, x in zip(seq.top.ids[t], seq.top.logprobs[t], strict=True) if v >= 0}
            value = now[t] - torch.logsumexp(now[t, ids], dim=0)
            if settings.score_centering:
                # a linear function of log p: its coefficients are the gradient at the start
                at = (then[t] - torch.logsumexp(then[t, ids], dim=0)).requires_grad_()
                with torch.enable_grad():
                    loss = token_loss(at, y, ids, recorded[t], top, sample.advantage, settings)
                    coefficients = torch.autograd.grad(loss, at)[0]
                total += float((coefficients[ids] * value[ids]).sum())
            else:
                total += float(token_loss(value, y, ids, recorded[t], top, sample.advantage, settings))
            count += 1
    return total / count


def reinforce(samples):
    model = tiny_policy(seed=1)
    total, count = 0.0, 0
    for sample in samples:
        logp = dense_logprobs(model, sample, TEMPERATURE)
        for t, (y, ids) in enumerate(
            zip(trained_ids(sample).tolist(), sample.sequence.sampling_mask.tolist(), strict=True)
        ):
            total = total - sample.advantage * (logp[t, y] - torch.logsumexp(logp[t, ids], dim=0))
            count += 1
    (total / count).backward()
    return gradients(model)


@pytest.mark.parametrize(
    ("settings", "k"), [(MODEL, 2), (MODEL, VOCAB), (HEAD, VOCAB)], ids=["model_2", "model_all", "head_all"]
)
@float64_throughout()
def test_f133_on_policy_it_is_reinforce_over_the_sets(settings, k):
    """p = q. The recorded log-probabilities are float32, so to 1e-7; the other ratios are 1 to that."""
    samples = restricted_samples(k, model=tiny_policy(seed=1))
    _, found, sums = of_the_product(samples, settings, k)
    assert_same_gradients(found, reinforce(samples), 1e-5)
    ratio = {e[0]: e for e in sums.events()}["sampling/importance_sampling_ratio/mean"]
    assert ratio[2] / max(ratio[3], 1) == pytest.approx(1, abs=1e-5)


@float64_throughout()
def test_f133_over_the_whole_vocabulary_the_same_ratios_are_biased():
    samples = restricted_samples(4, model=tiny_policy(seed=1), sizes=(2, 3))
    for sample in samples:
        sample.sequence.sampling_mask = None
    _, _, sums = of_the_product(samples, MODEL, 4)
    ratio = {e[0]: e for e in sums.events()}["sampling/importance_sampling_ratio/mean"]
    assert ratio[2] / max(ratio[3], 1) < 0.6  # the mass of the sets


@float64_throughout()
def test_f133_both_tails_agree_exactly_where_the_sampler_reported_the_whole_set():
    samples = restricted_samples(4, sizes=(1, 2, 3, 4))
    model, head = (of_the_product(samples, settings, 4) for settings in (MODEL, HEAD))
    assert model[0] == head[0]
    assert_same_gradients(model[1], head[1], 0)
    other = restricted_samples(4, sizes=(5, 6))
    assert of_the_product(other, MODEL, 4)[0] != of_the_product(other, HEAD, 4)[0]


@pytest.mark.parametrize("settings", [MODEL, HEAD], ids=["model", "head"])
@float64_throughout()
def test_f133_a_constant_advantage_moves_nothing_on_average_over_a_set(settings):
    """Enumeration of one token over its set, each drawn with the sampler's probability."""
    (sample, *_) = restricted_samples(6, sizes=(6,), spread=1.2)
    seq = sample.sequence
    place = int(np.flatnonzero(seq.loss_mask)[0])
    seq.loss_mask[:] = False
    seq.loss_mask[place] = True
    seq.sampling_mask, seq.top = seq.sampling_mask[:1], TopLogprobs(seq.top.ids[:1], seq.top.logprobs[:1])
    sample.advantage = 1.0
    expected, size = {}, 0.0
    for y, logq in zip(seq.top.ids[0].tolist(), seq.top.logprobs[0].tolist(), strict=True):
        seq.token_ids[place], seq.sampler_logprobs[place] = y, logq
        for name, grad in of_the_product([sample], settings, 6)[1].items():
            expected[name] = expected.get(name, 0) + np.exp(logq) * grad
            size = max(size, grad.abs().max().item())
    assert size > 1e-2
    assert max(grad.abs().max().item() for grad in expected.values()) < 1e-6  # float32 log-probabilities


@ALL
def test_f133_sets_of_one_token_move_nothing(settings):
    samples = restricted_samples(2, sizes=(1,))
    loss, found, sums = of_the_product(samples, settings, 2)
    assert max(grad.abs().max().item() for grad in found.values()) < 1e-15
    assert not any(name.startswith("entropy") and value == 0 for name, _, value, _ in sums.events())
    assert np.isfinite(loss)


@float64_throughout()
def test_f133_a_row_of_restricted_and_unrestricted_samples_is_the_sum_of_both():
    mixed = restricted_samples(4)
    mixed[1].sequence.sampling_mask = None
    _, together, _ = of_the_product(mixed, MODEL, 4)
    counts = [sample.sequence.num_trained for sample in mixed]
    parts = [of_the_product([sample], MODEL, 4)[1] for sample in mixed]
    weighted = {
        name: sum(part[name] * n for part, n in zip(parts, counts, strict=True)) / sum(counts) for name in together
    }
    assert_same_gradients(together, weighted, 1e-9)
