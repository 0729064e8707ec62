"""Gated DeltaNet hybrids on trie rows against every sample forwarded alone by transformers (F129)."""

import importlib
import itertools

import numpy as np
import peft
import pytest
import torch
import transformers as hf

from asyncgrpo_core.errors import ConfigError
from asyncgrpo_core.models import deltanet
from asyncgrpo_core.models.forward import install_packed_forward, score_tokens
from tests.unit.policy_cases import VOCAB, assert_same_gradients, float64_throughout, gradients

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
    model = model_class(config_class(**{**SHAPE, **own, **extra}, attn_implementation="eager")).to(dtype)
    with torch.no_grad():  # transformers' starting values forget within a token or two: nothing would be carried far
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-5, -2)
    return model.train()


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
        ids = torch.tensor([sample])
        logp = (model(input_ids=ids, use_cache=False).logits[0, :-1] / 0.7).log_softmax(-1)
        found.append(logp.gather(1, ids[0, 1:, None])[:, 0])
    return torch.cat(found)


def weighted(logprobs):
    return (torch.linspace(0.5, 1.5, len(logprobs), dtype=logprobs.dtype) * logprobs).sum()


def random_tokens(rng, n):
    return rng.integers(3, VOCAB, n).tolist()


def forks_at_every_depth():
    rng = np.random.default_rng(1)
    trunk = random_tokens(rng, 9)
    return [trunk] + [[*trunk[:n], (trunk[n] - 2) % VOCAB, *random_tokens(rng, 1 + n % 4)] for n in range(1, 9)]


def several_roots():
    rng = np.random.default_rng(2)
    roots = [[3 + i, *random_tokens(rng, n)] for i, n in enumerate((0, 1, 5, 2))]
    return [root + random_tokens(rng, int(rng.integers(1, 7))) for root in roots for _ in range(3)]


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


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("cut", CUTS)
@float64_throughout()
def test_f129_a_tree_equals_its_samples_forwarded_alone(case, cut):
    samples = SAMPLES["forks_at_every_depth"] + SAMPLES["several_roots"]
    compare(policy(case), policy(case), samples, CUTS[cut])


@pytest.mark.parametrize("samples", ["identical_and_nested", "many_chunks", "unrelated"])
@pytest.mark.parametrize("cut", ["as_it_branches", "short_segments"])
@float64_throughout()
def test_f129_other_shapes_of_trie(samples, cut):
    compare(policy(), policy(), SAMPLES[samples], CUTS[cut])


def compare(plain, model, samples, cut):
    want = alone(plain, samples)
    weighted(want).backward()
    got = install_packed_forward(model)(**tree_row(samples, cut)).logprobs
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    weighted(got).backward()
    found = gradients(model)
    assert found.keys() == dict(model.named_parameters()).keys()
    assert_same_gradients(found, gradients(plain), 1e-9)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_f129_checkpointing_recomputes_each_row_with_its_own_tree(use_reentrant):
    """Two rows are forwarded before either is differentiated: a plan kept on the model would be the second row's."""
    rows = [tree_row(SAMPLES["forks_at_every_depth"]), tree_row(SAMPLES["identical_and_nested"], CUTS["single_tokens"])]
    model = install_packed_forward(policy())
    for row in rows:
        weighted(model(**row).logprobs).backward()
    want = gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    losses = [weighted(model(**row).logprobs) for row in rows]
    model(input_ids=torch.tensor([[3, 4, 5]]))
    for loss in losses:
        loss.backward()
    assert_same_gradients(gradients(model), want, 1e-9)


def test_f129_the_tree_matters_to_these_models():
    """The oracle can fail: with a plain row's layout of the same tokens, log-probabilities are far off."""
    samples = SAMPLES["forks_at_every_depth"]
    model = install_packed_forward(policy())
    row = tree_row(samples)
    right = model(**row).logprobs
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            layer.linear_attn.register_forward_pre_hook(_drop_plan, with_kwargs=True)
    assert (model(**row).logprobs - right).abs().max() > 0.05


def _drop_plan(module, args, kwargs):
    return args, {k: v for k, v in kwargs.items() if k != "packed_attention"}


@pytest.mark.parametrize("case", ["qwen3_next", "qwen3_5", "olmo_hybrid"])
def test_f129_bfloat16_is_as_close_to_float64_as_the_samples_alone_are(case):
    samples = SAMPLES["forks_at_every_depth"] + SAMPLES["many_chunks"]
    with float64_throughout():
        exact = alone(policy(case), samples)
    plain = policy(case, torch.bfloat16)
    got = install_packed_forward(policy(case, torch.bfloat16))(**tree_row(samples)).logprobs
    noise = (alone(plain, samples).double() - exact).abs()
    error = (got.double() - exact).abs()
    assert error.mean() < 1.5 * noise.mean() and error.max() < 2 * noise.max()


