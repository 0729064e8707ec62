"""The GPU benchmark's row, its bound by operations and its two layouts (F131); its times are taken on a GPU."""

import pytest
import torch
from transformers import Qwen3Config

from asyncgrpo_core.models.forward import install_packed_forward
from asyncgrpo_core.packing import pack_row
from benchmarks.gpu_trainer import SIZES, VOCAB, build, operations, plain_layout, samples_of, trunk


def config(size):
    return Qwen3Config(**SIZES[size], num_key_value_heads=8, head_dim=128, vocab_size=VOCAB)


@pytest.mark.parametrize(("size", "bound"), [("0.6b", 3.05), ("1.7b", 3.26)])
def test_f131_the_bound_of_the_measured_row(size, bound):
    """79,488 tokens plain, 23,404 as a trie: 3.40 times fewer tokens, and fewer times less work, by hand."""
    samples = samples_of(4, 8, 2004, 480, 1000)
    tree, plain = pack_row(samples, 8), plain_layout(samples)
    assert plain["input_ids"].shape[1] == 79488 and tree["input_ids"].shape[1] == 4 * (2003 + 8 * 481)
    shape = config(size)
    heads = shape.num_attention_heads * 128
    per_token = shape.hidden_size * (2 * heads + 2 * 1024 + 3 * shape.intermediate_size)
    shared, own = 2003 * 2004 / 2, 481 * 2003 + 481 * 482 / 2
    plain_pairs, tree_pairs = 32 * 2484 * 2485 / 2, 4 * (shared + 8 * own)
    by_hand = (79488 * per_token + 2 * heads * plain_pairs) / (23404 * per_token + 2 * heads * tree_pairs)
    assert operations(plain, shape) / operations(tree, shape) == pytest.approx(by_hand, rel=1e-12)
    assert by_hand == pytest.approx(bound, abs=0.005)


def test_both_layouts_compute_the_same():
    """What is timed against each other gives the same hidden states of the trained tokens."""
    samples = samples_of(2, 3, 20, 6, 1000)
    model = install_packed_forward(build("tiny", torch.float32, "cpu"))
    tree, plain = pack_row(samples, 8), plain_layout(samples)
    with torch.no_grad():
        from_tree = trunk(model, tree, "sdpa")[0, tree["target_positions"]]
        positions = torch.cat([torch.arange(19, 25) + 26 * i for i in range(6)])
        from_plain = trunk(model, plain, "sdpa")[0, positions]
    torch.testing.assert_close(from_tree, from_plain, rtol=1e-4, atol=1e-4)
