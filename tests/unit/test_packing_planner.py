"""RowPlanner: arrival order, token budget, closing, balance between ranks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncgrpo_core.packing import CostModel, RowPlanner
from tests.unit.policy_cases import make_sample


def sample_of(num_tokens: int, num_trained: int = 1):
    return make_sample(np.random.default_rng(num_tokens), num_tokens - num_trained, num_trained, k=1)


def run(lengths, budget, world_size=1, cost=None):
    planner = RowPlanner(budget, world_size, cost)
    samples = [sample_of(n) for n in lengths]
    closed, oversize = [], []
    for sample in samples:
        placement = planner.add(sample)
        if placement.closed is not None:
            closed.append(placement.closed)
        if placement.oversize:
            oversize.append(sample)
    last = planner.flush()
    return samples, closed + ([last] if last else []), oversize


def lengths_of(microbatch):
    return [[s.sequence.num_tokens for s in row] for row in microbatch.rows]


def test_a_row_closes_when_the_next_sample_does_not_fit():
    _, batches, _ = run([4, 5, 3, 9, 2], budget=10)
    assert [lengths_of(b) for b in batches] == [[[4, 5]], [[3]], [[9]], [[2]]]
    assert batches[0].row_tokens == (9,)


def test_the_budget_may_be_filled_exactly():
    _, batches, oversize = run([4, 6, 10], budget=10)
    assert [lengths_of(b) for b in batches] == [[[4, 6]], [[10]]]
    assert not oversize


def test_a_sample_longer_than_the_budget_is_refused_and_disturbs_nothing():
    samples, batches, oversize = run([4, 11, 5], budget=10)
    assert oversize == [samples[1]]
    assert [lengths_of(b) for b in batches] == [[[4, 5]]]


def test_every_rank_gets_a_row_and_the_microbatch_closes_when_no_rank_has_room():
    _, batches, _ = run([6, 6, 4, 4, 1], budget=10, world_size=2)
    assert [lengths_of(b) for b in batches] == [[[6, 4], [6, 4]], [[1], []]]


def test_ranks_are_balanced_by_attention_cost_not_by_tokens():
    """Eight samples of 10 tokens and one of 40 have 120 tokens; quadratic cost puts the long one alone."""
    _, batches, _ = run([10] * 4 + [40] + [10] * 4, budget=100, world_size=2, cost=CostModel(hidden_size=0))
    (batch,) = batches
    assert sorted(map(sorted, lengths_of(batch))) == [[10] * 8, [40]]


def test_a_long_sample_that_comes_last_is_spread_again():
    """In arrival order the rows would be (30, 60) and (30); largest first gives 60 | 30 + 30."""
    _, (batch,), _ = run([30, 30, 60], budget=100, world_size=2, cost=CostModel(hidden_size=0))
    assert sorted(map(sorted, lengths_of(batch))) == [[30, 30], [60]]


def test_counts_of_a_microbatch():
    planner = RowPlanner(100, 2)
    for n, trained in ((10, 3), (20, 4), (5, 1)):
        planner.add(sample_of(n, trained))
    assert [s.sequence.num_tokens for s in planner.open_samples].count(20) == 1
    batch = planner.flush()
    assert batch is not None
    assert (batch.num_tokens, batch.num_trained, len(batch.samples)) == (35, 8, 3)
    assert planner.flush() is None and planner.open_samples == []


def test_the_cost_is_linear_for_short_and_quadratic_for_long_samples():
    cost = CostModel(hidden_size=100)
    assert cost.sample_cost(20) / cost.sample_cost(10) == pytest.approx(2, rel=0.02)
    assert cost.sample_cost(200_000) / cost.sample_cost(100_000) == pytest.approx(4, rel=0.02)


@pytest.mark.parametrize(("budget", "world_size"), [(0, 1), (8, 0), (-3, 2)])
def test_impossible_budgets_are_refused(budget, world_size):
    with pytest.raises(ValueError, match="token_budget >= 1"):
        RowPlanner(budget, world_size)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(2, 14), max_size=40), st.integers(6, 30), st.integers(1, 4))
def test_no_sample_is_lost_or_doubled_and_no_row_exceeds_the_budget(lengths, budget, world_size):
    samples, batches, oversize = run(lengths, budget, world_size)
    seen = [s.sample_id for b in batches for s in b.samples] + [s.sample_id for s in oversize]
    assert sorted(seen) == sorted(s.sample_id for s in samples)
    for batch in batches:
        assert len(batch.rows) == world_size
        for row, tokens in zip(batch.rows, batch.row_tokens, strict=True):
            assert sum(s.sequence.num_tokens for s in row) == tokens <= budget
