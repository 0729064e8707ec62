"""A tiny random Qwen3 with a word-level tokenizer, made in seconds, for tests that need a model folder."""

from __future__ import annotations

import json
from pathlib import Path

_WORDS = ["<pad>", "<|im_start|>", "<|im_end|>", "<unk>", "user", "assistant", "system", "\n", "What", "is", "plus"]
_TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m['role'] }} {{ m['content'] }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


def write_tokenizer(folder: Path) -> int:
    """Save the tokenizer into `folder`; returns its vocabulary size."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = _WORDS + [str(n) for n in range(200)]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", pad_token="<pad>", eos_token="<|im_end|>"
    )
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)
    return len(words)


def write_model(folder: Path, *, weights: bool = True, seed: int = 0) -> Path:
    """Save config, tokenizer and (unless `weights` is False) random float32 weights; returns `folder`.

    Tied embeddings, 2 layers, hidden 64: the shape of the quickstart's policy, smaller.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = write_tokenizer(folder)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.2,  # larger than usual, so that a random model has opinions that a test can see
        dtype="float32",
        architectures=["Qwen3ForCausalLM"],
    )
    if weights:
        torch.manual_seed(seed)
        Qwen3ForCausalLM(config).save_pretrained(folder)
    else:
        content = {**config.to_dict(), "architectures": ["Qwen3ForCausalLM"]}
        (folder / "config.json").write_text(json.dumps(content, indent=1))
    return folder
