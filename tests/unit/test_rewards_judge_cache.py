"""A judge asks only once for what it was asked before."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from asyncgrpo_core.errors import ConfigError
from asyncgrpo_core.rewards.judge_cache import ReplyCache, cache_key
from tests.unit.judge_server import ask, judged_by_server


@pytest.fixture
async def judged():
    async with judged_by_server() as both:
        yield both


async def test_equal_completions_are_judged_once(judged) -> None:
    server, make = judged
    judge = make()
    assert await ask(judge, "a", "b", "a", "a") == [1.0] * 4
    assert await ask(judge, "b", "c") == [1.0] * 2
    assert len(server.bodies) == judge.counts["requests"] == 3 and judge.counts["cache_hits"] == 3
    for change in ({"temperature": 1.0}, {"model": "other"}, {"rubric": "Now rate {completion}"}):
        await ask(make(**change), "a")
    assert len(server.bodies) == 6


async def test_the_file_cache_outlives_the_process(judged, tmp_path: Path) -> None:
    server, make = judged
    path = str(tmp_path / "judge.sqlite")
    await ask(make(cache_path=path), "a", "b")
    second = make(cache_path=path)
    assert await ask(second, "a", "b") == [1.0] * 2
    assert len(server.bodies) == 2 and second.counts["cache_hits"] == 2
    assert sqlite3.connect(path).execute("select count(*) from replies").fetchone() == (2,)
    # replies are kept, not scores: what another pattern cannot read is asked again
    server.script = lambda k, body: "[[1]]"
    assert await ask(make(cache_path=path, score_pattern=r"\[\[(\d)\]\]"), "a") == [1.0]
    assert len(server.bodies) == 3
    with pytest.raises(ConfigError, match="cache_path"):
        await ask(make(cache_path=str(tmp_path / "no" / "folder.sqlite")), "a")


def test_the_cache_forgets_the_least_recently_used() -> None:
    cache = ReplyCache(2, None)
    cache.put("a", "1")
    cache.put("b", "2")
    assert cache.get("a") == "1"
    cache.put("c", "3")
    assert [cache.get(key) for key in "abc"] == ["1", None, "3"]
    assert cache_key("ab", "c") != cache_key("a", "bc")
    none = ReplyCache(0, None)
    none.put("a", "1")
    assert none.get("a") is None


async def test_a_full_disk_costs_a_warning(tmp_path: Path, caplog) -> None:
    cache = ReplyCache(10, str(tmp_path / "c.sqlite"))
    cache.put("a", "1")
    cache._open().execute("pragma query_only = on")
    cache.put("b", "2")
    assert cache.get("b") == "2" and "cannot be written" in caplog.text
    cache.close()
