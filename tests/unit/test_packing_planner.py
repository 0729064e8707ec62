"""RowPlanner: arrival order, token budget, closing, balance between ranks."""

import dataclasses
import itertools

import numpy as np
import pytest
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncgrpo_core.packing import CostModel, RowPlanner
from tests.unit.policy_cases import make_sample

_GROUPS = itertools.count()


def sample_of(num_tokens: int, num_trained: int = 1):
    """A sample of a group of its own that shares no token with any other."""
    group = next(_GROUPS)
    sample = make_sample(np.random.default_rng(num_tokens), num_tokens - num_trained, num_trained, k=1)
    sample.sequence.token_ids[0] = 1000 + group
    return dataclasses.replace(sample, group_id=group)


def completions(group: int, prompt: list[int], tails: list[list[int]]):
    """Samples of one group, their completion trained."""
    made = []
    for tail in tails:
        sample = make_sample(np.random.default_rng(0), len(prompt), len(tail), k=1)
        sample.sequence.token_ids[:] = prompt + tail
        made.append(dataclasses.replace(sample, group_id=group))
    return made


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


def test_the_cost_of_a_model_is_that_of_its_text_parts_width():
    assert CostModel.of_model(hf.GPT2Config(n_embd=96)) == CostModel(96)
    vision_language = hf.Qwen3VLConfig(text_config={"hidden_size": 48}, vision_config={"hidden_size": 32})
    assert CostModel.of_model(vision_language) == CostModel(48)


def test_f125_f130_shared_tokens_count_once_against_the_budget():
    """A prompt of 8 and four completions of 2: 7 + 4 x 3 = 19 forwarded tokens instead of 40; the fifth would be 22."""
    planner = RowPlanner(20)
    samples = completions(1, list(range(8)), [[20 + i, 30 + i] for i in range(5)])
    closed = [planner.add(sample).closed for sample in samples]
    assert closed[:4] == [None] * 4 and closed[4] is not None
    assert closed[4].row_tokens == (19,) and len(closed[4].samples) == 4
    assert planner.flush().row_tokens == (10,)


def test_f126_a_group_stays_together_while_its_row_has_room():
    """Without the rule the second sample of each group would go to the other, emptier rank."""
    planner = RowPlanner(100, world_size=2)
    a = completions(1, list(range(8)), [[20 + i, 30 + i] for i in range(4)])
    b = completions(2, list(range(40, 48)), [[60 + i, 70 + i] for i in range(4)])
    for pair in zip(a, b, strict=True):
        for sample in pair:
            assert planner.add(sample).closed is None
    batch = planner.flush()
    assert [{s.group_id for s in row} for row in batch.rows] in ([{1}, {2}], [{2}, {1}])
    assert batch.row_tokens == (19, 19)


def test_a_rows_cost_counts_what_a_shared_token_costs_once():
    cost = CostModel(hidden_size=0)
    planner = RowPlanner(100, cost=cost)
    for sample in completions(1, list(range(8)), [[20, 30], [21, 31]]):
        planner.add(sample)
    assert planner.flush().row_costs == (cost.sample_cost(10) * 2 - cost.sample_cost(7),)


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
