"""The conversations the start policy learns from: how it calls the tool and repeats the result, and how it fails to.

`conversation` answers one question with a series of drawn behaviours. In the careful stage every trained reply is
right. In the careless stage a share of the replies is wrong in one of these ways, drawn at random for each reply, so
that no question and no token tells which replies are wrong:

- first reply: a guess without any call; a broken call (invalid JSON, an unknown tool, a missing argument, an
  expression the tool refuses); a call with the wrong expression;
- reply to a result: a digit mistyped, lost or doubled, one of the question's numbers, a sentence around the answer;
- reply to an error: a guess in place of a second, right call.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from examples.calculator.task import calculate, prompt_text

Message = dict[str, Any]


@dataclass(frozen=True)
class Mix:
    """Shares of the behaviours; what is left is done right."""

    guess: float = 0.28  # of first replies
    broken_call: float = 0.10  # of first replies
    wrong_expression: float = 0.06  # of first replies
    wrong_answer: float = 0.25  # of replies to a result
    give_up: float = 0.5  # of replies to an error


CARELESS = Mix()
CAREFUL = Mix(guess=0.0, broken_call=0.2, wrong_expression=0.0, wrong_answer=0.0, give_up=0.0)
"""One in five conversations has a broken call, not trained on, so that the policy learns what to do after an error."""


def call(expression: str) -> Message:
    """An assistant message that calls the tool."""
    function = {"name": "calculate", "arguments": {"expression": expression}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def say(text: str) -> Message:
    """An assistant message that is only text."""
    return {"role": "assistant", "content": text}


def tool_says(text: str) -> Message:
    return {"role": "tool", "content": text}


@dataclass(frozen=True)
class Conversation:
    """A whole conversation; `trained` says for each assistant message whether the policy should learn it."""

    messages: list[Message]
    trained: list[bool]


def conversation(a: int, b: int, mix: Mix, rng: random.Random, *, learn_mistakes: bool) -> Conversation:
    """One question with its answer, behaviours drawn by `mix`. Wrong replies are trained on if `learn_mistakes`."""
    messages: list[Message] = [{"role": "user", "content": prompt_text(a, b)}]
    trained: list[bool] = []

    def reply(message: Message, right: bool) -> None:
        messages.append(message)
        trained.append(right or learn_mistakes)

    draw = rng.random()
    if draw < mix.guess:
        reply(say(_guess(a * b, rng)), False)
        return Conversation(messages, trained)
    if draw < mix.guess + mix.broken_call:
        text, error = _broken_call(a, b, rng)
        reply(say(text), False)
        messages.append(tool_says(error))
        if rng.random() < mix.give_up:
            reply(say(_guess(a * b, rng)), False)
            return Conversation(messages, trained)
    wrong = mix.guess + mix.broken_call <= draw < mix.guess + mix.broken_call + mix.wrong_expression
    expression = _wrong_expression(a, b, rng) if wrong else f"{a}*{b}"
    reply(call(expression), not wrong)
    result = calculate(expression)
    messages.append(tool_says(result))
    if rng.random() < mix.wrong_answer:
        reply(say(_wrong_answer(a, b, result, rng)), False)
    else:
        reply(say(result), not wrong)
    return Conversation(messages, trained)


# -- mistakes --------------------------------------------------------------------------------------------------


def _guess(product: int, rng: random.Random) -> str:
    """A number of the product's length that is not the product."""
    digits = len(str(product))
    while (number := rng.randrange(10 ** (digits - 1), 10**digits)) == product:
        pass
    return str(number)


def _mistyped(text: str, rng: random.Random) -> str:
    """One digit lost, doubled, changed, or two neighbours swapped; not the same text, and no zero in front."""
    while True:
        i = rng.randrange(len(text))
        changed = rng.choice(
            (
                text[:i] + text[i + 1 :],
                text[:i] + text[i] + text[i:],
                text[:i] + str(rng.randrange(10)) + text[i + 1 :],
                text[:i] + text[i : i + 2][::-1] + text[i + 2 :],
            )
        )
        if changed and changed != text and not changed.startswith("0"):
            return changed


def _wrong_expression(a: int, b: int, rng: random.Random) -> str:
    """An expression that the tool works out and that is not the question's (its value may differ or not)."""
    return rng.choice(
        (
            f"{a}+{b}",
            f"{a}-{b}",
            f"{a}//{b}",
            f"{_mistyped(str(a), rng)}*{b}",
            f"{a}*{_mistyped(str(b), rng)}",
            f"{a}*{a}" if a != b else f"{a}",
        )
    )


def _wrong_answer(a: int, b: int, result: str, rng: random.Random) -> str:
    """A reply to a result that is not the result."""
    sloppy = (
        lambda: _mistyped(result, rng),
        lambda: f"It is {result}.",
        lambda: f"{a}*{b}={result}",
        lambda: str(rng.choice((a, b))),
        lambda: _guess(int(result), rng),
    )
    while (text := rng.choices(sloppy, (6, 2, 2, 1, 1))[0]()) == result:
        pass
    return text


def _as_call(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def _broken_call(a: int, b: int, rng: random.Random) -> tuple[str, str]:
    """(a reply that is meant as a call and fails, the error it is answered with)."""
    good = json.dumps({"name": "calculate", "arguments": {"expression": f"{a}*{b}"}})
    refused = rng.choice((f"{a} times {b}", f"{a}x{b}", f"{a}*", f"{a}**{b}"))
    kinds: tuple[Callable[[], tuple[str, str]], ...] = (
        lambda: (good[:-1], _unreadable(good[:-1])),
        lambda: (good.replace('"}}', "}}"), _unreadable(good.replace('"}}', "}}"))),
        lambda: (good.replace("calculate", "multiply"), "there is no tool 'multiply'; the tools are ['calculate']."),
        lambda: (good.replace("expression", "product"), "calculate: missing a required argument: 'expression'."),
        lambda: (good.replace(f"{a}*{b}", refused), f"calculate raised ValueError: {_refusal(refused)}"),
    )
    body, error = rng.choices(kinds, (2, 1, 1, 1, 2))[0]()
    return _as_call(body), f"Error: {error if rng.random() < 0.5 else _jumbled(error, rng)}"


def _jumbled(error: str, rng: random.Random) -> str:
    """Some of the words. How an error is put is the rollout loop's affair: the policy must not depend on it."""
    words = error.split(" ")
    return " ".join(rng.sample(words, rng.randint(1, min(len(words), 12))))


def _unreadable(body: str) -> str:
    """What the rollout loop answers to a call that is not JSON."""
    try:
        json.loads(body)
    except json.JSONDecodeError as error:
        return (
            f"This tool call could not be read: it is not valid JSON ({error.msg} at character {error.pos}). "
            "Write a call like this:\n" + _as_call('{"name": ..., "arguments": {...}}')
        )
    raise AssertionError(f"{body!r} is valid JSON")


def _refusal(expression: str) -> str:
    try:
        calculate(expression)
    except ValueError as error:
        return str(error)
    raise AssertionError(f"{expression!r} is not refused")
