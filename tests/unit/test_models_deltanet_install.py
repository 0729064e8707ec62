"""Gated DeltaNet layers inside checkpointing, wrappers, adapters and loading, and what is refused (F129, F009)."""

import importlib
import itertools
from types import SimpleNamespace

import numpy as np
import peft
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from asyncgrpo_core.errors import ConfigError
from asyncgrpo_core.models import deltanet
from asyncgrpo_core.models.forward import install_packed_forward, score_tokens
from asyncgrpo_core.models.loading import load_policy
from asyncgrpo_core.models.parameters import iter_server_parameters
from tests.unit.deltanet_cases import CASES, CUTS, SAMPLES, alone, policy, random_tokens, tree_row, weighted
from tests.unit.policy_cases import assert_same_gradients, float64_throughout, gradients


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
    exact_model = policy(case, initializer_range=0.1)  # outside: float64 would draw other starting values
    with float64_throughout():
        exact = alone(exact_model, samples)
    plain = policy(case, torch.bfloat16, initializer_range=0.1)
    got = install_packed_forward(policy(case, torch.bfloat16, initializer_range=0.1))(**tree_row(samples)).logprobs
    noise = (alone(plain, samples).double() - exact).abs()
    error = (got.double() - exact).abs()
    assert 0 < noise.mean() < 0.05
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


def vision_language(plain):
    """The text policy `plain` inside a checkpoint with a vision tower."""
    tower = {"depth": 1, "hidden_size": 8, "num_heads": 2, "intermediate_size": 8, "out_hidden_size": 16}
    text = {**plain.config.to_dict(), "tie_word_embeddings": False}
    config = hf.Qwen3_5Config(text_config=text, vision_config={**tower, "num_position_embeddings": 16})
    model = hf.Qwen3_5ForConditionalGeneration(config).to(plain.dtype)
    model.model.language_model.load_state_dict(plain.model.state_dict())
    model.lm_head.load_state_dict(plain.lm_head.state_dict())
    return model


@pytest.mark.parametrize("case", [*CASES, "vision_language"])
@float64_throughout()
def test_f129_a_saved_checkpoint_is_loaded_trained_and_sent_under_its_own_names(case, tmp_path):
    samples = SAMPLES["forks_at_every_depth"]
    plain = policy("qwen3_5" if case == "vision_language" else case)
    saved = vision_language(plain) if case == "vision_language" else plain
    saved.save_pretrained(tmp_path)
    options = {"dtype": torch.float64, "experts_implementation": "eager"}
    config = SimpleNamespace(
        model_init_kwargs=options, dtype="auto", trust_remote_code=False, router_aux_loss_coef=None, use_cpu=True
    )
    model = load_policy(str(tmp_path), config)
    assert type(model) is type(saved)
    got = install_packed_forward(model)(**tree_row(samples)).logprobs
    torch.testing.assert_close(got, alone(plain, samples), rtol=1e-10, atol=1e-10)
    weighted(got).backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained == {name for name, _ in model.named_parameters() if ".visual." not in name}
    sent = dict(iter_server_parameters(model))
    wanted = {k: v for k, v in load_file(tmp_path / "model.safetensors").items() if ".visual." not in k}
    if case == "olmo_hybrid":  # vLLM's class has the names of the model for these
        renamed = {"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"}
        wanted = {".".join(renamed.get(part, part) for part in k.split(".")): v for k, v in wanted.items()}
    assert sent.keys() == wanted.keys()
    assert all(torch.equal(sent[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_f129_fsdp_hands_the_rows_plan_on(use_reentrant, tmp_path):
    row = tree_row(SAMPLES["forks_at_every_depth"])
    model = install_packed_forward(policy("qwen3_next", torch.float32))
    weighted(model(**row).logprobs).backward()
    want = gradients(model)
    if use_reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model.enable_input_require_grads()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
        weighted(model(**row).logprobs).backward()
        assert_same_gradients({n: p.grad.full_tensor() for n, p in model.named_parameters()}, want, 1e-6)
    finally:
        torch.distributed.destroy_process_group()


@float64_throughout()
def test_f129_a_kernel_that_takes_cu_seqlens_gets_the_depths_end_to_end(monkeypatch):
    """A stand-in for fla's delta rule: the same arguments, and transformers' own function for each sequence."""
    module = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    model, row = install_packed_forward(policy()), tree_row(SAMPLES["several_roots"], CUTS["short_segments"])
    weighted(model(**row).logprobs).backward()
    want = gradients(model)
    own = module.torch_chunk_gated_delta_rule.unplanned
    seen = []

    def chunk_gated_delta_rule(
        q, k, v, g, beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=None
    ):
        bounds = cu_seqlens.tolist()
        seen.append(len(bounds) - 1)
        assert len(q) == 1 and bounds[-1] == q.shape[1] and (initial_state is None or len(initial_state) == seen[-1])
        found = [
            own(
                *(x[:, a:b] for x in (q, k, v, g, beta)),
                initial_state=None if initial_state is None else initial_state[i : i + 1],
                output_final_state=True,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            )
            for i, (a, b) in enumerate(itertools.pairwise(bounds))
        ]
        states = torch.cat([state for _, state in found]) if output_final_state else None
        return torch.cat([out for out, _ in found], 1), states

    def chosen(implementation):  # as transformers' kernel registry holds it
        def wrapped(*args, **kwargs):
            kwargs.pop("use_cache", None)
            return implementation(*args, **kwargs)

        return wrapped

    chunk_gated_delta_rule.__module__ = "fla.ops.gated_delta_rule.chunk"
    hooked = deltanet._planned_delta_rule(chosen(chunk_gated_delta_rule))
    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", hooked)
    weighted(model(**row).logprobs).backward()
    assert_same_gradients(gradients(model), want, 1e-9)
    assert sum(seen) == 3 * len(row["parents"]) and len(seen) < sum(seen) / 2


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
