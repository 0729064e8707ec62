"""Arguments of the trainer: reward functions and dataset (F001, F002, F003, F012, F178, F190, F192)."""

from __future__ import annotations

import inspect

import pytest
from datasets import Dataset

from asyncgrpo_core import AsyncGRPOTrainer
from asyncgrpo_core.errors import ConfigError, DataError
from asyncgrpo_core.training.dataset import check_dataset, check_prompt, normalise_reward_funcs

CHAT = [{"role": "user", "content": "What is 2+2?"}]


def reward(completions, **kwargs):
    return [1.0 for _ in completions]


def test_f190_constructor_signature_is_the_references():
    parameters = inspect.signature(AsyncGRPOTrainer.__init__).parameters
    positional = [n for n, p in parameters.items() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert positional == [
        "self",
        "model",
        "reward_funcs",
        "args",
        "train_dataset",
        "processing_class",
        "callbacks",
        "optimizers",
        "peft_config",
        "tools",
        "environment_factory",
    ]
    defaults = {n: parameters[n].default for n in positional[2:]}
    assert defaults.pop("optimizers") == (None, None)
    assert set(defaults.values()) == {None}


def test_train_signature_is_the_references():
    assert list(inspect.signature(AsyncGRPOTrainer.train).parameters) == [
        "self",
        "resume_from_checkpoint",
        "trial",
        "ignore_keys_for_eval",
    ]


def test_f192_map_dataset_and_stream():
    rows = Dataset.from_list([{"prompt": CHAT}] * 3)
    assert check_dataset(rows, None, max_steps=-1) == 3
    assert check_dataset(rows.to_iterable_dataset(), None, max_steps=5) is None
    with pytest.raises(ConfigError, match="max_steps"):
        check_dataset(rows.to_iterable_dataset(), None, max_steps=-1)


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([{"question": "x"}], '"prompt".*question'),
        ([{"prompt": "What is 2+2?"}], "plain text"),
        ([{"prompt": []}], "prompt in row 0"),
        ([{"prompt": [{"content": "no role"}]}], "not a message with a role"),
        ([{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}], "Images"),
        ([], "no rows"),
    ],
)
def test_f002_f012_wrong_datasets_are_refused_by_name(rows, named):
    dataset = Dataset.from_list(rows)
    with pytest.raises(DataError, match=named):
        check_dataset(dataset, None, max_steps=1)


def test_f002_f178_without_a_dataset_an_environment_and_max_steps_are_needed():
    with pytest.raises(DataError, match="train_dataset"):
        check_dataset(None, None, max_steps=1)
    with pytest.raises(ConfigError, match="max_steps"):
        check_dataset(None, object, max_steps=-1)
    assert check_dataset(None, object, max_steps=1) is None
    assert check_dataset(Dataset.from_list([{"environment": "a"}]), object, max_steps=1) == 1


def test_f003_reward_models_are_refused():
    class Model:
        def save_pretrained(self): ...

        def __call__(self): ...

    for wrong in ("org/reward-model", Model(), 3):
        with pytest.raises(ConfigError, match="Python callable"):
            normalise_reward_funcs(wrong, None)
    with pytest.raises(ConfigError, match="missing"):
        normalise_reward_funcs(None, None)
    assert normalise_reward_funcs(reward, None) == [reward]
    assert normalise_reward_funcs(None, object) == []


def test_check_prompt_names_the_place():
    with pytest.raises(DataError, match="row 7 of data.jsonl"):
        check_prompt("text", "row 7 of data.jsonl")
