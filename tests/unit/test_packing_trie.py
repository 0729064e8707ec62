"""Prefix-trie rows: what is shared, in which order, where each loss term reads (F121-F125, F127, F128, F130).

The oracle is the definition, over Python tuples: position p of a sample is the node (tokens 0 .. p, what follows).
"""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncgrpo_core.errors import DataError
from asyncgrpo_core.packing.planner import CostModel
from asyncgrpo_core.packing.trie import PrefixTrie
from asyncgrpo_core.packing.trie_layout import key_value_index, lay_out, tree_layout
from asyncgrpo_core.types import Slot, TrainingSample, TrainingSequence
from tests.unit.policy_cases import dense_logprobs, float64_throughout, tiny_policy

P1, P2, P3, A1, A2, B1, B2 = 11, 12, 13, 21, 22, 31, 32


def sample_of(tokens, trained=None, advantage=1.0):
    """`trained`: positions; by default every one but the first."""
    mask = np.zeros(len(tokens), bool)
    mask[list(range(1, len(tokens)) if trained is None else trained)] = True
    n = len(tokens)
    sequence = TrainingSequence(np.array(tokens, np.int32), mask, np.zeros(n, np.float32), np.zeros(n, np.int32))
    return TrainingSample(sequence, advantage, 0.0, 0.0, Slot(0, 3, 1), 0, 0, 0, "r")


def figure():
    return [sample_of([P1, P2, P3, A1, A2], [3, 4]), sample_of([P1, P2, P3, B1, B2], [3, 4])]


def segments_of(layout):
    return [layout.input_ids[a:b].tolist() for a, b in itertools.pairwise(layout.cu_segments)]


def test_f123_f124_every_index_list_of_the_references_figure():
    layout = tree_layout(figure())
    assert segments_of(layout) == [[P1, P2], [P3, A1, A2], [P3, B1, B2]]
    assert layout.num_tokens == 8
    assert layout.position_ids.tolist() == [0, 1, 2, 3, 4, 2, 3, 4]
    assert layout.parents.tolist() == [-1, 0, 0]
    paths = [layout.path(s).tolist() for s in range(3)]
    assert paths == [[0, 1], [0, 1, 2, 3, 4], [0, 1, 5, 6, 7]]
    assert layout.target_positions.tolist() == [2, 3, 5, 6]
    assert layout.target_ids.tolist() == [A1, A2, B1, B2]
    assert layout.sample_index.tolist() == [0, 0, 1, 1]
    index, cu = key_value_index(layout)
    assert index.tolist() == [0, 1, 0, 1, 2, 3, 4, 0, 1, 5, 6, 7] and cu.tolist() == [0, 2, 7, 12]


def test_f122_identical_samples_share_every_token_and_keep_their_own_loss_terms():
    """Both terms of a position have one target; advantages and log-probabilities are looked up by sample_index."""
    layout = tree_layout([sample_of([5, 6, 7], advantage=1.0), sample_of([5, 6, 7], advantage=-2.0)])
    assert layout.input_ids.tolist() == [5, 6, 7] and layout.leaves.tolist() == [0, 0]
    assert layout.target_positions.tolist() == [0, 1, 0, 1]
    assert layout.target_ids.tolist() == [6, 7, 6, 7]
    assert layout.sample_index.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("short_first", [True, False])
def test_f123_a_sample_that_is_a_prefix_keeps_its_last_token_to_itself(short_first):
    pair = [sample_of([5, 6]), sample_of([5, 6, 7])]
    layout = tree_layout(pair if short_first else pair[::-1])
    ends = [[6], [6, 7]]
    assert segments_of(layout) == [[5], *(ends if short_first else ends[::-1])]


def test_f123_single_token_samples():
    layout = tree_layout([sample_of([5]), sample_of([5, 6]), sample_of([5]), sample_of([7])])
    assert segments_of(layout) == [[5], [5, 6], [7]]
    assert layout.leaves.tolist() == [0, 1, 0, 2]
    assert layout.target_positions.tolist() == [1] and layout.sample_index.tolist() == [1]


def test_f121_turns_of_a_conversation_share_what_is_context_in_one_and_trained_in_the_other():
    """Turn 1 trains [3 4] after [1 2]; turn 2 has them as context, a tool result [8 9], and trains [5 6]."""
    layout = tree_layout([sample_of([1, 2, 3, 4], [2, 3]), sample_of([1, 2, 3, 4, 8, 9, 5, 6], [6, 7])])
    assert segments_of(layout) == [[1, 2, 3], [4], [4, 8, 9, 5, 6]]
    assert layout.target_positions.tolist() == [1, 2, 6, 7]
    assert layout.target_ids.tolist() == [3, 4, 5, 6]


