"""For tests of tools and environments: a byte-level tokenizer in Qwen's tool format, policies written as scripts."""

from __future__ import annotations

import asyncio
import functools
import json
import random
import time
from collections.abc import Callable
from typing import Any

from tests.unit.fakes import FakeVLLM

TEMPLATE = """\
{%- if tools -%}
{{- '<|im_start|>system\\nTools:\\n<tools>' -}}
{%- for tool in tools -%}{{- '\\n' ~ (tool | tojson) -}}{%- endfor -%}
{{- '\\n</tools>\\nCall one with <tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' ~ message.content ~ '\\n</tool_response><|im_end|>\\n' -}}
{%- else -%}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ (message.content or '') -}}
{%- for call in message.tool_calls or [] -%}
{{- '\\n' if not loop.first or message.content else '' -}}
{{- '<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' ~ (call.function.arguments | tojson) ~ '}' -}}
{{- '\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


@functools.cache
def agent_tokenizer() -> Any:
    """One token per byte, and the special tokens; any text round-trips."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({token: i for i, token in enumerate([*specials, *alphabet])}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def call_text(name: str, **arguments: Any) -> str:
    """What a policy writes to call a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


Script = Callable[[random.Random, str], str]  # (rng of the request, prompt text) -> reply text without end of turn


def scripted(script: Script, **settings: Any) -> FakeVLLM:
    """A stand-in server whose policy is a function of the prompt's text."""
    tokenizer = agent_tokenizer()

    def sample(rng: random.Random, prompt_ids: list[int]) -> list[int]:
        reply = script(rng, tokenizer.decode(prompt_ids))
        return [*tokenizer(reply, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]

    settings = {"max_model_len": 4096, **settings}
    return FakeVLLM(sample=sample, vocab=len(tokenizer), eos_id=tokenizer.eos_token_id, **settings)


# -- tools (module level: they may travel to another process)


def add(a: int, b: int) -> int:
    """Add two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The sum.
    """
    return a + b


async def lookup(key: str) -> str:
    """Look a word up.

    Args:
        key: The word.
    """
    await asyncio.sleep(0)
    return f"<{key}>"


def broken(text: str) -> str:
    """Fail.

    Args:
        text: Anything.
    """
    raise ConnectionError(f"no route to the sandbox for {text}")


def sleepy(seconds: float) -> str:
    """Sleep.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return "slept"


def huge(characters: int) -> str:
    """Return a long text.

    Args:
        characters: How long.
    """
    return "x" * characters


class CounterEnv:
    """The reference's IncrementEnv in our words: reach the target."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.busy = False

    def reset(self, target: int = 2, **kwargs: Any) -> str | None:
        assert not self.busy, "two rollouts share an environment"
        self.busy = True
        self.counter, self.target, self.columns = 0, target, kwargs
        return f" Target {target}."

    def get_reward(self) -> float:
        self.busy = False
        return float(self.counter == self.target)

    def increment(self, step: int) -> int:
        """Increment the counter.

        Args:
            step: Value to add.
        """
        self.counter += step
        return self.counter


class GameEnv:
    """Another environment: owns its prompt, scores asynchronously, has an async method."""

    def reset(self, **kwargs: Any) -> str:
        self.moves: list[str] = []
        return "Reach the goal."

    async def get_reward(self) -> float:
        await asyncio.sleep(0)
        return float(self.moves == ["up"]) * 2

    async def move(self, action: str) -> str:
        """Move.

        Args:
            action: One of "up", "down".
        """
        self.moves.append(action)
        return "ok"
