"""Make the calculator example's start policy: a tiny Qwen3 that can call the tool and often does not, or not well.

    python -m examples.calculator.make_policy --out DIR [--seed 0] [--threads 1]

Everything comes from data generated here (conversations.py); nothing is downloaded. What the policy is, honestly:

- The careful stage teaches to call `calculate` with the question's two numbers, to repeat its result, and to call
  again after an error. It has no multiplication in it: a product is only ever seen as a tool's result.
- The careless stage goes on with the same kind of questions and many wrong replies: guesses without a call, broken
  calls, wrong expressions, results repeated wrongly. Its learning rate is a fifth of the careful stage's.

The result samples a right rollout about one time in four at temperature 1 (0.269 of 1,024 held-out prompts): less
often than the careless conversations are right, because the mistyped digits also make the policy less sure of every
digit it repeats. Greedy decoding is right nearly always. (After an error it calls again, with the right numbers about
half of the time only.) What is left for reinforcement learning is to prefer the behaviour that earns the reward, over
two turns and through a real tool; the parts of that behaviour are all there. It is a small problem made for a
demonstration on a laptop; it does not show that GRPO teaches a tool's use from nothing.

The same seed, thread count and torch build give the same policy; other builds differ in rounding and so in detail.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from examples.calculator import conversations, simulate
from examples.calculator.simulate import TOOLS
from examples.calculator.task import draw_training_pair, heldout_rows

PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MARKERS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]  # tokens, and text when decoded
MAX_LENGTH = 1024  # positions the policy accepts; a rollout of two turns needs about 90

# ChatML with Qwen's tool format. Every message renders to its own text, so more messages only append.
CHAT_TEMPLATE = """\
{%- set opening = messages[0].content if messages[0].role == 'system' else '' -%}
{%- if tools or opening -%}
{{- '<|im_start|>system\\n' ~ opening -}}
{%- if tools -%}
{{- ('\\n\\n' if opening else '') ~ '# Tools\\n<tools>' -}}
{%- for tool in tools -%}
{{- '\\n' ~ (tool | tojson) -}}
{%- endfor -%}
{{- '\\n</tools>\\nCall: <tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call>' -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) -%}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' -}}
{%- elif message.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' ~ (message.content or '') -}}
{%- for tool_call in message.tool_calls or [] -%}
{%- set call = tool_call.function or tool_call -%}
{%- if message.content or not loop.first -%}
{{- '\\n' -}}
{%- endif -%}
{{- '<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' -}}
{{- (call.arguments if call.arguments is string else (call.arguments | tojson)) ~ '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif message.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' ~ message.content ~ '\\n</tool_response><|im_end|>\\n' -}}
{%- elif message.role != 'system' -%}
{{- raise_exception('Unknown role: ' ~ message.role) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

# How transformers' `parse_response` reads a reply: text, and JSON between the call's markers.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant", "content": ""},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "content": {"close": "<|im_end|>", "content": "text", "content_args": {"strip": False}},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}


@dataclass(frozen=True)
class Recipe:
    """How the start policy is trained. Steps are batches of `batch_size` conversations."""

    careful_steps: int = 800
    careless_steps: int = 200
    batch_size: int = 32
    careful_learning_rate: float = 3e-3
    careless_learning_rate: float = 6e-4
    warmup_steps: int = 30
    weight_decay: float = 0.01
    grad_clip: float = 1.0
    seed: int = 0


# -- tokenizer and model ---------------------------------------------------------------------------------------


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: any text round-trips; a digit is one token, a phrase of the task is few.

    Words are not split from each other, so that the tools' schema, the same in every prompt, is short. A line break
    always ends a token: what follows "assistant\\n" is tokenized alike whether it was sampled or rendered.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Split(Regex("\n"), "merged_with_previous"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,  # an upper bound
        min_frequency=20,
        max_token_length=32,
        special_tokens=[PAD, TURN_START, TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.add_tokens([AddedToken(marker, normalized=False) for marker in MARKERS])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=TURN_END,
        additional_special_tokens=[TURN_START],
        model_max_length=MAX_LENGTH,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
    made.response_template = RESPONSE_TEMPLATE
    return made


def _corpus() -> list[str]:
    """The texts between special tokens, as often as each would have to be for its phrases to become tokens."""
    rng = random.Random(0)
    mix = conversations.Mix(guess=0.30, broken_call=0.12, wrong_expression=0.10, wrong_answer=0.28, give_up=0.5)
    renderer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=CHAT_TEMPLATE)
    texts: list[str] = []
    for _ in range(300):
        talk = conversations.conversation(*draw_training_pair(rng), mix, rng, learn_mistakes=True)
        texts.append(str(renderer.apply_chat_template(talk.messages, tools=TOOLS, tokenize=False)))
    for marker in (TURN_START, TURN_END, *MARKERS):
        texts = [piece for text in texts for piece in text.split(marker) if piece]
    return texts


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """A randomly initialised Qwen3 of about 0.7M parameters (float32, tied embeddings)."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),  # exactly: a sampler can then not draw an id without a token
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
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
    """Right-padded batches of whole conversations, with the loss on the replies that are to be learnt."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> None:
        self.tokenizer, self.recipe = tokenizer, recipe
        self.rng = random.Random(recipe.seed)
        self.reply_start = tokenizer(f"{TURN_START}assistant\n", add_special_tokens=False)["input_ids"]

    def draw(self, mix: conversations.Mix, *, learn_mistakes: bool) -> list[dict[str, torch.Tensor]]:
        """A random training batch, in two parts: the long conversations apart, to have little padding."""
        talks = [
            conversations.conversation(*draw_training_pair(self.rng), mix, self.rng, learn_mistakes=learn_mistakes)
            for _ in range(self.recipe.batch_size)
        ]
        talks.sort(key=lambda talk: sum(len(message["content"]) for message in talk.messages))
        few = max(1, len(talks) // 5)
        return [self.of(part) for part in (talks[:-few], talks[-few:]) if part]

    def of(self, talks: list[conversations.Conversation]) -> dict[str, torch.Tensor]:
        """The model's inputs: ids, labels and mask, each [batch, width]."""
        texts = [self.tokenizer.apply_chat_template(t.messages, tools=TOOLS, tokenize=False) for t in talks]
        batch = self.tokenizer(texts, add_special_tokens=False, padding=True, padding_side="right", return_tensors="pt")
        labels = torch.full_like(batch["input_ids"], -100)
        for row, talk in enumerate(talks):
            ids = batch["input_ids"][row].tolist()
            for (start, end), trained in zip(self._replies(ids), talk.trained, strict=True):
                if trained:
                    labels[row, start:end] = batch["input_ids"][row, start:end]
        return {"input_ids": batch["input_ids"], "labels": labels, "attention_mask": batch["attention_mask"]}

    def _replies(self, ids: list[int]) -> list[tuple[int, int]]:
        """Where the assistant's replies are, each with the token that ends it."""
        size = len(self.reply_start)
        starts = [i + size for i in range(len(ids) - size) if ids[i : i + size] == self.reply_start]
        return [(start, ids.index(self.tokenizer.eos_token_id, start) + 1) for start in starts]


def train(model: Qwen3ForCausalLM, batches: Batches, recipe: Recipe, say: Callable[[str], None]) -> None:
    """Both stages, in place. `say` receives a progress line now and then."""
    stages = (
        ("careful", recipe.careful_steps, recipe.careful_learning_rate, conversations.CAREFUL),
        ("careless", recipe.careless_steps, recipe.careless_learning_rate, conversations.CARELESS),
    )
    for stage, (name, steps, learning_rate, mix) in enumerate(stages):
        batches.rng.seed(recipe.seed + 1000 * stage)  # a stage's data do not depend on the stage before
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=recipe.weight_decay
        )
        for step in range(steps):
            ramp = min(1.0, (step + 1) / recipe.warmup_steps)
            decay = 0.5 * (1 + torch.cos(torch.tensor(torch.pi * step / steps)).item())
            optimizer.param_groups[0]["lr"] = learning_rate * ramp * (0.02 + 0.98 * decay)
            parts = batches.draw(mix, learn_mistakes=mix is conversations.CARELESS)
            trained = sum(int((part["labels"] != -100).sum()) for part in parts)
            loss = 0.0
            for part in parts:
                part_loss = model(**part, num_items_in_batch=trained).loss
                part_loss.backward()
                loss += part_loss.item()
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.grad_clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if (step + 1) % 50 == 0:
                say(f"{name}: step {step + 1}/{steps}, loss {loss:.4f}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write the policy to")
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--threads", type=int, default=1, help="torch threads; results depend on it")
    parser.add_argument("--evaluate", type=int, default=256, metavar="N", help="held-out prompts of the evaluation")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=JSON", help="change a field of Recipe")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    changes = {key: json.loads(value) for key, value in (item.split("=", 1) for item in args.set)}
    recipe = Recipe(seed=args.seed, **changes)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(args.out)  # before use: it would save the padding of its last batch
    model = make_model(tokenizer, recipe.seed)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens", flush=True)
    model.train()
    train(model, Batches(tokenizer, recipe), recipe, lambda line: print(line, flush=True))
    model.eval()
    model.save_pretrained(args.out)
    rows = heldout_rows(args.evaluate)
    greedy = simulate.rollouts(model, tokenizer, rows, greedy=True)
    sampled = simulate.rollouts(model, tokenizer, rows, seed=recipe.seed)
    print(f"held-out reward: greedy {simulate.mean_reward(greedy, rows):.3f}", flush=True)
    print(f"held-out reward: sampled {simulate.mean_reward(sampled, rows):.3f}; {simulate.summary(sampled, rows)}")


if __name__ == "__main__":
    main()
