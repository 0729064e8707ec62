"""Rows, imports and reward functions of a run: what is accepted, and what each mistake is told."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

import pytest

from asyncgrpo_core.errors import ConfigError, DataError, RewardError
from asyncgrpo_core.launch.build import check_rewards, load_inputs, peft_config, training_args
from asyncgrpo_core.launch.config import DataSection
from asyncgrpo_core.launch.dataset import load_heldout_rows, load_train_dataset
from asyncgrpo_core.launch.imports import import_object, resolve_model_path
from asyncgrpo_core.launch.loading import parse_config
from asyncgrpo_core.launch.reward_probe import probe_reward, reward_name
from asyncgrpo_core.launch.training_section import TrainingSection

PROMPT = [{"role": "user", "content": "What is 2 plus 3?"}]
ROW = {"prompt": PROMPT, "answer": "5"}


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module `user_code` that can be imported in this test."""

    def write(text: str) -> str:
        (tmp_path / "user_code.py").write_text(text)
        sys.modules.pop("user_code", None)
        return "user_code"

    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield write
    sys.modules.pop("user_code", None)


def section(**values) -> DataSection:
    return DataSection.model_validate(values)


def refused(error: type[Exception], function, *args, **kwargs) -> str:
    with pytest.raises(error) as caught:
        function(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -- rows


def test_rows_of_a_function(module):
    module(f"def rows(n):\n    return [{ROW!r}] * n\n")
    dataset = load_train_dataset(section(train="user_code:rows", train_args={"n": 3}))
    assert len(dataset) == 3
    assert dataset[0] == ROW


def test_rows_of_files(tmp_path):
    jsonl = tmp_path / "a.jsonl"
    jsonl.write_text(json.dumps(ROW) + "\n\n" + json.dumps(ROW) + "\n")
    assert len(load_train_dataset(section(train=str(jsonl)))) == 2
    (tmp_path / "a.json").write_text(json.dumps([ROW]))
    assert load_train_dataset(section(train=str(tmp_path / "a.json")))[0] == ROW
    (tmp_path / "a.csv").write_text('prompt,answer\n"' + json.dumps(PROMPT).replace('"', '""') + '",5\n')
    assert load_train_dataset(section(train=str(tmp_path / "a.csv")))[0] == ROW
    load_train_dataset(section(train=str(jsonl))).to_parquet(str(tmp_path / "a.parquet"))
    assert load_train_dataset(section(train=str(tmp_path / "a.parquet")))[1] == ROW


def test_the_prompt_column_may_have_another_name(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": PROMPT, "answer": "5"}) + "\n")
    data = section(train=str(path), heldout=str(path), prompt_column="messages")
    assert load_train_dataset(data)[0] == ROW
    assert load_heldout_rows(data, 10) == [ROW]


def test_no_more_heldout_rows_than_wanted(module):
    module(f"def rows():\n    return [{ROW!r}] * 5\n")
    data = section(heldout="user_code:rows")
    assert len(load_heldout_rows(data, 2)) == 2
    assert load_heldout_rows(data, 0) == []
    assert load_heldout_rows(section(), 9) == []


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        ({"question": "x", "answer": "y"}, ["no column 'prompt'", "['answer', 'question']", "data.prompt_column"]),
        ({"prompt": "What is 2 plus 3?"}, ["row 1", "What is 2 plus 3?", '{"role": "user"']),
        ({"prompt": ["What is 2 plus 3?"]}, ["row 1", "role"]),
        ({"prompt": []}, ["row 1"]),
        ({"prompt": [{"content": "x"}]}, ["row 1", "role"]),
    ],
)
def test_a_row_of_the_wrong_shape_is_named(module, row, parts):
    """F002: prompts are conversations; the second row is the wrong one."""
    module(f"def rows():\n    return [{ROW!r}, {row!r}]\n")
    message = refused(DataError, load_heldout_rows, section(heldout="user_code:rows"), 10)
    for part in parts:
        assert part in message


def test_rows_without_prompt_are_for_environments(module):
    module("def rows():\n    return [{'target': 3}]\n")
    data = section(train="user_code:rows")
    assert load_train_dataset(data, needs_prompt=False)[0] == {"target": 3}
    assert "no column 'prompt'" in refused(DataError, load_train_dataset, data)


@pytest.mark.parametrize(
    ("code", "part"),
    [
        ("def rows():\n    return []\n", "no rows"),
        ("def rows():\n    return 5\n", "returned a int"),
        ("def rows():\n    return ['a']\n", "no dicts"),
        ("def rows(n):\n    return []\n", "TypeError"),
        ("def rows():\n    raise OSError('disk')\n", "OSError: disk"),
        ("rows = 5\n", "not a function"),
    ],
)
def test_a_function_that_gives_no_rows_is_named(module, code, part):
    module(code)
    message = refused(DataError, load_heldout_rows, section(heldout="user_code:rows"), 10)
    assert part in message and "data.heldout" in message


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("a.jsonl", '{"prompt": 1}\n{broken\n', "line 2"),
        ("a.jsonl", "[1]\n", "line 1"),
        ("a.json", '{"prompt": 1}', "no list of rows"),
        ("a.parquet", "text", "parquet"),
        ("missing.jsonl", None, "no such file"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, text, part):
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    message = refused(DataError, load_train_dataset, section(train=str(path)))
    assert part in message and name in message


# -- imports


def test_a_missing_module_is_told_from_a_missing_dependency(module):
    module("import not_installed_anywhere\n")
    assert "there is no module 'no_such_module'" in refused(ConfigError, import_object, "no_such_module:f", "rewards.0")
    message = refused(ConfigError, import_object, "user_code:f", "rewards.0")
    assert "needs the module 'not_installed_anywhere'" in message