def test_f125_a_system_message_is_shared_across_prompts():
    system = [1, 2, 3, 4]
    group_a = [sample_of([*system, 10, 11, 20]), sample_of([*system, 10, 11, 21])]
    group_b = [sample_of([*system, 12, 30])]
    layout = tree_layout(group_a + group_b)
    assert segments_of(layout) == [[1, 2, 3], [4, 10], [11, 20], [11, 21], [4, 12, 30]]


def test_f127_samples_that_share_nothing_are_one_segment_each():
    samples = [sample_of([1, 2, 3]), sample_of([4, 2, 3]), sample_of([9])]
    layout = tree_layout(samples)
    assert layout.num_tokens == sum(s.sequence.num_tokens for s in samples)
    assert layout.cu_segments.tolist() == [0, 3, 6, 7] and (layout.parents == -1).all()
    index, cu = key_value_index(layout)
    assert index.tolist() == list(range(7)) and cu.tolist() == layout.cu_segments.tolist()


def test_f128_keys_gathered_are_the_last_positions_of_the_segments_plus_one():
    """A prompt of 100 and 8 completions of 10: 99 + 8 x 110 keys, against 8 x 110 without sharing."""
    samples = [sample_of([*range(1, 101), *range(200 + 10 * i, 210 + 10 * i)]) for i in range(8)]
    layout = tree_layout(samples)
    assert layout.num_tokens == 99 + 8 * 11
    assert len(key_value_index(layout)[0]) == 99 + 8 * 110


def test_f130_fits_counts_shared_tokens_once_and_loss_terms_every_time():
    """Samples that share everything add no token: the loss terms alone fill the row."""
    trie = PrefixTrie()
    taken = 0
    while trie.fits(again := sample_of([1, 2, 3, 4]), budget=14):
        trie.add(again)
        taken += 1
    assert taken == 4 and (trie.num_tokens, trie.num_trained) == (4, 12)
    assert trie.fits(sample_of([7, 8, 9]), budget=14) and not trie.fits(sample_of([7, 8, 9, 10]), budget=14)
    long_context = sample_of(range(100, 110), [9])  # 10 tokens and 1 term: exactly the tokens that are left
    assert trie.fits(long_context, budget=14)
    assert not trie.fits(sample_of(range(100, 111), [9]), budget=14)


def test_asking_does_not_change_the_row_and_answers_stay_right_after_an_add():
    trie = PrefixTrie()
    first, second = figure()
    trie.add(first)
    assert [trie.added_tokens(second), trie.shared_tokens(second), trie.added_tokens(first)] == [3, 2, 0]
    assert trie.num_tokens == 5
    trie.add(second)
    assert (trie.num_tokens, trie.added_tokens(second)) == (8, 0)


def test_malformed_samples_are_refused_with_their_slot():
    with pytest.raises(DataError, match=r"\(0, 3, 1\) has no tokens"):
        PrefixTrie().add(sample_of([]))
    with pytest.raises(DataError, match="its first token is trained"):
        tree_layout([sample_of([1, 2], [0])])
    uneven = sample_of([1, 2, 3])
    uneven.sequence.loss_mask = np.array([False, True])
    with pytest.raises(DataError, match="have 3 and 2 entries"):
        tree_layout([uneven])


def test_a_row_without_samples_has_no_tokens():
    layout = tree_layout([])
    assert layout.num_tokens == 0 and layout.cu_segments.tolist() == [0] and len(layout.target_ids) == 0
    assert {a.dtype for a in vars(layout).values()} == {a.dtype for a in vars(tree_layout(figure())).values()}


# Two token ids, so that forks at every depth, prefixes and repeats are common.
tokens = st.lists(st.integers(0, 1), min_size=1, max_size=9)
cases = st.lists(tokens.flatmap(lambda t: st.tuples(st.just(t), st.sets(st.integers(0, len(t) - 1)))), max_size=12)


def made(drawn):
    return [sample_of(t, sorted(trained - {0})) for t, trained in drawn]


def nodes_of(sample):
    """The definition of a node, for each position of a sample."""
    ids = tuple(sample.sequence.token_ids.tolist())
    return [(ids[: p + 1], ids[p + 1] if p + 1 < len(ids) else None) for p in range(len(ids))]


def depth_first(samples):
    """Row index of every node: nested dicts in order of first sight, walked by recursion."""
    tree = {}
    for sample in samples:
        level = tree
        for node in nodes_of(sample):
            level = level.setdefault(node, {})
    order = {}

    def visit(level):
        for node, below in level.items():
            order[node] = len(order)
            visit(below)

    visit(tree)
    return order, tree


