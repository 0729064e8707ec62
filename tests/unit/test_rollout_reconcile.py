"""Turns to training sequences."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncgrpo_core.errors import RolloutError
from asyncgrpo_core.rollout.reconcile import reconcile
from asyncgrpo_core.types import CandidateSets, TopLogprobs, TurnRecord


def turn(prompt: list[int], output: list[int], **more) -> TurnRecord:
    more.setdefault("output_log_probs", [-0.1 * t for t in output])
    return TurnRecord(prompt, output, **more)


def test_single_turn() -> None:
    """F201: what a TrainingSequence holds."""
    top = TopLogprobs(np.arange(6, dtype=np.int32).reshape(2, 3), np.zeros((2, 3), np.float32))
    done = reconcile([turn([5, 6, 7], [8, 9], output_sampler_logprobs=top, output_versions=[4, 5])], 3, want_top=True)
    (seq,) = done.sequences
    assert seq.token_ids.tolist() == [5, 6, 7, 8, 9] and seq.token_ids.dtype == np.int32
    assert seq.loss_mask.tolist() == [False, False, False, True, True]
    np.testing.assert_allclose(seq.sampler_logprobs, [0, 0, 0, -0.8, -0.9], rtol=1e-6)
    assert seq.versions.tolist() == [4, 4, 4, 4, 5]
    assert seq.top.ids.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (done.transitions, done.forks, done.drift_tokens) == (0, 0, [])


def test_versions_fall_back_to_the_groups() -> None:
    (seq,) = reconcile([turn([5], [8, 9])], 3, want_top=False).sequences
    assert seq.versions.tolist() == [3, 3, 3] and seq.top is None


def test_a_prompt_that_extends_the_held_tokens_is_appended() -> None:
    """F184."""
    done = reconcile([turn([1, 2], [3]), turn([1, 2, 3, 4], [5, 6])], 0, want_top=False)
    (seq,) = done.sequences
    assert seq.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert seq.loss_mask.tolist() == [False, False, True, False, True, True]
    assert (done.transitions, done.forks, done.drift_tokens) == (1, 0, [0])


def test_any_other_prompt_starts_a_new_sequence() -> None:
    """F068, F185: tokens 3 and 4 were held and are rendered anew from the 3 on: drift 2."""
    done = reconcile([turn([1, 2], [3, 4]), turn([1, 2, 9], [5])], 0, want_top=False)
    first, second = done.sequences
    assert first.token_ids.tolist() == [1, 2, 3, 4] and second.token_ids.tolist() == [1, 2, 9, 5]
    assert second.loss_mask.tolist() == [False, False, False, True]
    assert (done.transitions, done.forks, done.drift_tokens) == (1, 1, [2])


def test_masked_tokens_are_context_and_have_no_head() -> None:
    top = TopLogprobs(np.array([[1], [2], [3]], np.int32), np.zeros((3, 1), np.float32))
    (seq,) = reconcile(
        [turn([1], [7, 8, 9], output_mask=[1, 0, 1], output_sampler_logprobs=top)], 0, want_top=True
    ).sequences
    assert seq.loss_mask.tolist() == [False, True, False, True]
    assert seq.sampler_logprobs[2] == 0.0 and seq.top.ids.tolist() == [[1], [3]]


def test_the_references_dicts_are_accepted() -> None:
    (seq,) = reconcile(
        [turn([1], [7, 8], output_sampler_logprobs=[{7: -0.1, 5: -2.0}, {8: -0.3}])], 0, want_top=True
    ).sequences
    assert seq.top.ids.tolist() == [[7, 5], [8, -1]]


def test_heads_of_different_width_are_joined_with_padding() -> None:
    wide = TopLogprobs(np.array([[1, 2]], np.int32), np.zeros((1, 2), np.float32))
    narrow = TopLogprobs(np.array([[4]], np.int32), np.zeros((1, 1), np.float32))
    turns = [turn([1], [7], output_sampler_logprobs=wide), turn([1, 7], [8], output_sampler_logprobs=narrow)]
    (seq,) = reconcile(turns, 0, want_top=True).sequences
    assert seq.top.ids.tolist() == [[1, 2], [4, -1]] and seq.top.logprobs[1, 1] == -np.inf


def test_nothing_to_train_on_gives_no_sequence() -> None:
    assert reconcile([turn([1], [])], 0, want_top=True).sequences == []
    assert reconcile([turn([1], [4], output_mask=[0])], 0, want_top=True).sequences == []
    assert reconcile([], 0, want_top=True).sequences == []


def test_f133_there_is_one_candidate_set_per_trained_token() -> None:
    """F199: in the reference's form (lists), and in ours."""
    lists = [[7], [8, 9], [4, 5, 10]]
    for sets in (lists, CandidateSets.from_lists(lists)):
        turns = [
            turn([1], [7, 8, 10], output_mask=[0, 1, 1], output_sampling_mask=sets),
            turn([1, 7, 8, 10], [3], output_mask=[0]),  # not trained: may lack its sets
            turn([1, 7, 8, 10, 3], [6], output_sampling_mask=[[6, 7]]),
        ]
        (seq,) = reconcile(turns, 0, want_top=False).sequences
        assert seq.sampling_mask.tolist() == [[8, 9], [4, 5, 10], [6, 7]]
        assert seq.sampling_mask.ids.dtype == np.int32
    (seq,) = reconcile([turn([1], [7])], 0, want_top=False).sequences
    assert seq.sampling_mask is None


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (TurnRecord([1], [2, 3]), "0 output_log_probs"),
        (TurnRecord([1], [2, 3], [-0.1]), "1 output_log_probs"),
        (TurnRecord([1], [2], [-0.1], output_mask=[1, 1]), "2 output_mask"),
        (TurnRecord([1], [2], [-0.1], output_versions=[1, 1]), "2 output_versions"),
    ],
)
def test_lists_that_do_not_fit_are_refused(record, text) -> None:
    """F199: log-probabilities are required when a token is trained on."""
    with pytest.raises(RolloutError, match=text):
        reconcile([record], 0, want_top=False)


