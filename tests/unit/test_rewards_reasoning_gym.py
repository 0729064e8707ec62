"""reasoning-gym rows and rewards, against the library's own scorers."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncgrpo_core.errors import ConfigError, RewardError
from asyncgrpo_core.launch.dataset import load_train_dataset
from asyncgrpo_core.launch.loading import parse_config
from asyncgrpo_core.rewards import reasoning_gym as ours
from asyncgrpo_core.rewards import reasoning_gym_reward, reasoning_gym_rows
from asyncgrpo_core.training.dataset import check_prompt

reasoning_gym = pytest.importorskip("reasoning_gym")


def said(*texts: str) -> list:
    return [[{"role": "assistant", "content": text}] for text in texts]


def reward(texts: list[str], rows: list[dict], **more) -> list:
    columns = {name: [row[name] for row in rows] for name in ("task", "entry", "task_config")}
    return reasoning_gym_reward(said(*texts), **columns, **more)


def test_rows_are_conversations_and_the_same_for_the_same_seed() -> None:
    rows = reasoning_gym_rows("chain_sum", 5, seed=3, max_terms=3)
    assert rows == reasoning_gym_rows("chain_sum", 5, 3, max_terms=3) != reasoning_gym_rows("chain_sum", 5, 4)
    for index, row in enumerate(rows):
        check_prompt(row["prompt"], str(index))
        assert row["prompt"][0]["content"].endswith(ours.INSTRUCTION)
        assert json.loads(row["entry"])["metadata"]["num_terms"] <= 3
    bare = reasoning_gym_rows("chain_sum", 1, 3, instruction=None, max_terms=3)[0]
    assert bare["prompt"][0]["content"] == json.loads(bare["entry"])["question"]


def test_rows_are_usable_as_an_import_path() -> None:
    raw = {
        "model": {"path": "m"},
        "data": {"train": "asyncgrpo_core.rewards:reasoning_gym_rows", "train_args": {"task": "chain_sum", "n": 4}},
        "rewards": ["asyncgrpo_core.rewards:reasoning_gym_reward"],
    }
    dataset = load_train_dataset(parse_config(raw, None, source="x").data)
    assert len(dataset) == 4 and set(dataset.column_names) == {"prompt", "task", "entry", "task_config"}


# metadata with tuples and integer keys, sympy in the scorer, partial credit, many right answers
@pytest.mark.parametrize("task", ["chain_sum", "graph_color", "arc_agi", "polynomial_equations", "countdown", "ab"])
def test_scores_are_the_librarys_own(task: str) -> None:
    rows = reasoning_gym_rows(task, 2, seed=11)
    dataset = reasoning_gym.create_dataset(task, size=2, seed=11)
    right = [str(dataset[i]["answer"]) for i in range(2)]
    answers = [*right, "0", "complete nonsense"]
    got = reward([f"I think <answer>{a}</answer>" for a in answers], [*rows, *rows])
    assert got == [dataset.score_answer(a, dataset[i % 2]) for i, a in enumerate(answers)]
    if task != "graph_color":  # its entries name no answer
        assert got[:2] == [1.0, 1.0] and got[3] < 1.0


def test_a_graph_coloring_survives_as_text() -> None:
    """Its metadata has integer keys, which JSON alone would turn into strings."""
    (row,) = reasoning_gym_rows("graph_color", 1, seed=5)
    entry = reasoning_gym.create_dataset("graph_color", size=1, seed=5)[0]
    right = json.dumps({str(k): v for k, v in entry["metadata"]["possible_answer"].items()})
    assert reward([f"<answer>{right}</answer>"], [row]) == [1.0]


@pytest.mark.parametrize(
    ("text", "kwargs", "expected"),
    [
        ("<answer>RIGHT</answer>", {}, 1.0),
        ("<answer>0</answer> no, <answer> RIGHT\n</answer>", {}, 1.0),
        ("<answer>RIGHT</answer> no, <answer>wrong</answer>", {}, 0.0),
        ("<think><answer>RIGHT</answer></think> so", {}, 0.0),
        ("RIGHT", {}, 0.0),
        ("", {}, 0.0),
        ("<think>a</think> RIGHT ", {"answer_tag": None}, 1.0),
        ("<final>RIGHT</final>", {"answer_tag": "final"}, 1.0),
    ],
)
def test_where_the_answer_is_looked_for(text: str, kwargs: dict, expected: float) -> None:
    (row,) = reasoning_gym_rows("chain_sum", 1, seed=1)
    right = json.loads(row["entry"])["answer"]
    assert reward([text.replace("RIGHT", right)], [row], **kwargs) == [expected]


def test_rows_of_another_task_are_left_out() -> None:
    """A mixed dataset has None in the columns that other rows bring."""
    (row,) = reasoning_gym_rows("chain_sum", 1)
    other = {"task": "math", "entry": None, "task_config": None}
    right = json.loads(row["entry"])["answer"]
    assert reward([f"<answer>{right}</answer>"] * 2, [row, other]) == [1.0, None]


def test_a_slow_scorer_costs_its_sample_alone(monkeypatch, caplog) -> None:
    late = ours.run_checks("asyncgrpo_core.rewards.math_check:check", [[r"\boxed{9^{9^{9^9}}}", "5"]], 0.5)
    assert late[0].status == "late"
    (row,) = reasoning_gym_rows("chain_sum", 1)
    monkeypatch.setattr(ours, "run_checks", lambda job, requests, limit: late)
    assert reward(["<answer>1</answer>", "no answer"], [row] * 2) == [0.0, 0.0]
    assert "chain_sum could not be scored (it took more than 0.5 s)" in caplog.text


def test_what_the_user_got_wrong_is_said() -> None:
    with pytest.raises(ConfigError, match=r"no task 'chain_sums'.*'chain_sum'"):
        reasoning_gym_rows("chain_sums", 1)
    with pytest.raises(ConfigError, match=r"refuses.*max_term.*fields.*'max_terms'"):
        reasoning_gym_rows("chain_sum", 1, max_term=3)
    with pytest.raises(ConfigError, match="refuses"):
        reasoning_gym_rows("chain_sum", 1, max_terms=-3)
    bad = {"task": "no_such_task", "entry": '{"answer": "1"}', "task_config": None}
    with pytest.raises(RewardError, match=r"'no_such_task' cannot be scored.*no task"):
        reward(["<answer>1</answer>"], [bad])


def test_a_missing_library_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['reasoning_gym'] = None\n"
        "from asyncgrpo_core import rewards\n"
        "for call in (lambda: rewards.reasoning_gym_rows('chain_sum', 1),\n"
        "             lambda: rewards.reasoning_gym_reward([[]], ['chain_sum'], ['{}'])):\n"
        "    try: call()\n"
        "    except Exception as error: print(type(error).__name__, error)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True).stdout
    assert out.count("ConfigError") == out.count('Install the extra "cpu" or "gpu"') == 2
    assert pickle.loads(pickle.dumps(reasoning_gym_reward)) is reasoning_gym_reward


LEAF = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5))
KEY = st.one_of(
    st.sampled_from(["a", "__tuple__", "__items__"]), st.integers(), st.tuples(st.integers(), st.integers())
)


@settings(max_examples=60, deadline=None)
@given(
    st.recursive(LEAF, lambda x: st.lists(x) | st.tuples(x, x) | st.tuples() | st.dictionaries(KEY, x), max_leaves=8)
)
def test_metadata_comes_back_exactly(value) -> None:
    back = ours._decode(json.loads(json.dumps(ours._encode(value))))
    assert repr(back) == repr(value)
