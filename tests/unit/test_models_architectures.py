"""Every architecture that the trainer names, in one test each: a forked row, its loss, and what a server is sent."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncgrpo_core.models.forward import PolicyOutput, install_packed_forward
from asyncgrpo_core.models.parameters import iter_server_parameters
from asyncgrpo_core.models.support import check_config, check_model, freeze_outside_text_model, outside_text_model
from asyncgrpo_core.packing import pack_row
from asyncgrpo_core.training.loss import LossSettings, async_grpo_loss
from tests.tiny_architectures import BUFFERED_ARCHITECTURES, NAMES, make_architecture
from tests.unit.policy_cases import (
    assert_same_gradients,
    dense_logprobs,
    float64_throughout,
    gradients,
    make_sample,
    trained_ids,
)

VOCAB, TOP = 200, 4
# Shorter than the samples, so that it cuts.
ALL = [*NAMES, *BUFFERED_ARCHITECTURES]
WINDOWS = {
    "gemma4": {"sliding_window": 5},
    "gemma2": {"sliding_window": 5},
    "gemma3": {"sliding_window": 5},
    "mistral": {"sliding_window": 5},
}


def policy(name):
    model = make_architecture(name, dtype=torch.float64, **WINDOWS.get(name, {}))
    check_config(model.config, None)
    check_model(model)
    freeze_outside_text_model(model)
    return model


def forked_samples(seed=11):
    """Two groups. In the first, completions fork after the prompt, inside one another, and at their last token."""
    rng = np.random.default_rng(seed)
    first = make_sample(rng, 8, 9, k=TOP, vocab=VOCAB)
    samples = [first]
    for common in (8, 8, 12, 16):
        other = make_sample(rng, 8, 9, k=TOP, vocab=VOCAB)
        tokens = other.sequence.token_ids.copy()
        tokens[:common] = first.sequence.token_ids[:common]
        samples.append(replace(other, sequence=replace(other.sequence, token_ids=tokens)))
    return [*samples, make_sample(rng, 3, 1, k=TOP, vocab=VOCAB), make_sample(rng, 6, 7, k=TOP, vocab=VOCAB)]


def dense_policy(model, samples, row):
    """What `model(**row)` has to give, from transformers' eager forward of each sample alone."""
    dense = torch.cat([dense_logprobs(model, sample) for sample in samples])
    ids = torch.cat([trained_ids(sample) for sample in samples])
    entropy = -(dense.exp() * dense).sum(dim=-1).detach()
    return PolicyOutput(dense.gather(1, ids[:, None])[:, 0], entropy, dense.gather(1, row["top_ids"]))


@float64_throughout()
@pytest.mark.parametrize("name", ALL)
def test_f188_a_forked_row_equals_its_samples_forwarded_alone(name):
    """Log-probabilities, entropy, loss and gradients; the oracle is the architecture's own code, sample by sample."""
    samples = forked_samples()
    row = pack_row(samples, TOP)
    assert row["input_ids"].numel() < sum(sample.sequence.num_tokens for sample in samples) - 30
    plain, packed = policy(name), install_packed_forward(policy(name))
    want, got = dense_policy(plain, samples, row), packed(**row, temperature=1.0)
    for field in ("logprobs", "entropy", "top_logprobs"):
        torch.testing.assert_close(getattr(got, field), getattr(want, field), rtol=1e-8, atol=1e-8)
    settings = LossSettings()
    losses = [async_grpo_loss(output, row, settings, len(row["target_ids"]))[0] for output in (got, want)]
    torch.testing.assert_close(*losses, rtol=1e-8, atol=1e-8)
    for loss in losses:
        loss.backward()
    found = gradients(packed)
    assert_same_gradients(found, gradients(plain), 1e-8)
    assert found.keys() == {n for n, _ in packed.named_parameters()} - outside_text_model(packed)


@pytest.mark.parametrize("name", ALL)
def test_f138_f189_every_weight_of_the_text_model_is_sent_once(name):
    """As many numbers as the trained text model has, and the same ones; names: test_models_parameters.py."""
    model = policy(name)
    outside = outside_text_model(model)
    held = {id(t): t for n, t in model.state_dict(keep_vars=True).items() if n not in outside}  # a tied pair is one
    trained = [tensor.detach().flatten() for tensor in held.values()]
    sent = list(iter_server_parameters(model))
    assert len({n for n, _ in sent}) == len(sent)
    every = torch.cat([tensor.flatten() for _, tensor in sent]).sort().values
    assert torch.equal(every, torch.cat(trained).sort().values)
