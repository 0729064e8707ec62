"""A judge over HTTP, against a stand-in server that fails as told."""

from __future__ import annotations

import asyncio
import datetime
import email.utils
import pickle

import pytest
from aiohttp import web

from asyncgrpo_core.errors import ConfigError, RewardError
from asyncgrpo_core.rewards import JudgeReward
from asyncgrpo_core.rewards.judge_http import _retry_after
from asyncgrpo_core.rollout.scoring import GroupScorer, is_async, reward_names
from tests.unit.judge_server import ask, judged_by_server
from tests.unit.test_rollout_scoring import group_of


@pytest.fixture
async def judged():
    async with judged_by_server() as both:
        yield both


async def test_the_rubric_is_filled_once_and_sent(judged, monkeypatch) -> None:
    server, make = judged
    monkeypatch.setenv("MY_JUDGE_KEY", "secret")
    judge = make(
        rubric='Q: {prompt} A: {completion} Gold: {answer}. Say {{"score": x}} or {"score": 3}.',
        system="You are strict.",
        api_key_env="MY_JUDGE_KEY",
        temperature=0.5,
        extra_body={"seed": 7},
    )
    assert await ask(judge, "it is {answer}", answer=4) == [1.0]
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert server.bodies == [
        {
            "model": "judge-7b",
            "temperature": 0.5,
            "max_tokens": 1024,
            "seed": 7,
            "messages": [
                {"role": "system", "content": "You are strict."},
                # a completion that looks like a placeholder stays as it is
                {
                    "role": "user",
                    "content": 'Q: 2+2? A: it is {answer} Gold: 4. Say {"score": x} or {"score": 3}.',
                },
            ],
        }
    ]


async def test_a_conversation_is_shown_with_its_roles(judged) -> None:
    server, make = judged
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    steps = [{"role": "assistant", "content": None}, {"role": "tool", "content": "4"}]
    await make(rubric="{prompt}|{completion}")([prompt], [[*steps, {"role": "assistant", "content": "four"}]])
    assert server.bodies[0]["messages"][0]["content"] == "system: Be brief.\n\nuser: 2+2?|four"


async def test_what_the_user_got_wrong_is_said(judged, monkeypatch) -> None:
    _, make = judged
    with pytest.raises(ConfigError, match=r"\{solution\}.*no such column.*'answer'"):
        await ask(make(rubric="{solution}"), "x", answer=1)
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(ConfigError, match="NO_SUCH_KEY is not set"):
        await ask(make(api_key_env="NO_SUCH_KEY"), "x")
    for wrong in ({"score_range": (1, 1)}, {"score_pattern": "a(b)", "score_key": "s"}, {"score_pattern": "ab"}):
        with pytest.raises(ConfigError):
            make(**wrong)
    for wrong in ({"retries": -1}, {"max_concurrency": 0}, {"deadline_s": 0}):
        with pytest.raises(ConfigError):
            make(**wrong)


@pytest.mark.parametrize(
    ("reply", "arguments", "expected"),
    [
        ("Reasoning... Score: 0.25", {}, 0.25),
        ("score: 0.1, no: final **Score**: 1", {}, 1.0),
        ("Score (1-10): 7", {"score_range": (1, 10)}, None),
        ('{"score": 7}, **Score:** 8', {"score_range": (1, 10)}, 8.0),
        ("Score = 7", {"score_range": (1, 10)}, 7.0),
        ("Score: 7", {"score_range": (1, 10), "normalized": True}, 2 / 3),
        ("Score: -1", {"score_range": (-1, 1)}, -1.0),
        ("Score: 11", {"score_range": (1, 10)}, None),
        ("Score: -0.5", {}, None),
        ("no number", {}, None),
        ("", {}, None),
        ("[[3]]", {"score_range": (0, 5), "score_pattern": r"\[\[(\d+)\]\]"}, 3.0),
        ("[[three]]", {"score_pattern": r"\[\[(\w+)\]\]"}, None),
        ('Sure: {"why": "{odd", "rating": 4} end', {"score_key": "rating", "score_range": (0, 5)}, 4.0),
        ('{"rating": 1} {"rating": 2}', {"score_key": "rating", "score_range": (0, 5)}, 2.0),
        ('{"rating": "4"}', {"score_key": "rating", "score_range": (0, 5)}, None),
        ('{"rating": true}', {"score_key": "rating"}, None),
        ('{"rating": NaN}', {"score_key": "rating"}, None),
        ('{"other": 1} {broken', {"score_key": "rating"}, None),
    ],
)
def test_scores_in_replies(reply: str, arguments: dict, expected: float | None) -> None:
    judge = JudgeReward(base_url="http://x/v1", model="m", rubric="", **arguments)
    assert judge.read_score(reply) == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(
    "bad",
    [
        web.Response,  # an empty body with status 200
        lambda: web.Response(status=500, text="boom"),
        lambda: web.Response(status=503),
        lambda: web.Response(status=429, headers={"Retry-After": "0"}),
        lambda: web.Response(text="{not json"),
        lambda: web.json_response({"choices": []}),
        lambda: web.json_response(["a list"]),
        lambda: None,
        lambda: "I cannot say",
        lambda: "Score: 17",
    ],
)
async def test_what_may_pass_is_tried_again(judged, bad) -> None:
    server, make = judged
    server.script = lambda k, body: bad() if k < 2 else "Score: 0.5"
    judge = make(retries=2)
    assert await ask(judge, "x") == [0.5]
    assert dict(judge.counts) == {"requests": 3, "retries": 2, "cache_hits": 0}


