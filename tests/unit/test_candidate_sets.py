"""Candidate sets laid end to end, against lists of lists."""

import pickle

import numpy as np
import pytest

from asyncgrpo_core.types import CandidateSets

LISTS = [[3, 5], [7], [], [1, 2, 9]]


@pytest.mark.parametrize("lists", [LISTS, [[4]], [[]], []])
def test_from_lists_and_back(lists):
    sets = CandidateSets.from_lists(lists)
    assert sets.tolist() == lists and len(sets) == len(lists)
    assert sets.sizes.tolist() == [len(ids) for ids in lists]
    assert (sets.ids.dtype, sets.offsets.dtype) == (np.int32, np.int64)
    assert pickle.loads(pickle.dumps(sets)).tolist() == lists


@pytest.mark.parametrize("kept", [[True] * 4, [False] * 4, [True, False, False, True], [False, True, True, False]])
def test_select(kept):
    want = [ids for ids, keep in zip(LISTS, kept, strict=True) if keep]
    assert CandidateSets.from_lists(LISTS).select(np.array(kept)).tolist() == want


@pytest.mark.parametrize("part", [slice(2), slice(1, 3), slice(0, 0), slice(None), slice(3, 99)])
def test_a_slice_is_that_of_the_list(part):
    assert CandidateSets.from_lists(LISTS)[part].tolist() == LISTS[part]


def test_join():
    parts = [LISTS, [], [[8]]]
    assert CandidateSets.join([CandidateSets.from_lists(p) for p in parts]).tolist() == [*LISTS, [8]]
    assert CandidateSets.join([]).tolist() == []
