"""The reference's five example reward functions, through the scorer, with the values the reference prints. F151."""

from __future__ import annotations

import asyncio
import pickle
import re
from typing import Any

import numpy as np
import pytest

from asyncgrpo_core import rewards
from asyncgrpo_core.rollout.scoring import GroupScorer, GroupScores
from asyncgrpo_core.types import RolloutGroup

NAN = float("nan")
# The reference's functions take these as they are; the dataset of example 4 has one group for each of its rows.
SKY = [{"role": "user", "content": "The sky is"}]
SUN = [{"role": "user", "content": "The sun is"}]


def group(prompts: list, texts: list[str], ids: list | None = None, **columns: list[Any]) -> RolloutGroup:
    n = len(texts)
    return RolloutGroup(
        prompts=prompts,
        reward_kwargs=columns,
        completions=[[{"role": "assistant", "content": text}] for text in texts],
        completions_ids=ids or [[0]] * n,
        completions_sequences=[[] for _ in range(n)],
        tool_call_counts=[0] * n,
        tool_failure_counts=[0] * n,
        model_version=0,
        group_id=0,
        row_index=0,
        env_rewards=[None] * n,
        rollout_rewards=[None] * n,
    )


async def scored(funcs: list, g: RolloutGroup) -> GroupScores:
    return await GroupScorer([pickle.loads(pickle.dumps(func)) for func in funcs]).score(g)


def longer_is_better(completion_ids, **kwargs):
    return [float(len(tokens)) for tokens in completion_ids]


def has_the_format(completions, **kwargs):
    shape = re.compile(r"<think>.*?</think><answer>.*?</answer>")
    return [float(shape.fullmatch(messages[0]["content"]) is not None) for messages in completions]


def boxed_equals_column(completions, ground_truth, **kwargs):
    results = []
    for messages, right in zip(completions, ground_truth, strict=True):
        box = re.search(r"\\boxed\{(.*?)\}", messages[0]["content"])
        results.append(float(box is not None and box[1] == right))
    return results


def math_alone(prompts, completions, task, **kwargs):
    """Right sums +1, wrong ones -1, other tasks None."""
    return [
        None if kind != "math" else (1.0 if str(_value(prompt)) in messages[0]["content"] else -1.0)
        for prompt, messages, kind in zip(prompts, completions, task, strict=True)
    ]


def code_alone(prompts, completions, task, **kwargs):
    """Code that defines something +1, else -1, other tasks None."""
    return [
        None if kind != "code" else (1.0 if "def " in messages[0]["content"] else -1.0)
        for messages, kind in zip(completions, task, strict=True)
    ]


def _value(prompt) -> int:
    left, sign, right = re.search(r"(\d+)([+*])(\d+)", prompt[0]["content"]).groups()
    return int(left) + int(right) if sign == "+" else int(left) * int(right)


async def says_something(prompts, completions, **kwargs):
    await asyncio.sleep(0)
    return [1.0 if messages else 0.0 for messages in completions]


@pytest.mark.parametrize("func", [longer_is_better, rewards.length_reward])
async def test_example_1_longer_completions(func) -> None:
    """F151: by number of tokens."""
    g = group([SKY, SUN], [" blue.", " in the sky."], ids=[[6303, 13], [304, 279, 12884, 13]])
    np.testing.assert_array_equal((await scored([func], g)).total, [2.0, 4.0])


@pytest.mark.parametrize("func", [has_the_format, rewards.format_reward])
async def test_example_2_a_format(func) -> None:
    """F151: think and answer blocks."""
    prompts = [
        [{"role": "user", "content": "What is the result of (1 + 2) * 4?"}],
        [{"role": "user", "content": "What is the result of (3 + 1) * 2?"}],
    ]
    texts = [
        "<think>1 and 2 make 3, and four times 3 is 12.</think><answer>(1 + 2) * 4 = 12</answer>",
        "3 and 1 make 4, and twice 4 is 8. So (3 + 1) * 2 = 8.",
    ]
    np.testing.assert_array_equal((await scored([func], group(prompts, texts))).total, [1.0, 0.0])


async def test_example_3_a_reference_answer() -> None:
    """F151: the dataset's column `ground_truth`; accuracy_reward gives the same with the column `solution`."""
    prompts = [
        [{"role": "user", "content": "Solve the equation $2x + 3 = 7$."}],
        [{"role": "user", "content": "Solve the equation $3x - 5 = 10$."}],
    ]
    g = group(prompts, [r"The solution is \boxed{2}.", r"The solution is \boxed{6}."], ground_truth=["2", "5"])
    g.reward_kwargs["solution"] = g.reward_kwargs["ground_truth"]
    scores = await scored([boxed_equals_column, rewards.accuracy_reward], g)
    np.testing.assert_array_equal(scores.by_source["boxed_equals_column"], [1.0, 0.0])
    np.testing.assert_array_equal(scores.by_source["accuracy_reward"], [1.0, 0.0])


@pytest.mark.parametrize(
    ("question", "task", "texts", "total"),
    [
        ("What is 2+2?", "math", ["4", "5"], [1.0, -1.0]),
        ("Write a function that returns the sum of two numbers.", "code", ["def f", "no"], [1.0, -1.0]),
        ("What is 3*4?", "math", ["12", "it is 12"], [1.0, 1.0]),
        ("Write a function that returns the product of two numbers.", "code", ["no", "4"], [-1.0, -1.0]),
    ],
)
async def test_example_4_each_task_has_its_function(question, task, texts, total) -> None:
    """F151, F149: None for the other task is ignored: the total is the relevant function's alone."""
    g = group([[{"role": "user", "content": question}]] * 2, texts, task=[task] * 2)
    scores = await scored([math_alone, code_alone], g)
    np.testing.assert_array_equal(scores.total, total)
    other = "code_alone" if task == "math" else "math_alone"
    np.testing.assert_array_equal(scores.by_source[other], [NAN, NAN])


async def test_example_4_a_task_without_a_function_scores_nothing() -> None:
    """F024, F030: None from every function: not scored, which is NaN and not 0."""
    g = group([SKY] * 2, ["a", "b"], task=["poetry"] * 2)
    np.testing.assert_array_equal((await scored([math_alone, code_alone], g)).total, [NAN, NAN])


async def test_example_5_an_async_function() -> None:
    """F151: non-empty completions 1, empty ones 0; F152: in a list with a sync function the sum."""
    g = group([SKY, SUN], ["blue", ""], ids=[[1], [1, 2]])
    g.completions[1] = []
    np.testing.assert_array_equal((await scored([says_something], g)).total, [1.0, 0.0])
    np.testing.assert_array_equal((await scored([says_something, longer_is_better], g)).total, [2.0, 2.0])
