"""What `asyncgrpo doctor` can say about tools and environments before a run: described, made, and how turns go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from asyncgrpo_core.rollout.chat.forks import ForkReport, fork_report
from asyncgrpo_core.rollout.chat.format import ChatFormat
from asyncgrpo_core.rollout.environments import EnvironmentPool, public_methods
from asyncgrpo_core.rollout.threads import CallThreads
from asyncgrpo_core.rollout.tools import check_tools, tool_schema


def describe_tools(tools: list[Callable[..., Any]]) -> str:
    """The tools with their arguments, as the model will see them.

    Raises:
        ConfigError: one cannot be described; names it.
    """
    check_tools(tools)
    shown = []
    for tool in tools:
        function = tool_schema(tool)["function"]
        shown.append(f"{function['name']}({', '.join(function['parameters'].get('properties', {}))})")
    return "the model sees " + ", ".join(shown)


def describe_environments(factory: Any, tools: list[Callable[..., Any]], timeout_s: float) -> str:
    """Make every environment once, as the rollout worker will, and say what it offers.

    Raises:
        ConfigError: one cannot be made or used; names it.
    """

    async def make() -> tuple[list[type], list[str]]:
        pool = EnvironmentPool(factory, CallThreads(4, "doctor"), timeout_s)
        scoring = await pool.prepare(tools)
        names = factory if isinstance(factory, dict) else [None]
        leases = [await pool.lease({"environment": name}) for name in names]
        shown = []
        for lease in leases:
            names_of_tools = [method.__name__ for method in public_methods(lease.instance)]
            shown.append(f"{type(lease.instance).__name__} with {', '.join(names_of_tools) or 'no tool'}")
        return scoring, shown

    scoring, shown = asyncio.run(make())
    rewards = f"; scored by {', '.join(c.__name__ for c in scoring)}" if scoring else "; none scores itself"
    return "; ".join(shown) + rewards


def tool_schemas(tools: list[Callable[..., Any]]) -> list[dict[str, Any]]:
    """The tools' JSON schemas. Raises ConfigError: one cannot be described."""
    return [tool_schema(tool) for tool in tools]


def try_template(
    tokenizer: Any, schemas: list[dict[str, Any]], template_kwargs: dict[str, Any] | None, turn_prompts: str
) -> ForkReport:
    """Play trial conversations with the tokenizer's chat template.

    Raises:
        ConfigError: replies cannot be searched for tool calls; says what is missing.
    """
    chat = ChatFormat(tokenizer, tools_on=True, template_kwargs=template_kwargs, turn_prompts=turn_prompts)
    return fork_report(chat, schemas or None)
