"""F133: candidate sets of a row, and the sets that cannot be."""

import dataclasses

import pytest
import torch

from asyncgrpo_core.errors import DataError
from asyncgrpo_core.packing import pack_row
from asyncgrpo_core.types import CandidateSets
from tests.unit.test_packing_layout import two_samples


def restricted(sets_a, sets_b=None):
    """The two samples of the layout's tests: targets 14, 15 with tops {14, 9}, {15}, and 16 with tops {8, 16}."""
    return [
        s
        if sets is None
        else dataclasses.replace(
            s, sequence=dataclasses.replace(s.sequence, sampling_mask=CandidateSets.from_lists(sets))
        )
        for s, sets in zip(two_samples(), (sets_a, sets_b), strict=True)
    ]


def test_f133_sets_are_laid_end_to_end_ascending_in_the_order_of_the_loss_terms():
    row = pack_row(restricted([[9, 11, 14], [15]], [[16, 20, 8]]), 2)
    assert row["candidate_ids"].tolist() == [9, 11, 14, 15, 8, 16, 20]
    assert row["candidate_offsets"].tolist() == [0, 3, 4, 7]
    assert row["candidate_ids"].dtype == row["candidate_offsets"].dtype == torch.int64


def test_a_sample_without_sets_has_empty_ones():
    row = pack_row(restricted([[9, 14], [15]]), 2)
    assert row["candidate_ids"].tolist() == [9, 14, 15] and row["candidate_offsets"].tolist() == [0, 2, 3, 3]


@pytest.mark.parametrize("samples", [two_samples(), []])
def test_without_restricted_sampling_there_are_none(samples):
    assert not {"candidate_ids", "candidate_offsets"} & pack_row(samples, 2).keys()


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ([[9, 14], [14, 16]], "lacks the sampled token 15"),
        ([[9, 15], [15]], "lacks the sampled token 14"),
        ([[10, 14], [15]], "lacks one of the sampler's most likely tokens, 9"),
        ([[9, 14], []], "is empty"),
        ([[9, 14, 14], [15]], "names a token twice"),
        ([[9, 14], [-1, 15]], "names the token -1"),
        ([[9, 14]], "1 candidate sets for 2 trained tokens"),
        ([[9, 14], [15], [3]], "3 candidate sets for 2 trained tokens"),
    ],
)
@pytest.mark.parametrize("place", [0, 1])
def test_sets_that_cannot_be_name_the_sample(sets, message, place):
    good, bad = restricted(None, [[8, 16]])[1], restricted(sets)[0]
    good, bad = dataclasses.replace(good, sample_id="good"), dataclasses.replace(bad, sample_id="bad")
    with pytest.raises(DataError, match=message) as error:
        pack_row([bad, good] if place == 0 else [good, bad], 2)
    assert "sample bad of slot (0, 3, 1)" in str(error.value)


def test_without_score_centering_only_the_sampled_token_must_be_inside():
    row = pack_row(restricted([[14], [15]], [[16]]), 0)
    assert row["candidate_ids"].tolist() == [14, 15, 16]
