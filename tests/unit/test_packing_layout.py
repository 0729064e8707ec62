"""pack_row: every index, target and recorded log-probability of a row, by hand."""

import dataclasses

import numpy as np
import pytest
import torch

from asyncgrpo_core.errors import DataError
from asyncgrpo_core.packing import pack_row
from asyncgrpo_core.types import Slot, TopLogprobs, TrainingSample, TrainingSequence
from tests.unit.policy_cases import make_sample, some_samples


def by_hand(tokens, mask, logprobs, advantage, top=None):
    return TrainingSample(
        sequence=TrainingSequence(
            token_ids=np.array(tokens, np.int32),
            loss_mask=np.array(mask, bool),
            sampler_logprobs=np.array(logprobs, np.float32),
            versions=np.zeros(len(tokens), np.int32),
            top=top,
        ),
        advantage=advantage,
        reward=0.0,
        group_reward_std=0.0,
        slot=Slot(0, 3, 1),
        generation=0,
        group_id=0,
        model_version=0,
        rollout_id="r",
    )


def two_samples():
    top_a = TopLogprobs.from_dicts([{14: -0.1, 9: -2.5}, {15: -0.3}])
    top_b = TopLogprobs.from_dicts([{8: -0.2, 16: -3.0}])
    a = by_hand([11, 12, 13, 14, 15], [0, 0, 0, 1, 1], [0, 0, 0, -0.1, -0.3], 1.5, top_a)
    b = by_hand([21, 16, 17], [0, 1, 0], [0, -3.0, 0], -2.0, top_b)
    return [a, b]


def test_f127_two_samples_that_share_nothing():
    row = pack_row(two_samples(), 2)
    assert row["input_ids"].tolist() == [[11, 12, 13, 14, 15, 21, 16, 17]]
    assert row["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]
    assert row["cu_segments"].tolist() == [0, 5, 8] and row["parents"].tolist() == [-1, -1]
    assert row["target_positions"].tolist() == [2, 3, 5]
    assert row["target_ids"].tolist() == [14, 15, 16]
    assert row["sampler_logprobs"].tolist() == pytest.approx([-0.1, -0.3, -3.0])
    assert row["advantages"].tolist() == [1.5, 1.5, -2.0]
    assert row["sample_index"].tolist() == [0, 0, 1]
    assert row["top_ids"].tolist() == [[14, 9], [15, -1], [8, 16]]
    assert row["top_logprobs"][1].tolist() == pytest.approx([-0.3, -np.inf])


def test_f121_f122_the_example_of_the_docstring():
    """One prompt of three tokens, two completions: the prompt's first two are there once."""
    a = by_hand([1, 2, 3, 4, 5], [0, 0, 0, 1, 1], [0, 0, 0, -0.1, -0.3], 1.5)
    b = by_hand([1, 2, 3, 6, 7], [0, 0, 0, 1, 1], [0, 0, 0, -0.5, -0.6], -1.5)
    row = pack_row([a, b], 0)
    assert row["input_ids"].tolist() == [[1, 2, 3, 4, 5, 3, 6, 7]]
    assert row["position_ids"].tolist() == [[0, 1, 2, 3, 4, 2, 3, 4]]
    assert row["cu_segments"].tolist() == [0, 2, 5, 8] and row["parents"].tolist() == [-1, 0, 0]
    assert row["target_positions"].tolist() == [2, 3, 5, 6] and row["target_ids"].tolist() == [4, 5, 6, 7]
    assert row["sampler_logprobs"].tolist() == pytest.approx([-0.1, -0.3, -0.5, -0.6])
    assert row["advantages"].tolist() == [1.5, 1.5, -1.5, -1.5] and row["sample_index"].tolist() == [0, 0, 1, 1]


def test_types_are_what_the_contract_says():
    row = pack_row(some_samples(), 4)
    kinds = {name: value.dtype for name, value in row.items()}
    ints = {"input_ids", "position_ids", "parents", "target_positions", "target_ids", "sample_index", "top_ids"}
    assert {n for n, d in kinds.items() if d == torch.int64} == ints
    assert kinds["cu_segments"] == torch.int32
    assert {n for n, d in kinds.items() if d == torch.float32} == {"sampler_logprobs", "advantages", "top_logprobs"}


def test_a_head_wider_than_k_keeps_the_k_most_likely():
    """A server that adds the sampled token to its top k reports k + 1 columns."""
    top = TopLogprobs(np.array([[7, 3, 5]], np.int32), np.array([[-6.0, -0.5, -1.5]], np.float32))
    row = pack_row([by_hand([1, 7], [0, 1], [0, -6.0], 1.0, top)], 2)
    assert row["top_ids"].tolist() == [[3, 5]]
    assert row["top_logprobs"].tolist() == [[-0.5, -1.5]]


def test_a_narrower_head_is_padded():
    row = pack_row(two_samples(), 4)
    assert row["top_ids"].tolist() == [[14, 9, -1, -1], [15, -1, -1, -1], [8, 16, -1, -1]]
    assert torch.isneginf(row["top_logprobs"][row["top_ids"] < 0]).all()


def test_without_score_centering_there_is_no_head():
    row = pack_row(
        [dataclasses.replace(s, sequence=dataclasses.replace(s.sequence, top=None)) for s in two_samples()], 0
    )
    assert row["top_ids"].shape == (3, 0) and row["top_logprobs"].shape == (3, 0)


def test_a_rank_without_samples_gets_one_untrained_token():
    row = pack_row([], 5)
    assert (
        row["input_ids"].shape == (1, 1) and row["cu_segments"].tolist() == [0, 1] and row["parents"].tolist() == [-1]
    )
    assert row["target_ids"].shape == (0,) and row["top_ids"].shape == (0, 5)
    assert {n: v.dtype for n, v in row.items()} == {n: v.dtype for n, v in pack_row(some_samples(), 4).items()}


def test_a_sample_without_trained_tokens_only_takes_part_as_context():
    rng = np.random.default_rng(0)
    row = pack_row([make_sample(rng, 4, 0), make_sample(rng, 2, 2)], 4)
    assert row["cu_segments"].tolist() == [0, 4, 8]
    assert row["sample_index"].tolist() == [1, 1] and row["target_positions"].tolist() == [5, 6]


def broken(**changes):
    sample = two_samples()[0]
    return dataclasses.replace(sample, sequence=dataclasses.replace(sample.sequence, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_mask": np.array([1, 0, 0, 1, 0], bool)}, "first token is trained"),
        ({"sampler_logprobs": np.zeros(4, np.float32)}, "have 5, 5 and 4 entries"),
        ({"top": None}, "no top log-probabilities for 2 trained tokens"),
        ({"top": TopLogprobs.from_dicts([{1: -1.0}])}, "1 rows of top log-probabilities for 2 trained"),
    ],
)
def test_a_malformed_sample_is_refused_with_its_slot(changes, message):
    with pytest.raises(DataError, match=message) as caught:
        pack_row([two_samples()[1], broken(**changes)], 2)
    assert "(0, 3, 1)" in str(caught.value)
