"""Tiny models of the architectures that the trainer names, of shapes that a vLLM CPU server takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from asyncgrpo_core.models.support import saved_tensors
from tests.tiny_model import write_tokenizer

_TEXT: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
    "initializer_range": 0.2,  # larger than usual: a random model with opinions, so that a wrong weight shows
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
_GEMMA = {"sliding_window": 16, "query_pre_attn_scalar": 32}
_LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
_VISION = {
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 4,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
_VISION_TOKENS = {
    "image_token_id": 210,
    "video_token_id": 209,
    "vision_start_token_id": 208,
    "vision_end_token_id": 207,
}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4]}}

# name -> (model class, config class, fields of the text config beside `_TEXT`)
TEXT_ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {"tie_word_embeddings": False}),
    "qwen2": (
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True},  # no head_dim of its own
    ),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", _EXPERTS),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**_GEMMA, "attn_logit_softcapping": 20.0}),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**_GEMMA, **_LAYERS},
    ),
    "mistral": ("MistralForCausalLM", "MistralConfig", {"sliding_window": None}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "glm4": ("Glm4ForCausalLM", "Glm4Config", {}),
}
# Checkpoints of these hold more than parameters: saved buffers, which the trainer does not change and a server needs.
_SIGMOID_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "topk_method": "noaux_tc",  # of published configs; vLLM asks for it
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 32,  # also `head_dim`
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
_GEMMA4 = {"global_head_dim": 64, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 211}
BUFFERED_ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "glm4_moe": ("Glm4MoeForCausalLM", "Glm4MoeConfig", _SIGMOID_EXPERTS),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", {**_SIGMOID_EXPERTS, **_LATENT}),
    "minimax_m2": (
        "MiniMaxM2ForCausalLM",
        "MiniMaxM2Config",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rotary_dim": 32,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
        },
    ),
    "gemma4": ("Gemma4ForCausalLM", "Gemma4TextConfig", {**_GEMMA, **_LAYERS, **_GEMMA4}),
}
_DELTANET = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,  # vLLM's CPU kernel takes no 32
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_SHARED_EXPERT = {**_EXPERTS, "shared_expert_intermediate_size": 32}
HYBRID_ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", {**_DELTANET, "tie_word_embeddings": True}),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", {**_DELTANET, **_SHARED_EXPERT}),
    "qwen3_next": ("Qwen3NextForCausalLM", "Qwen3NextConfig", {**_DELTANET, **_SHARED_EXPERT}),
}
VISION_LANGUAGE_ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", "Qwen3VLConfig", _MROPE),
    "qwen3_vl_moe": (
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3VLMoeConfig",
        {**_MROPE, **_EXPERTS, "norm_topk_prob": True},  # vLLM asks for it, published configs have it
    ),
}
# vLLM has other names or layouts for these than their checkpoints; nothing else is asked of them.
RENAMED_ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    name: (f"{stem}ForCausalLM", f"{stem}Config", {"hidden_size": 128, **own})
    for name, stem, own in (
        ("ernie4_5_moe", "Ernie4_5_Moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32}),
        ("gpt_bigcode", "GPTBigCode", {}),
        ("gpt_neox", "GPTNeoX", {}),
        ("granitemoe", "GraniteMoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        ("phi", "Phi", {}),
    )
} | {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"hidden_size": 128}),
    "gemma4_keys_are_values": (
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        {**_GEMMA, **_LAYERS, **_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 2},
    ),
}
NEED_TORCHVISION = [*VISION_LANGUAGE_ARCHITECTURES, "qwen3_5", "qwen3_5_moe"]  # vLLM's classes import it
NAMES = [*TEXT_ARCHITECTURES, *VISION_LANGUAGE_ARCHITECTURES]


def make_architecture(
    name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **fields: Any
) -> PreTrainedModel:
    """A random model of two layers in train mode, attention and experts eager; `fields` go into its text config."""
    text = {**TEXT_ARCHITECTURES, **BUFFERED_ARCHITECTURES, **HYBRID_ARCHITECTURES, **RENAMED_ARCHITECTURES}
    if name in text:
        model_class, config_class, own = text[name]
        config = getattr(transformers, config_class)(**{**_TEXT, **own, **fields})
    else:
        model_class, config_class, own = VISION_LANGUAGE_ARCHITECTURES[name]
        config = getattr(transformers, config_class)(
            text_config={**_TEXT, **own, **fields},
            vision_config=dict(_VISION),
            tie_word_embeddings=False,
            **_VISION_TOKENS,
        )
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = getattr(transformers, model_class)(config)
    model.set_experts_implementation("eager")  # torch's grouped matrix product has no float64
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms start as ones or zeros and biases as zeros: then one is as good as another
                parameter.add_(torch.randn_like(parameter) * 0.2)
        for _, tensor in saved_tensors(model):
            if not isinstance(tensor, torch.nn.Parameter) and tensor.is_floating_point():
                tensor.add_(torch.randn_like(tensor) * 0.2)
    return model.to(dtype).train()


def write_architecture(folder: Path, name: str, *, seed: int = 0, **fields: Any) -> Path:
    """Save such a model in float32 with a tokenizer, as it would be published; returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    make_architecture(name, seed=seed, **fields).save_pretrained(folder)
    if name == "qwen3_vl_moe":  # published as [experts, inputs, outputs], which transformers saves the other way round
        file = folder / "model.safetensors"
        tensors = load_file(file)
        for key in tensors:
            if ".experts." in key:
                tensors[key] = tensors[key].transpose(1, 2).contiguous()
        save_file(tensors, file, metadata={"format": "pt"})
    return folder
