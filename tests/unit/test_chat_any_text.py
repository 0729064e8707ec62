"""Whatever a model writes, reading it does not raise, loses nothing and takes linear time."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncgrpo_core.rollout.chat.families import FAMILIES
from tests.unit.chat_tokenizers import CHAT_TEMPLATES
from tests.unit.test_chat_parsing import FIRST, SECOND, TOOLS, chat_of, parse, prompt_of

_SCRAPS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<think>", "</think>", "<|im_end|>", "<|python_tag|>", '{"name": "search"',
     '"arguments": {', '"parameters": {}', "}", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>",
     "<｜tool▁call▁end｜>", "```json", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "\n", "search\n{",
     "\\ud83d", "<|user|>"]
)  # fmt: skip


@given(
    family=st.sampled_from(list(CHAT_TEMPLATES)),
    pieces=st.lists(st.one_of(_SCRAPS, st.text(max_size=8)), max_size=16),
    end=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_no_text_makes_parse_raise(family: str, pieces: list[str], end: bool) -> None:
    _check_any(family, "".join(pieces), end)


@given(family=st.sampled_from(list(CHAT_TEMPLATES)), seed=st.integers(0, 2**32), end=st.booleans())
@settings(max_examples=300, deadline=None)
def test_no_mutation_of_a_valid_reply_makes_parse_raise(family: str, seed: int, end: bool) -> None:
    rng = random.Random(seed)
    known = FAMILIES[family]
    text = known.write("Text", "why" if known.thinks else "", [FIRST] if known.one_call else [FIRST, SECOND])
    for _ in range(rng.randrange(1, 5)):
        at, size = rng.randrange(len(text) + 1), rng.randrange(6)
        text = text[:at] + rng.choice(["", "{", '"', "\n", "<", "é", text[:at], "null"]) + text[at + size :]
    _check_any(family, text, end)


def _check_any(family: str, text: str, end: bool) -> None:
    chat = chat_of(family)
    ids = chat.encode(text)
    reply = parse(family, text, end=end)
    if end or not ids or ids[-1] not in chat._end_ids:
        assert reply.message["raw"] == chat.decode(ids)
    assert reply.message["role"] == "assistant" and isinstance(reply.message["content"], str)
    good = [(c["function"]["name"], c["function"]["arguments"]) for c in reply.message.get("tool_calls", [])]
    assert good == [(c.name, c.arguments) for c in reply.calls if c.error is None]
    json.dumps(reply.message, ensure_ascii=False).encode()  # can be logged and tokenised
    for call in reply.calls:
        (call.error or "").encode()
        assert call.error is not None or call.name


_OPENINGS = [
    ("", ""), ("<tool_call>x", "</tool_call>"), ("<|python_tag|>", ""), ('{"name": "search", "parameters": {', ""),
    ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
]  # fmt: skip


@pytest.mark.parametrize("family", list(CHAT_TEMPLATES))
@pytest.mark.parametrize("scrap", [" ", "\n", "{", "{} ", "<arg_key></arg_key><arg_value>", "<tool_call>", "</think>"])
def test_a_reply_that_repeats_itself_is_read_in_linear_time(family: str, scrap: str) -> None:
    """12,000 characters of one scrap between the marks of a call; a quadratic pattern would take minutes."""
    for before, after in _OPENINGS:
        text = before + scrap * (12_000 // len(scrap)) + after
        reply = chat_of(family).reader.read(text, "", TOOLS)  # type: ignore[union-attr]
        assert isinstance(reply.message["content"], str)


@given(ids=st.lists(st.integers(0, 430), max_size=40), family=st.sampled_from(list(CHAT_TEMPLATES)))
@settings(max_examples=100, deadline=None)
def test_no_tokens_make_parse_raise(ids: list[int], family: str) -> None:
    chat = chat_of(family)
    size = len(chat.tokenizer)
    reply = chat.parse(list(prompt_of(family)), [i % size for i in ids], TOOLS)
    assert isinstance(reply.message["content"], str) and isinstance(reply.message["raw"], str)
