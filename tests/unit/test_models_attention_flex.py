"""FlexAttention's block mask against the definition, where segments and windows end on blocks and beside them."""

import pytest
import torch

from asyncgrpo_core.models.attention_backends import flex
from asyncgrpo_core.models.row_plan import RowPlan
from tests.unit.test_models_attention import ROWS, visible_by_definition

BOUNDARIES = {
    "a_subtree_ends_with_a_block": ([256, 127, 1, 128], [-1, 0, 1, -1]),
    "one_token_before": ([256, 127, 129], [-1, 0, -1]),
    "one_token_after": ([256, 1, 127], [-1, 0, -1]),
}


@pytest.mark.parametrize("window", [None, 1, 2, 3, 40, 128, 129, 255, 256, 1000])
@pytest.mark.parametrize("name", [*ROWS, *BOUNDARIES])
def test_the_block_mask_marks_full_and_partial_blocks_rightly(name, window):
    """A block called full is visible throughout; one that is left out has no visible pair."""
    lengths, parents = (ROWS | BOUNDARIES)[name]
    plan = RowPlan.from_segments(torch.tensor([0, *lengths]).cumsum(0), torch.tensor(parents))
    flex.block_mask(plan, 77)  # another layer's window
    mask = flex.block_mask(plan, window)
    n, block, length = plan.num_tokens, flex.BLOCK, flex.padded_length(plan.num_tokens)
    visible = torch.eye(length, dtype=torch.bool)
    visible[:n, :n] = visible_by_definition(name, window, ROWS | BOUNDARIES)
    place = torch.arange(length)
    assert torch.equal(mask.mask_mod(None, None, place[:, None], place[None]), visible)
    blocks = visible.view(length // block, block, length // block, block).transpose(1, 2)
    full = blocks.flatten(2).all(-1)
    some = blocks.flatten(2).any(-1)
    said_full, said_some = torch.zeros_like(full), torch.zeros_like(some)
    for i in range(len(full)):
        said_full[i, mask.full_kv_indices[0, 0, i, : mask.full_kv_num_blocks[0, 0, i]].long()] = True
        said_some[i, mask.kv_indices[0, 0, i, : mask.kv_num_blocks[0, 0, i]].long()] = True
    assert not (said_full & ~full).any()
    assert not (some & ~said_some & ~said_full).any()
    assert not (said_full & said_some).any()
    if window is None:
        assert torch.equal(said_full, full) and torch.equal(said_full | said_some, some)


def test_padded_lengths_are_few_and_close():
    lengths = {flex.padded_length(n) for n in range(8193, 16385)}
    assert len(lengths) == 16
    for n in (1, 127, 128, 129, 5000, 23376, 79488, 10**6):
        assert n <= flex.padded_length(n) <= max(1.0625 * n, n + 127) and flex.padded_length(n) % flex.BLOCK == 0