def test_f129_an_ordinary_call_is_transformers_own(monkeypatch):
    plain = policy(dtype=torch.float32)
    model = install_packed_forward(policy(dtype=torch.float32))
    ids = torch.tensor([[0, 0, 3, 4, 5], [6, 7, 8, 9, 10]])
    mask = (ids > 0).long()
    got, want = (m(input_ids=ids, attention_mask=mask).logits[mask.bool()] for m in (model, plain))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    generated = [m.eval().generate(ids[1:], max_new_tokens=5, do_sample=False).tolist() for m in (model, plain)]
    assert generated[0] == generated[1]


@float64_throughout()
def test_f129_scoring_and_adapters_go_through_the_same_layers():
    model, ids = policy(), [5, 3, 9, 9, 1, 7]
    logp = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    want = [logp[i, ids[i + 1]].item() for i in range(5)]
    assert score_tokens(install_packed_forward(model), ids) == pytest.approx(want, abs=1e-9)
    config = peft.LoraConfig(r=2, target_modules=["in_proj_qkv", "in_proj_a", "out_proj"], init_lora_weights=False)
    samples = SAMPLES["forks_at_every_depth"]
    wrapped = [peft.get_peft_model(policy(), config).double() for _ in range(2)]
    wrapped[0].load_state_dict(wrapped[1].state_dict())
    install_packed_forward(wrapped[1])
    got, want = wrapped[1](**tree_row(samples)).logprobs, alone(wrapped[0], samples)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("vision", [False, True], ids=["text", "vision_language"])
@float64_throughout()
def test_f129_a_vision_language_checkpoint_is_trained_on_text(vision):
    samples = SAMPLES["forks_at_every_depth"]
    plain = policy()
    if not vision:
        model = policy()
    else:
        tower = {"depth": 1, "hidden_size": 8, "num_heads": 2, "intermediate_size": 8, "out_hidden_size": 16}
        text = {**plain.config.to_dict(), "tie_word_embeddings": False}
        config = hf.Qwen3_5Config(text_config=text, vision_config={**tower, "num_position_embeddings": 16})
        model = hf.Qwen3_5ForConditionalGeneration(config).double()
        model.model.language_model.load_state_dict(plain.model.state_dict())
        model.lm_head.load_state_dict(plain.lm_head.state_dict())
    got = install_packed_forward(model)(**tree_row(samples)).logprobs
    torch.testing.assert_close(got, alone(plain, samples), rtol=1e-10, atol=1e-10)


class Counted:
    """In place of a function behind the hook: counts its calls."""

    def __init__(self, function):
        self.function, self.shapes = function, []

    def __call__(self, first, *args, **kwargs):
        self.shapes.append(tuple(first.shape))
        return self.function(first, *args, **kwargs)


def test_f129_calls_grow_with_the_depth_of_the_trie_and_not_with_its_segments(monkeypatch):
    module = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    model = install_packed_forward(policy(dtype=torch.float32, num_hidden_layers=1, layer_types=["linear_attention"]))
    rule = Counted(module.torch_chunk_gated_delta_rule.unplanned)
    conv = Counted(module.causal_conv1d_fn.unplanned)
    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", deltanet._planned_delta_rule(rule))
    monkeypatch.setattr(module, "causal_conv1d_fn", deltanet._planned_convolution(conv))
    rng = np.random.default_rng(0)
    prompt = random_tokens(rng, 30)
    for children in (2, 12):
        rule.shapes.clear(), conv.shapes.clear()
        middles = [[*prompt, i, 3, 4] for i in range(2)]
        row = tree_row([[*m, j, *random_tokens(rng, 5 + j)] for m, j in itertools.product(middles, range(children))])
        model(**row)
        assert len(row["parents"]) == 3 + 2 * children
        assert [shape[0] for shape in rule.shapes] == [1, 2, 2 * children]
        assert len(conv.shapes) == 2 and conv.shapes[0][2] == row["input_ids"].shape[1]


@pytest.mark.parametrize("case", CASES)
def test_f129_installing_twice_hooks_once(case):
    model = install_packed_forward(install_packed_forward(policy(case)))
    module = importlib.import_module(type(model).__module__)
    for name in ("causal_conv1d_fn", "torch_chunk_gated_delta_rule"):
        assert not hasattr(getattr(module, name).unplanned, "unplanned")


def test_f009_another_kind_of_linear_attention_is_refused_by_name():
    model = policy()
    model.config.model_type = "other_hybrid"
    with pytest.raises(ConfigError, match="3 linear attention layers.*none for model_type 'other_hybrid'"):
        deltanet.install(model.model, model.config)


def test_f009_a_layer_that_a_whole_kernel_replaced_is_refused():
    model = policy()
    layer = model.model.layers[0].linear_attn
    layer.forward = lambda hidden_states, **kwargs: hidden_states
    with pytest.raises(ConfigError, match="Qwen3_5GatedDeltaNet is replaced.*use_kernels"):
        install_packed_forward(model)


def test_f009_code_that_does_not_pass_through_the_two_functions_is_refused(monkeypatch):
    model = policy()
    monkeypatch.setattr(type(model.model.layers[0].linear_attn), "forward", lambda self, hidden_states: hidden_states)
    with pytest.raises(ConfigError, match="Qwen3_5GatedDeltaNet of transformers .*does not compute through"):
        install_packed_forward(model)
