"""Tiny gated DeltaNet hybrids, sets of samples and brute-force trie rows, shared by the tests of models/deltanet*."""

import numpy as np
import torch
import transformers as hf

from tests.unit.policy_cases import VOCAB

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 12,
    "experts_implementation": "eager",  # torch's grouped matrix product has no float64
}
CASES = {
    "qwen3_next": (hf.Qwen3NextForCausalLM, hf.Qwen3NextConfig, {**EXPERTS, "decoder_sparse_step": 2}),
    "qwen3_5": (hf.Qwen3_5ForCausalLM, hf.Qwen3_5TextConfig, {}),
    "qwen3_5_moe": (hf.Qwen3_5MoeForCausalLM, hf.Qwen3_5MoeTextConfig, EXPERTS),
    "olmo_hybrid": (hf.OlmoHybridForCausalLM, hf.OlmoHybridConfig, {"linear_allow_neg_eigval": True}),
    "kernel_of_2": (hf.Qwen3_5ForCausalLM, hf.Qwen3_5TextConfig, {"linear_conv_kernel_dim": 2}),
}


def policy(case="qwen3_5", dtype=torch.float64, **extra):
    model_class, config_class, own = CASES[case]
    torch.manual_seed(0)
    model = model_class(config_class(**{**SHAPE, **own, **extra}, attn_implementation="eager"))
    with torch.no_grad():  # transformers' starting values forget within a token or two: nothing would be carried far
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-5, -2)
    return model.to(dtype).train()


def tree_row(samples, cut=lambda prefix: False):
    """A row from the set of all prefixes of the samples: a brute-force trie, one node per distinct prefix.

    A segment ends where the trie branches or a sample ends, and after every prefix for which `cut` is true.
    """
    children = {}
    for sample in samples:
        for n in range(len(sample)):
            children.setdefault(tuple(sample[:n]), {})[tuple(sample[: n + 1])] = None
    ends = {tuple(s) for s in samples}
    order, segment_of, starts, parents = {}, {}, [], []

    def visit(node, segment):
        order[node] = len(order)
        segment_of[node] = segment
        below = list(children.get(node, ()))
        for child in below:
            if len(below) > 1 or node in ends or cut(node):
                starts.append(len(order))
                parents.append(segment)
                visit(child, len(starts) - 1)
            else:
                visit(child, segment)

    for root in children[()]:
        starts.append(len(order))
        parents.append(-1)
        visit(root, len(starts) - 1)
    terms = [(order[tuple(s[:n])], s[n]) for s in samples for n in range(1, len(s))]
    positions, targets = zip(*terms, strict=True)
    return {
        "input_ids": torch.tensor([[node[-1] for node in order]]),
        "position_ids": torch.tensor([[len(node) - 1 for node in order]]),
        "cu_segments": torch.tensor([*starts, len(order)], dtype=torch.int32),
        "parents": torch.tensor(parents),
        "target_positions": torch.tensor(positions),
        "target_ids": torch.tensor(targets),
        "temperature": 0.7,
    }


def alone(model, samples):
    """Log-probability of every token but the first of each sample, by the model's own forward of that sample."""
    found = []
    for sample in samples:
        ids = torch.tensor([sample], device=model.device)
        logp = (model(input_ids=ids, use_cache=False).logits[0, :-1] / 0.7).log_softmax(-1)
        found.append(logp.gather(1, ids[0, 1:, None])[:, 0])
    return torch.cat(found)


def weighted(logprobs):
    weights = torch.linspace(0.5, 1.5, len(logprobs), dtype=logprobs.dtype, device=logprobs.device)
    return (weights * logprobs).sum()


def random_tokens(rng, n):
    return rng.integers(3, VOCAB, n).tolist()


def forks_at_every_depth():
    rng = np.random.default_rng(1)
    trunk = random_tokens(rng, 8)
    return [trunk] + [[*trunk[:n], (trunk[n] - 2) % VOCAB, *random_tokens(rng, 1 + n % 4)] for n in range(1, 8)]


def several_roots():
    rng = np.random.default_rng(2)
    roots = [[3 + i, *random_tokens(rng, n)] for i, n in enumerate((0, 1, 5, 2))]
    return [root + random_tokens(rng, int(rng.integers(1, 7))) for root in roots for _ in range(2)]


def identical_and_nested():
    rng = np.random.default_rng(3)
    a, b = random_tokens(rng, 7), random_tokens(rng, 5)
    return [a, a, b, a[:4], a, [*b, 5], b]


def many_chunks():
    rng = np.random.default_rng(4)
    prompt = random_tokens(rng, 70)
    middle = prompt + random_tokens(rng, 3)
    return [prompt + random_tokens(rng, n) for n in (1, 66, 130)] + [middle + random_tokens(rng, n) for n in (2, 65)]


def unrelated():
    rng = np.random.default_rng(5)
    return [[3 + i, *random_tokens(rng, n)] for i, n in enumerate((1, 2, 5, 9))]


SAMPLES = {f.__name__: f() for f in (forks_at_every_depth, several_roots, identical_and_nested, many_chunks, unrelated)}
CUTS = {
    "as_it_branches": lambda prefix: False,
    "single_tokens": lambda prefix: True,
    "short_segments": lambda prefix: sum(prefix) % 2 == 0,  # chains of segments, many below the kernel size
}
