"""Gated DeltaNet hybrids on trie rows against every sample forwarded alone by transformers (F129)."""

import pytest
import torch

from asyncgrpo_core.models.forward import install_packed_forward
from tests.unit.deltanet_cases import CASES, CUTS, SAMPLES, alone, policy, tree_row, weighted
from tests.unit.policy_cases import assert_same_gradients, float64_throughout, gradients


@pytest.mark.parametrize(
    ("case", "cut"),
    [(case, "short_segments") for case in CASES]
    + [(case, cut) for case in ("qwen3_next", "qwen3_5") for cut in ("as_it_branches", "single_tokens")],
)
@float64_throughout()
def test_f129_a_tree_equals_its_samples_forwarded_alone(case, cut):
    samples = SAMPLES["forks_at_every_depth"] + SAMPLES["several_roots"]
    compare(policy(case), policy(case), samples, CUTS[cut])


@pytest.mark.parametrize(
    ("samples", "cut"),
    [
        ("identical_and_nested", "as_it_branches"),
        ("identical_and_nested", "short_segments"),
        ("many_chunks", "as_it_branches"),
        ("unrelated", "short_segments"),
    ],
)
@float64_throughout()
def test_f129_other_shapes_of_trie(samples, cut):
    compare(policy(), policy(), SAMPLES[samples], CUTS[cut])


def compare(plain, model, samples, cut):
    want = alone(plain, samples)
    weighted(want).backward()
    got = install_packed_forward(model)(**tree_row(samples, cut)).logprobs
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    weighted(got).backward()
    found = gradients(model)
    assert found.keys() == dict(model.named_parameters()).keys()
    assert_same_gradients(found, gradients(plain), 1e-9)
