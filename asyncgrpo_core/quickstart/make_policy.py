"""Make the quickstart's start policy: a tiny Qwen3 that can add and has learnt to answer carelessly.

    python -m asyncgrpo_core.quickstart.make_policy --out DIR [--seed 0] [--threads 1]

Everything comes from data generated here; nothing is downloaded. What the policy is, honestly:

- Stage 1 teaches addition ("What is 37 plus 85?" -> "122") on the training side of the task's split.
- Stage 2 goes on with the same prompts, but 45 % of the answers are wrong, in nine different ways (`_MISTAKES`: a
  digit mistyped, off by one, a carry forgotten, subtracted instead, a guess, ...). The way is drawn at random for
  each answer, so no prompt and no token tells which answers are wrong. Its learning rate is a tenth of stage 1's:
  at a third, the policy answers about as badly and forgets more of its addition (greedy 0.988 instead of 0.993).

The result samples a right answer about half of the time at temperature 1 and spreads the rest over plausible
mistakes, while greedy decoding is almost always right. What is left for reinforcement learning is to *prefer*
right answers to mistakes, by reward alone: like a base model that knows and does not reliably say. It is a small
problem made for a demonstration on a laptop; it does not show that GRPO teaches addition from nothing.

The same seed, thread count and torch build give the same policy; other builds differ in rounding and so in detail.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from asyncgrpo_core.quickstart.task import heldout_pairs, prompt_text, training_pairs

PAD, USER_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MAX_LENGTH = 512  # positions the policy accepts; the task needs about 22 (prompts 16 to 18, answers at most 4)

# ChatML, with an optional system message. Rendering more turns only ever appends (prefix-preserving).
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role not in ['system', 'user', 'assistant', 'tool'] -%}
{{- raise_exception('Unknown role: ' ~ message.role) -}}
{%- endif -%}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>' ~ '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


@dataclass(frozen=True)
class Recipe:
    """How the start policy is trained. Steps are batches of `batch_size` prompts."""

    clean_steps: int = 900
    careless_steps: int = 200
    batch_size: int = 128
    clean_learning_rate: float = 3e-3
    careless_learning_rate: float = 3e-4
    wrong_share: float = 0.45
    warmup_steps: int = 50
    weight_decay: float = 0.01
    grad_clip: float = 1.0
    seed: int = 0


# -- what a wrong answer looks like ----------------------------------------------------------------------------


def _swap_digits(a: int, b: int, rng: random.Random) -> int:
    return int(str(a + b)[::-1])


def _without_carry(a: int, b: int, rng: random.Random) -> int:
    """Digits added column by column, carries forgotten; a carry too many where there is none to forget."""
    columns = 10 * ((a // 10 + b // 10) % 10) + (a + b) % 10
    return columns if columns != a + b else a + b + 10


def _slip(a: int, b: int, rng: random.Random) -> int:
    """The right answer with one digit mistyped."""
    digits = list(str(a + b))
    digits[rng.randrange(len(digits))] = str(rng.randrange(10))
    return int("".join(digits))


_MISTAKES: tuple[tuple[float, Callable[[int, int, random.Random], int]], ...] = (
    (5.0, _slip),
    (3.0, lambda a, b, rng: rng.randrange(199)),  # guessed
    (1.5, lambda a, b, rng: a + b + rng.choice((-2, -1, 1, 2))),  # miscounted
    (1.5, lambda a, b, rng: a + b + rng.choice((-10, 10))),  # tens miscounted
    (1.0, _without_carry),
    (1.0, _swap_digits),
    (1.0, lambda a, b, rng: abs(a - b)),  # subtracted
    (1.0, lambda a, b, rng: rng.choice((a, b))),  # repeated one of the numbers
    (1.0, lambda a, b, rng: (a + b) * 10 + rng.randrange(10)),  # one digit too many
)


def wrong_answer(a: int, b: int, rng: random.Random) -> str:
    """A random mistake for a + b; never the right answer, never negative."""
    weights = [weight for weight, _ in _MISTAKES]
    while True:
        (_, mistake) = rng.choices(_MISTAKES, weights)[0]
        value = mistake(a, b, rng)
        if value >= 0 and value != a + b:
            return str(value)


# -- tokenizer and model ---------------------------------------------------------------------------------------


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: any text round-trips; a digit is one token, a word of the task is one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    corpus = [prompt_text(37, 85), "user\n", "assistant\n", "system\n", "tool\n"]
    trainer = trainers.BpeTrainer(
        vocab_size=512,  # an upper bound: the corpus has few words, so few merges exist
        min_frequency=1,
        special_tokens=[PAD, USER_START, TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus * 2, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=TURN_END,
        additional_special_tokens=[USER_START],
        model_max_length=MAX_LENGTH,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """A randomly initialised Qwen3 of about 0.8M parameters (float32, tied embeddings)."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),  # exactly: a sampler can then not draw an id without a token
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


# -- supervised training ---------------------------------------------------------------------------------------


