"""Tiny policies, samples and dense float64 oracles shared by the tests of packing, models and loss."""

from __future__ import annotations

import contextlib

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    Glm4Config,
    Glm4ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    HyperCLOVAXConfig,
    HyperCLOVAXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from asyncgrpo_core.types import Slot, TopLogprobs, TrainingSample, TrainingSequence

VOCAB = 23


class float64_throughout(contextlib.ContextDecorator):
    """Inside, what transformers computes in float32 whatever the model's dtype (softmax, norms, rotary) is float64.

    Without it, a packed and an unpacked float64 forward agree to 1e-7 only: the last bit of a float32 softmax.
    """

    def __enter__(self):
        self._mode = _Float64Mode()
        return self._mode.__enter__()

    def __exit__(self, *exc):
        return self._mode.__exit__(*exc)

    def _recreate_cm(self):
        return type(self)()


class _Float64Mode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}

ARCHITECTURES = {
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 8, "tie_word_embeddings": True}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "llama": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": False}),
    "mistral_window": (MistralForCausalLM, MistralConfig, {"sliding_window": 3}),
    "gemma2_softcap": (
        Gemma2ForCausalLM,
        Gemma2Config,
        {
            "head_dim": 8,
            "sliding_window": 4,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 8,
        },
    ),
    "granite_scaling": (GraniteForCausalLM, GraniteConfig, {"logits_scaling": 2.5, "residual_multiplier": 0.7}),
    "cohere_scale": (CohereForCausalLM, CohereConfig, {"logit_scale": 0.3, "num_key_value_heads": 4}),
    "hyperclovax_scaling": (HyperCLOVAXForCausalLM, HyperCLOVAXConfig, {"logits_scaling": 0.4}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "gemma": (GemmaForCausalLM, GemmaConfig, {"head_dim": 8}),
    "gemma3_text": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {
            "head_dim": 8,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 8,
        },
    ),
    "glm4": (Glm4ForCausalLM, Glm4Config, {"head_dim": 8}),
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "experts_implementation": "eager",  # torch's grouped matrix product has no float64
        },
    ),
}


def tiny_policy(architecture: str = "qwen3", *, seed: int = 0, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A random two-layer model, in train mode, with transformers' own eager attention."""
    model_class, config_class, extra = ARCHITECTURES[architecture]
    torch.manual_seed(seed)
    model = model_class(config_class(**{**_SHAPE, **extra}, attn_implementation="eager"))
    return model.to(dtype).train()


def make_sample(
    rng: np.random.Generator,
    num_prompt: int,
    num_trained: int,
    *,
    k: int = 4,
    advantage: float | None = None,
    vocab: int = VOCAB,
    untrained_tail: int = 0,
) -> TrainingSample:
    """A random sample: prompt, trained tokens, and optionally untrained tokens (a tool result) after them."""
    n = num_prompt + num_trained + untrained_tail
    mask = np.zeros(n, dtype=bool)
    mask[num_prompt : num_prompt + num_trained] = True
    logits = rng.normal(size=(num_trained, vocab)) * 0.7
    logq = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    ids = np.argsort(-logq, axis=1)[:, :k]
    tokens = rng.integers(0, vocab, n).astype(np.int32)
    sampler = np.zeros(n, dtype=np.float32)
    sampler[mask] = logq[np.arange(num_trained), tokens[mask]]
    return TrainingSample(
        sequence=TrainingSequence(
            token_ids=tokens,
            loss_mask=mask,
            sampler_logprobs=sampler,
            versions=np.zeros(n, dtype=np.int32),
            top=TopLogprobs(ids.astype(np.int32), np.take_along_axis(logq, ids, axis=1).astype(np.float32)),
        ),
        advantage=float(np.float32(rng.normal())) if advantage is None else advantage,
        reward=0.0,
        group_reward_std=0.0,
        slot=Slot(0, 0, 0),
        generation=0,
        group_id=0,
        model_version=0,
        rollout_id="r",
    )


def some_samples(seed: int = 0, count: int = 6, **kwargs) -> list[TrainingSample]:
    """Samples of different lengths, one of them with a single trained token."""
    rng = np.random.default_rng(seed)
    shapes = [(int(rng.integers(1, 9)), int(rng.integers(1, 7))) for _ in range(count)]
    return [make_sample(rng, p, t, **kwargs) for p, t in shapes]


def sharing_samples(seed: int = 0) -> list[TrainingSample]:
    """Samples whose trie forks at every depth: two groups under one system prompt, turns of a conversation, a sample
    that is the prefix of another, an identical pair, single-token segments, and one that shares nothing.
    """
    rng = np.random.default_rng(seed)
    system, prompts = [3, 4, 5], [[6, 7, 8, 9], [6, 10]]
    long = rng.integers(11, VOCAB, 7).tolist()
    cases = [(system + prompts[0] + long[:depth] + [int(t)], 7) for depth, t in enumerate(rng.integers(3, 11, 7))]
    cases += [(system + prompts[1] + tail, 5) for tail in ([12, 13], [12, 14], [12], [15, 16, 17, 18])]
    cases += [(system + prompts[0] + long, 7), (system + prompts[0] + long, 7)]  # identical
    cases += [(system + prompts[0] + [11, 12, 3, 13, 14], 10), ([20, 21, 22, 19], 2)]  # a later turn; a root of its own
    samples = []
    for tokens, first_trained in cases:
        sample = make_sample(rng, first_trained, len(tokens) - first_trained)
        sample.sequence.token_ids[:] = tokens
        samples.append(sample)
    return samples


def dense_logprobs(model: PreTrainedModel, sample: TrainingSample, temperature: float = 1.0) -> torch.Tensor:
    """[trained, V] log-probabilities of one sample forwarded alone by the model's original code."""
    ids = torch.from_numpy(sample.sequence.token_ids.astype(np.int64))[None]
    logits = model(input_ids=ids, use_cache=False).logits[0] / temperature
    trained = np.flatnonzero(sample.sequence.loss_mask)
    return logits.log_softmax(-1)[torch.from_numpy(trained - 1)]


def trained_ids(sample: TrainingSample) -> torch.Tensor:
    return torch.from_numpy(sample.sequence.token_ids[sample.sequence.loss_mask].astype(np.int64))


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of every gradient, and the gradients cleared."""
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def assert_same_gradients(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float = 1e-8) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        torch.testing.assert_close(value, b[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
