"""The quickstart's rows, their split and their reward (issue 1, point 2)."""

import asyncio
import inspect
import pickle
import random
import re

import pytest

from asyncgrpo_core.errors import DataError
from asyncgrpo_core.quickstart import task


def _numbers(row):
    match = re.fullmatch(r"What is (\d+) plus (\d+)\?", row["prompt"][0]["content"])
    return int(match[1]), int(match[2])


@pytest.mark.parametrize("rows", [task.train_rows(n=400, seed=3), task.heldout_rows(n=400, seed=3)])
def test_rows_are_conversational_and_their_answer_is_the_sum(rows):
    assert len(rows) == 400
    for row in rows:
        assert set(row) == {"prompt", "answer"}
        assert [message["role"] for message in row["prompt"]] == ["user"]
        a, b = _numbers(row)
        assert 0 <= a < 100 and 0 <= b < 100
        assert row["answer"] == str(a + b)


def test_heldout_and_training_pairs_never_meet_in_either_order():
    train = {_numbers(row) for row in task.train_rows()}
    heldout = {_numbers(row) for row in task.heldout_rows(n=None)}
    assert len(heldout) >= 512
    assert len(train) + len(heldout) == 100 * 100  # together they are everything, each pair once
    assert not {frozenset(pair) for pair in train} & {frozenset(pair) for pair in heldout}


def test_rows_depend_on_the_seed_alone_and_do_not_repeat():
    random.seed(0)
    first = task.train_rows(n=500, seed=1)
    random.seed(1)
    assert task.train_rows(n=500, seed=1) == first
    assert task.train_rows(n=500, seed=2) != first
    assert len({row["prompt"][0]["content"] for row in first}) == 500


def test_the_datasets_hold_the_rows():
    assert list(task.train_dataset(n=20, seed=5)) == task.train_rows(n=20, seed=5)
    assert list(task.heldout_dataset(n=20, seed=5)) == task.heldout_rows(n=20, seed=5)


@pytest.mark.parametrize("n", [0, -1, 100_000])
@pytest.mark.parametrize("rows", [task.train_rows, task.heldout_rows])
def test_an_impossible_number_of_rows_is_refused(rows, n):
    with pytest.raises(DataError, match=rf"{rows.__name__}\(n={n}\).*Set n to 1\.\.\d+"):
        rows(n=n)


def _say(text):
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize(
    "said", ["121", "", " 122", "122 ", "0122", "1222", "12", "122 121", "The answer is 122", None, "１２２"]
)
def test_only_the_exact_answer_is_rewarded(said):
    completions = [_say(said), _say("122")]
    assert task.exact_answer_reward(completions=completions, answer=["122", "122"]) == [0.0, 1.0]


def test_each_completion_is_judged_by_its_own_answer():
    completions = [_say("7"), _say("7"), [], _say("15")]
    assert task.exact_answer_reward(completions, ["7", "8", "9", "15"], prompts=[], extra=1) == [1.0, 0.0, 0.0, 1.0]
    with pytest.raises(ValueError):
        task.exact_answer_reward(completions, ["7"])


def test_tokens_that_do_not_show_in_the_text_earn_nothing():
    ids = [[1, 2, 2, 9], [1, 2, 2, 0, 0, 0, 0, 9], [1, 2, 2]]
    assert task.exact_answer_reward([_say("122")] * 3, ["122"] * 3, completion_ids=ids) == [1.0, 0.0, 1.0]


def test_the_reward_can_go_to_another_process():
    assert pickle.loads(pickle.dumps(task.exact_answer_reward)) is task.exact_answer_reward
    assert not asyncio.iscoroutinefunction(task.exact_answer_reward)
    assert any(p.kind is p.VAR_KEYWORD for p in inspect.signature(task.exact_answer_reward).parameters.values())