def runs_of(tree, order):
    """[(row indices of the segment, row indices of its path)]: runs of nodes with one child, by recursion."""
    found = []

    def visit(level, path):
        for first, children in level.items():
            node, below, run = first, children, [order[first]]
            while len(below) == 1:
                ((node, below),) = below.items()
                run.append(order[node])
            found.append((run, path + run))
            visit(below, path + run)

    visit(tree, [])
    return found


@settings(max_examples=300, deadline=None)
@given(cases)
def test_f121_f123_the_row_is_the_brute_force_trie(drawn):
    """Every index, in both directions: samples rebuild from the row, and the row holds nothing else.

    A row index is shared by exactly the (sample, position) pairs of one node, so it has one next token: its loss
    terms, however many, have one target. Every trained token is read at the index of its own predecessor.
    """
    samples = made(drawn)
    layout = tree_layout(samples)
    order, tree = depth_first(samples)
    assert layout.num_tokens == len(order)
    terms = []
    for i, sample in enumerate(samples):
        rows = layout.sample_tokens(i)
        assert rows.tolist() == [order[node] for node in nodes_of(sample)]
        assert layout.input_ids[rows].tolist() == sample.sequence.token_ids.tolist()
        assert layout.position_ids[rows].tolist() == list(range(len(rows)))
        trained = np.flatnonzero(sample.sequence.loss_mask)
        terms += [(int(rows[t - 1]), int(sample.sequence.token_ids[t]), i) for t in trained]
    read = (layout.target_positions.tolist(), layout.target_ids.tolist(), layout.sample_index.tolist())
    assert list(zip(*read, strict=True)) == terms
    assert all(len({target for at, target, _ in terms if at == row}) == 1 for row in {at for at, _, _ in terms})
    runs = runs_of(tree, order)
    bounds = layout.cu_segments.tolist()
    assert [list(range(a, b)) for a, b in itertools.pairwise(bounds)] == [run for run, _ in runs]
    assert [layout.path(s).tolist() for s in range(len(layout.parents))] == [path for _, path in runs]
    index, cu = key_value_index(layout)
    assert [index[a:b].tolist() for a, b in itertools.pairwise(cu)] == [path for _, path in runs]


@settings(max_examples=150, deadline=None)
@given(cases, st.integers(0, 50))
def test_f121_counts_and_costs_grow_as_announced(drawn, hidden):
    """added_tokens and added_cost before each add, against the whole row counted anew by the definition."""
    trie, model, seen, samples = PrefixTrie(), CostModel(hidden), set(), made(drawn)
    cost = 0.0
    for sample in samples:
        new = set(nodes_of(sample)) - seen
        assert trie.added_tokens(sample) == len(new)
        cost += trie.added_cost(sample, model)
        trie.add(sample)
        seen |= new
        assert trie.num_tokens == len(seen)
        # a token at position p sees p + 1 keys; n tokens alone cost n (n + 12 d), which is 2 p + 1 + 12 d a token
        assert cost == sum(2 * len(prefix) - 1 + 12 * hidden for prefix, _ in seen) == trie.cost(model)
    assert trie.num_trained == sum(s.sequence.num_trained for s in samples) == len(lay_out(trie).target_ids)


@pytest.mark.parametrize("architecture", ["qwen3", "mistral_window"])
@float64_throughout()
def test_f121_f122_logprobs_equal_each_samples_lone_forward(architecture):
    """transformers' own model on the row, each token shown its path (and window), against each sample alone."""
    samples = [
        sample_of([3, 4, 5, 6, 7, 8], [4, 5]),
        sample_of([3, 4, 5, 6, 9], [4]),
        sample_of([3, 4, 10, 11]),
        sample_of([3, 4, 5, 6, 7, 8], [5]),  # the first again
        sample_of([12]),
        sample_of([13, 14, 15]),
        sample_of([3, 4, 5, 6, 7, 8, 16, 17, 18], [7, 8]),  # its next turn
    ]
    layout, model = tree_layout(samples), tiny_policy(architecture)
    visible = np.zeros((layout.num_tokens,) * 2, bool)
    window = getattr(model.config, "sliding_window", None) or layout.num_tokens
    for i in range(len(samples)):
        rows = layout.sample_tokens(i)
        for p, row in enumerate(rows):
            visible[row, rows[max(0, p + 1 - window) : p + 1]] = True
    mask = torch.where(torch.from_numpy(visible), 0.0, -torch.inf).double()[None, None]
    logits = model(
        input_ids=torch.from_numpy(layout.input_ids)[None],
        position_ids=torch.from_numpy(layout.position_ids)[None],
        attention_mask=mask,
        use_cache=False,
    ).logits[0]
    together = logits[torch.from_numpy(layout.target_positions)].log_softmax(-1)
    alone = torch.cat([dense_logprobs(model, s) for s in samples])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-12)