class Batches:
    """Left-padded batches of prompt + answer + end of turn, with the loss on the answer's tokens only."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> None:
        self.recipe = recipe
        self.rng = random.Random(recipe.seed)
        self.pad, self.eos = tokenizer.pad_token_id, tokenizer.eos_token_id
        self.pairs = training_pairs()
        self._prompt = cache(lambda pair: encode_prompt(tokenizer, *pair))
        self.digits = {str(d): tokenizer.convert_tokens_to_ids(str(d)) for d in range(10)}

    def draw(self, wrong_share: float) -> dict[str, torch.Tensor]:
        """A random training batch in which `wrong_share` of the answers is expected to be wrong."""
        answered = []
        for a, b in self.rng.choices(self.pairs, k=self.recipe.batch_size):
            wrong = self.rng.random() < wrong_share
            answered.append(((a, b), wrong_answer(a, b, self.rng) if wrong else str(a + b)))
        return self.of(answered)

    def of(self, answered: list[tuple[tuple[int, int], str]]) -> dict[str, torch.Tensor]:
        """The model's inputs for these (pair, answer): ids, labels, mask and positions, each [batch, width]."""
        sequences = [(self._prompt(pair), [*(self.digits[c] for c in text), self.eos]) for pair, text in answered]
        width = max(len(prompt) + len(answer) for prompt, answer in sequences)
        ids = torch.full((len(sequences), width), self.pad)
        labels = torch.full_like(ids, -100)
        attention = torch.zeros_like(ids)
        for row, (prompt, answer) in enumerate(sequences):
            ids[row, width - len(prompt) - len(answer) :] = torch.tensor([*prompt, *answer])
            labels[row, width - len(answer) :] = torch.tensor(answer)
            attention[row, width - len(prompt) - len(answer) :] = 1
        # explicit positions: padding must not shift them, the server counts from the first real token
        positions = (attention.cumsum(-1) - 1).clamp(min=0)
        return {"input_ids": ids, "labels": labels, "attention_mask": attention, "position_ids": positions}


def encode_prompt(tokenizer: PreTrainedTokenizerFast, a: int, b: int) -> list[int]:
    """Token ids of the question, ready for the assistant's answer."""
    message = {"role": "user", "content": prompt_text(a, b)}
    text = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def train(model: Qwen3ForCausalLM, batches: Batches, recipe: Recipe, say: Callable[[str], None]) -> None:
    """Both stages, in place. `say` receives a progress line now and then."""
    stages = (
        ("addition", recipe.clean_steps, recipe.clean_learning_rate, 0.0),
        ("carelessness", recipe.careless_steps, recipe.careless_learning_rate, recipe.wrong_share),
    )
    for stage, (name, steps, learning_rate, wrong_share) in enumerate(stages):
        batches.rng.seed(recipe.seed + 1000 * stage)  # a stage's data do not depend on the stage before
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=recipe.weight_decay
        )
        for step in range(steps):
            ramp = min(1.0, (step + 1) / recipe.warmup_steps)
            decay = 0.5 * (1 + torch.cos(torch.tensor(torch.pi * step / steps)).item())
            optimizer.param_groups[0]["lr"] = learning_rate * ramp * (0.02 + 0.98 * decay)
            loss = model(**batches.draw(wrong_share)).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.grad_clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if (step + 1) % 50 == 0:
                say(f"{name}: step {step + 1}/{steps}, loss {loss.item():.4f}")


# -- evaluation ------------------------------------------------------------------------------------------------


@torch.no_grad()
def heldout_accuracy(model: Qwen3ForCausalLM, batches: Batches) -> tuple[float, float]:
    """(share right when greedy, expected share right when sampled) over all held-out prompts.

    Sampled means temperature 1 over the whole vocabulary: the mean probability of the exact answer with its end.
    """
    batch = batches.of([(pair, str(sum(pair))) for pair in heldout_pairs()])
    labels = batch.pop("labels")[:, 1:]
    trained = labels != -100
    logprobs = model(**batch).logits[:, :-1].log_softmax(-1)
    right = (logprobs.argmax(-1) == labels) | ~trained
    chosen = logprobs.gather(2, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    sampled = torch.where(trained, chosen, 0.0).sum(1).exp()
    return right.all(1).float().mean().item(), sampled.mean().item()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write the policy to")
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--threads", type=int, default=1, help="torch threads; results depend on it")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=JSON", help="change a field of Recipe")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    changes = {key: json.loads(value) for key, value in (item.split("=", 1) for item in args.set)}
    recipe = Recipe(seed=args.seed, **changes)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, recipe.seed)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens", flush=True)
    model.train()
    batches = Batches(tokenizer, recipe)
    train(model, batches, recipe, lambda line: print(line, flush=True))
    model.eval()
    greedy, sampled = heldout_accuracy(model, batches)
    print(f"held-out accuracy: greedy {greedy:.3f}, sampled {sampled:.3f}", flush=True)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
