"""The ready-made reward functions on known pairs."""

from __future__ import annotations

import functools
import pickle
import subprocess
import sys
import threading

import pytest

from asyncgrpo_core import rewards
from asyncgrpo_core.errors import ConfigError


def said(*texts: str) -> list:
    return [[{"role": "assistant", "content": text}] for text in texts]


ACCURACY = [
    (r"\boxed{\frac{63}{400}}", r"\frac{63}{400}", 1.0),
    (r"\boxed{\frac{64}{400}}", r"\frac{63}{400}", 0.0),
    (r"My answer is $0.5$, so \boxed{0.5}.", r"$\frac{1}{2}$", 1.0),
    ("I do not know.", "4", 0.0),
    ("", "4", 0.0),
    (r"\boxed{4}", "no number here", None),
]


@pytest.mark.parametrize(("text", "solution", "expected"), ACCURACY)
def test_accuracy(text, solution, expected) -> None:
    """F153."""
    assert rewards.accuracy_reward(said(text), solution=[solution], other_column=[1]) == [expected]


def test_accuracy_works_in_a_thread() -> None:
    """Rewards run in threads, where math-verify's signal-based time limits cannot."""
    got: list = []
    texts, solutions, expected = zip(*ACCURACY, strict=True)
    thread = threading.Thread(target=lambda: got.extend(rewards.accuracy_reward(said(*texts), list(solutions))))
    thread.start()
    thread.join(60)
    assert got == list(expected)


def test_accuracy_after_the_reasoning() -> None:
    texts = said(r"<think>\boxed{1}</think> \boxed{2}", r"<think>\boxed{2}</think> \boxed{1}", r"\boxed{2}")
    assert rewards.reasoning_accuracy_reward(texts, solution=["2"] * 3) == [1.0, 0.0, 0.0]
    texts = said(r"\boxed{1} END \boxed{2}")
    assert rewards.reasoning_accuracy_reward(texts, ["2"], reasoning_delimiters=["END"]) == [1.0]


@pytest.mark.parametrize(
    ("text", "think", "both"),
    [
        ("<think>a\nb</think>\nanswer", 1.0, 0.0),
        ("<think>a</think><answer>b</answer>", 1.0, 1.0),
        ("<think>a</think>\n<answer>b</answer>\n", 1.0, 1.0),
        ("a</think>b", 0.0, 0.0),
        ("<think><think>a</think>b", 0.0, 0.0),
        ("<answer>b</answer>", 0.0, 0.0),
    ],
)
def test_formats(text, think, both) -> None:
    assert rewards.think_format_reward(said(text)) == [think]
    assert rewards.format_reward(said(text)) == [both]


def test_overlong_punishment_is_linear_and_pickles() -> None:
    """DAPO, equation 13, with room 10 and 4 of them soft."""
    punish = pickle.loads(pickle.dumps(rewards.get_soft_overlong_punishment(10, 4)))
    ids = [[0] * n for n in (0, 6, 7, 9, 10, 99)]
    assert punish(completion_ids=ids, completions=None) == [0.0, 0.0, -0.25, -0.75, -1.0, -1.0]
    with pytest.raises(ConfigError, match="soft_punish_cache is 0"):
        rewards.get_soft_overlong_punishment(10, 0)


def test_length_reward_counts_tokens() -> None:
    ids = [[1, 2], [], [1, 2, 3, 4]]
    assert rewards.length_reward(completion_ids=ids, completions=None) == [2.0, 0.0, 4.0]
    shorter = pickle.loads(pickle.dumps(functools.partial(rewards.length_reward, per_token=-0.5)))
    assert shorter(completion_ids=ids) == [-1.0, 0.0, -2.0]


WITH_TOOL = [
    {"role": "assistant", "content": None, "tool_calls": []},
    {"role": "tool", "content": r"\boxed{5}"},
    {"role": "assistant", "content": r"<think>so</think><answer>\boxed{4}</answer>"},
]


def test_the_last_assistant_message_is_scored() -> None:
    """With tools the first message calls one and may have no text; a tool's result is not the model's answer."""
    assert rewards.accuracy_reward([WITH_TOOL, WITH_TOOL], ["4", "5"]) == [1.0, 0.0]
    assert rewards.reasoning_accuracy_reward([WITH_TOOL], ["4"]) == [1.0]
    assert rewards.format_reward([WITH_TOOL]) == rewards.think_format_reward([WITH_TOOL]) == [1.0]
    assert rewards.accuracy_reward([WITH_TOOL[:2], []], ["4", "4"]) == [0.0, 0.0]
    parts = [{"role": "assistant", "content": [{"type": "text", "text": r"\boxed{4}"}]}]
    assert rewards.accuracy_reward([parts], ["4"]) == [1.0]


def test_a_row_without_a_solution_is_not_scored() -> None:
    """Held-out rows of several sources have None in the columns they lack; a number counts as its text."""
    assert rewards.accuracy_reward(said(r"\boxed{4}", r"\boxed{4}"), [None, 4]) == [None, 1.0]


def test_importing_rewards_needs_no_math_verify() -> None:
    """F153: only calling accuracy_reward does, and then the error says what to install."""
    code = (
        "import sys; sys.modules['math_verify'] = None\n"
        "from asyncgrpo_core import rewards\n"
        "print(rewards.format_reward([[{'content': 'x'}]]))\n"
        "try: rewards.accuracy_reward([[{'content': 'x'}]], ['1'])\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True).stdout
    assert out.startswith("[0.0]\nConfigError") and "pip install math-verify" in out


def test_importing_rewards_imports_nothing_heavy() -> None:
    code = (
        "import sys; import asyncgrpo_core.rewards as r; r.accuracy_reward, r.JudgeReward, r.reasoning_gym_rows\n"
        "heavy = ('torch', 'sympy', 'math_verify', 'reasoning_gym', 'aiohttp', 'openai')\n"
        "print([m for m in heavy if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True).stdout
    assert out == "[]\n"