@pytest.mark.parametrize(
    ("bad", "text"),
    [(lambda: web.Response(status=500, text="boom"), "HTTP 500: boom"), (lambda: None, "Server|Client")],
)
async def test_a_judge_that_is_down_is_an_error_with_its_url(judged, bad, text) -> None:
    """Not None: a run must not train on nothing. The scorer passes the error on as it is."""
    server, make = judged
    server.script = lambda k, body: bad()
    judge = make(retries=2)
    scorer = GroupScorer([judge])
    with pytest.raises(RewardError, match=rf"The judge at {judge.url} .*failed 3 times, last: .*({text})"):
        await scorer.score(group_of(1))
    assert len(server.bodies) == 3


async def test_nobody_listens() -> None:
    judge = JudgeReward(base_url="http://127.0.0.1:9/v1", model="m", rubric="", retries=1, backoff_s=0.001)
    with pytest.raises(RewardError, match=r"127\.0\.0\.1:9/v1/chat/completions .*failed 2 times"):
        await ask(judge, "x")


@pytest.mark.parametrize("status", [400, 401, 404])
async def test_a_refusal_is_not_repeated(judged, status) -> None:
    server, make = judged
    server.script = lambda k, body: web.Response(status=status, text="no such model")
    with pytest.raises(RewardError, match=f"refused the request: HTTP {status}: no such model"):
        await ask(make(), "x", "y")
    assert len(server.bodies) <= 2  # one for each completion


async def test_a_reply_without_a_score_leaves_its_completion_unscored(judged, caplog) -> None:
    server, make = judged
    server.script = lambda k, body: "Score: 1" if "good" in body["messages"][0]["content"] else "hm"
    judge = make(retries=1)
    assert await ask(judge, "good", "bad") == [1.0, None]
    assert judge.counts["unscored"] == 1 and len(server.bodies) == 3
    assert "no usable score; its last reply ends 'hm'" in caplog.text


async def test_a_judge_that_never_gives_a_score_is_an_error(judged) -> None:
    server, make = judged
    judge = make(retries=0, give_up_after=3)
    server.script = lambda k, body: "hm" if k != 2 else "Score: 1"
    assert [await ask(judge, str(k)) for k in range(5)] == [[None], [None], [1.0], [None], [None]]
    with pytest.raises(RewardError, match=rf"{judge.url} gave no usable score for 3 completions in a row"):
        await ask(judge, "5")


async def test_retry_after_is_waited_for_and_bounded_by_the_deadline(judged) -> None:
    """Waiting an hour would pass the deadline, so the call ends at once instead."""
    server, make = judged
    server.script = lambda k, body: web.Response(status=429, headers={"Retry-After": "3600"})
    with pytest.raises(RewardError, match=r"no reply within deadline_s=60 \(1 attempts\): HTTP 429"):
        await ask(make(deadline_s=60.0), "x")
    assert len(server.bodies) == 1


async def test_retry_after_replaces_the_backoff(judged) -> None:
    server, make = judged
    busy = {"Retry-After": "0.01"}
    server.script = lambda k, body: web.Response(status=429, headers=busy) if k == 0 else "Score: 1"
    assert await ask(make(backoff_s=1000.0, deadline_s=60.0), "x") == [1.0]  # its own wait would pass the deadline


def test_retry_after_as_date_and_nonsense() -> None:
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=100)
    assert 90 < _retry_after(email.utils.format_datetime(later, usegmt=True)) <= 100
    assert _retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    assert _retry_after("-3") == 0.0
    assert _retry_after("soon") is _retry_after(None) is None


async def test_a_judge_that_hangs_ends_at_the_deadline(judged) -> None:
    server, make = judged
    server.gate = asyncio.Event()
    with pytest.raises(RewardError, match=r"no reply within deadline_s=0\.2 .*no reply after 0\.2 s"):
        await ask(make(deadline_s=0.2), "x")


async def test_requests_at_once_are_bounded_over_all_groups(judged) -> None:
    server, make = judged
    server.gate, server.wait_for = asyncio.Event(), 3
    judge = make(max_concurrency=3)
    groups = [asyncio.create_task(ask(judge, *(f"{g} {i}" for i in range(4)))) for g in range(3)]
    await asyncio.wait_for(server.reached.wait(), 30)  # three do run at once
    server.gate.set()
    assert await asyncio.gather(*groups) == [[1.0] * 4] * 3
    assert server.most == 3 and len(server.bodies) == 12


async def test_a_cancelled_group_leaves_no_session(judged) -> None:
    server, make = judged
    server.gate = asyncio.Event()
    judge = make()
    task = asyncio.create_task(ask(judge, "a"))
    await asyncio.wait_for(server.reached.wait(), 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert judge._open == {}
    server.gate.set()
    assert await ask(judge, "a") == [1.0]


def test_it_pickles_and_has_a_name(monkeypatch) -> None:
    """F150, F154: the key itself does not travel."""
    monkeypatch.setenv("MY_JUDGE_KEY", "very secret")
    judge = JudgeReward(base_url="http://x/v1", model="m", rubric="r", api_key_env="MY_JUDGE_KEY", name="helpful")
    data = pickle.dumps(judge)
    assert b"very secret" not in data
    copy = pickle.loads(data)
    assert (copy.url, copy.rubric, copy.api_key_env) == ("http://x/v1/chat/completions", "r", "MY_JUDGE_KEY")
    assert is_async(copy)
    unnamed = JudgeReward(base_url="http://x/v1", model="m", rubric="r")
    assert reward_names([copy, unnamed, unnamed]) == ["helpful", "JudgeReward", "JudgeReward_2"]