def test_a_missing_name_suggests_the_nearest(module):
    module("def score(): ...\n")
    assert "user_code:score" in refused(ConfigError, import_object, "user_code:scor", "rewards.0")


def test_a_module_that_fails_is_named_with_the_line(module):
    module("x = 1\ny = 1 / 0\n")
    message = refused(ConfigError, import_object, "user_code:x", "rewards.0")
    assert "ZeroDivisionError" in message and "line 2" in message and "rewards.0" in message


def test_model_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "policy").mkdir()
    assert resolve_model_path("policy") == str(tmp_path / "policy")
    assert resolve_model_path("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    shipped = Path(resolve_model_path("package://asyncgrpo_core.quickstart/policy"))
    assert (shipped / "config.json").is_file()
    assert "there is no such folder" in refused(ConfigError, resolve_model_path, "./nowhere")
    assert "there is no such folder" in refused(ConfigError, resolve_model_path, "/a/b/c")
    assert "no_such_package" in refused(ConfigError, resolve_model_path, "package://no_such_package/x")
    assert "nothing" in refused(ConfigError, resolve_model_path, "package://asyncgrpo_core.quickstart/nothing")


def test_load_inputs_imports_everything_the_config_names(module):
    module(
        f"def rows():\n    return [{ROW!r}]\ndef score(completions, **k):\n    return [1.0] * len(completions)\n"
        "from asyncgrpo_core.rollout.loop import AsyncRolloutLoop\nclass Loop(AsyncRolloutLoop): ...\n"
    )
    cfg = parse_config(
        {
            "model": {"path": "m"},
            "data": {"train": "user_code:rows", "heldout": "user_code:rows"},
            "rewards": ["user_code:score"],
            "loop": "user_code:Loop",
        },
        None,
        source="x",
    )
    inputs = load_inputs(cfg)
    assert [reward_name(f) for f in inputs.rewards] == ["score"]
    assert inputs.loop is not None and inputs.loop.__name__ == "Loop"
    assert len(inputs.dataset) == len(inputs.heldout) == 1
    cfg.loop = "user_code:score"
    assert "no subclass of AsyncRolloutLoop" in refused(ConfigError, load_inputs, cfg)


# -- rewards


def good(completions, answer, **kwargs):
    return [1.0 if c[-1]["content"] == a else 0.0 for c, a in zip(completions, answer, strict=True)]


def right_number(prompts, completions, completion_ids, answer):
    assert len(prompts) == len(completions) == len(completion_ids) == len(answer)
    return [None for _ in completions]


async def slow(completions, **kwargs):
    return [0.5] * len(completions)


class Judge:
    def __call__(self, completions, **kwargs):
        return [0.0] * len(completions)


@pytest.mark.parametrize("function", [good, right_number, slow, Judge(), functools.partial(good, extra=1)])
def test_a_good_reward_function_passes(function):
    """F148, F149, F150: the keyword arguments, None, sync and async, and every kind that can be pickled."""
    assert len(probe_reward(function, ROW)) == 3


def one_for_all(completions, **kwargs):
    return [1.0]


def single_number(completions, **kwargs):
    return 1.0


def text(completions, **kwargs):
    return ["good"] * len(completions)


def not_a_number(completions, **kwargs):
    return [float("nan")] * len(completions)


def infinite(completions, **kwargs):
    return [float("inf")] * len(completions)


def wrong_signature(completions):
    return [1.0] * len(completions)


def raises(completions, **kwargs):
    raise KeyError("no key")


@pytest.mark.parametrize(
    ("function", "part"),
    [
        (one_for_all, "returned 1 rewards for 3 completions"),
        (single_number, "returned a float"),
        (text, "'good', which is no number"),
        (not_a_number, "returned nan"),
        (infinite, "returned inf"),
        (wrong_signature, "TypeError"),
        (raises, "KeyError"),
    ],
)
def test_a_reward_function_that_breaks_its_contract_is_named(function, part):
    """F149."""
    message = refused(RewardError, probe_reward, function, ROW)
    assert function.__name__ in message and part in message


def test_an_unpicklable_reward_is_refused_before_anything_starts():
    """F150."""
    lam = lambda completions, **k: [1.0]  # noqa: E731
    message = refused(ConfigError, check_rewards, [good, lam])
    assert "<lambda>" in message and "top level of a module" in message


# -- the trainer's own config


def test_training_args_hold_what_was_said(tmp_path):
    section = TrainingSection.model_validate({"learning_rate": 2e-4, "max_steps": 3})
    args = training_args(section, output_dir=tmp_path, server_url="http://127.0.0.1:5")
    assert args.learning_rate == 2e-4 and args.max_steps == 3
    assert args.vllm_server_base_url == "http://127.0.0.1:5"
    assert args.output_dir == str(tmp_path)
    assert args.num_generations == 8


def test_a_value_that_transformers_refuses_is_a_config_error(tmp_path):
    section = TrainingSection.model_validate({"lr_scheduler_type": "sideways"})
    message = refused(ConfigError, training_args, section, output_dir=tmp_path, server_url="http://127.0.0.1:5")
    assert "sideways" in message


def test_lora_settings_reach_peft():
    cfg = parse_config(
        {"model": {"path": "m", "lora": {"r": 4, "alpha": 8}}, "data": {"train": "a:b"}, "rewards": ["a:b"]},
        None,
        source="x",
    )
    config = peft_config(cfg)
    assert (config.r, config.lora_alpha) == (4, 8)
    cfg.model.lora = None
    assert peft_config(cfg) is None
