"""What the doctor says about tools, environments and how turns go on."""

from __future__ import annotations

import pytest

from asyncgrpo_core.errors import ConfigError
from asyncgrpo_core.launch.agent_checks import describe_environments, describe_tools, tool_schemas, try_template
from tests.unit.agent_parts import CounterEnv, GameEnv, add, agent_tokenizer, lookup


def undescribed(a):
    return a


def test_f170_tools_as_the_model_sees_them() -> None:
    assert describe_tools([add, lookup]) == "the model sees add(a, b), lookup(key)"
    with pytest.raises(ConfigError, match="'undescribed'"):
        describe_tools([undescribed])


def test_f180_environments_are_made_once_and_described() -> None:
    text = describe_environments({"count": CounterEnv, "game": GameEnv}, [add], 5.0)
    assert text == "CounterEnv with increment; GameEnv with move; scored by CounterEnv, GameEnv"

    class Broken:
        def __init__(self) -> None:
            raise OSError("no display")

    with pytest.raises(ConfigError, match="no display"):
        describe_environments(Broken, [], 5.0)


def test_f173_a_template_that_keeps_prefixes_is_said_to(monkeypatch) -> None:
    report = try_template(agent_tokenizer(), tool_schemas([add]), None, "render")
    assert report.keeps_prefix and report.shows_tools and "one sample" in report.text


def test_f173_a_tokenizer_whose_replies_cannot_be_read_is_refused() -> None:
    import copy

    tokenizer = copy.deepcopy(agent_tokenizer())
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    with pytest.raises(ConfigError, match="response_template"):
        try_template(tokenizer, tool_schemas([add]), None, "render")