def test_score_centering_without_the_head_is_refused() -> None:
    with pytest.raises(RolloutError, match="output_sampler_logprobs"):
        reconcile([turn([1], [2])], 0, want_top=True)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.booleans(), st.lists(st.integers(1, 4), max_size=4), st.lists(st.integers(1, 4), max_size=4)),
        min_size=1,
        max_size=6,
    )
)
def test_every_generated_token_is_trained_exactly_once(script) -> None:
    """F185: whatever forks, the trained tokens are the generated ones, with their own log-probabilities."""
    held: list[int] = []
    turns, serial = [], 0
    for keep, extra, output in script:
        prompt = (held if keep else held[:-1]) + extra
        log_probs = [-float(serial + i + 1) for i in range(len(output))]
        serial += len(output)
        turns.append(TurnRecord(prompt, output, log_probs))
        held = prompt + output
    done = reconcile(turns, 0, want_top=False)
    trained = Counter(
        (int(t), float(lp))
        for seq in done.sequences
        for t, lp in zip(seq.token_ids[seq.loss_mask], seq.sampler_logprobs[seq.loss_mask], strict=True)
    )
    generated = Counter((t, lp) for one in turns for t, lp in zip(one.output_ids, one.output_log_probs, strict=True))
    assert trained == generated
    assert len(done.drift_tokens) == done.transitions == len(turns) - 1


def test_conversations_that_go_on_in_turns_are_one_sequence_each() -> None:
    """F185: two sub-agents that take turns, as a harness' parallel requests come in."""
    turns = [
        turn([1, 2], [3]),
        turn([1, 7], [8]),
        turn([1, 2, 3, 4], [5]),
        turn([1, 7, 8, 9], [6]),
        turn([1, 2, 3, 4, 5, 0], [5]),
        turn([1, 7, 5], [2]),
    ]
    done = reconcile(turns, 0, want_top=False)
    assert [s.token_ids.tolist() for s in done.sequences] == [
        [1, 2, 3, 4, 5, 0, 5],
        [1, 7, 8, 9, 6],
        [1, 7, 5, 2],
    ]
    assert [s.num_trained for s in done.sequences] == [3, 2, 1]
    # the second conversation shares 1 of [1, 2, 3], the third 2 of [1, 7, 8, 9, 6]
    assert (done.transitions, done.forks, done.drift_tokens) == (5, 2, [2, 0, 0, 0, 3])


def test_the_longest_of_two_held_sequences_is_continued() -> None:
    """Two answers to one prompt, the second of which begins like the first."""
    done = reconcile([turn([1], [2]), turn([1], [2, 3]), turn([1, 2, 3, 4], [5])], 0, want_top=False)
    assert [s.token_ids.tolist() for s in done.sequences] == [[1, 2], [1, 2, 3, 4, 5]]
