"""A reward from a model that judges completions, behind any server with OpenAI's chat completions endpoint.

Spoken with aiohttp, a core dependency, and not with the `openai` package: that one is only there where vLLM is, its own
retries could not be counted or held to one deadline, and the whole exchange is one POST.

A judge that cannot be reached must not end as a run that trains on nothing. So a request that fails for good raises
RewardError with the URL, and so do `give_up_after` completions in a row whose replies held no usable score; a single
such completion is left unscored (None).
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from asyncgrpo_core.errors import ConfigError, RewardError
from asyncgrpo_core.rewards.judge_cache import ReplyCache, cache_key
from asyncgrpo_core.rewards.judge_http import post_chat
from asyncgrpo_core.rewards.text import completion_text, message_text

if TYPE_CHECKING:
    import aiohttp

logger = logging.getLogger(__name__)

# "Score: 7", "**Score:** 7", '"score": 7'; not the 1 of "Score (1-10): 7", which is read by no one's guess
SCORE_PATTERN = r"(?i)\bscore[\s:=*_\"']{1,6}(-?\d+(?:\.\d+)?)"
_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([A-Za-z_]\w*)\}")


@dataclass
class _OpenJudge:
    """What belongs to one event loop, while at least one group is being judged on it."""

    session: aiohttp.ClientSession
    places: asyncio.Semaphore
    groups: int = 0


class JudgeReward:
    """An async reward function: each completion is rated by a model. Can be pickled; make one at a module's top level.

    Args:
        base_url: the server, with its /v1: requests go to {base_url}/chat/completions.
        model: the judge's name there.
        rubric: the user message. {prompt} and {completion} are the conversation before and the text of the last
            assistant message; {name} is the dataset column of that name; {{ and }} are braces.
        system: a system message before it.
        score_range: smallest and largest score; a number outside is no score.
        score_pattern: regular expression whose first group is the number; the reply's last match counts. Default:
            "score", some punctuation, a number.
        score_key: instead of a pattern: the reply holds a JSON object, and this key of the last one is the number.
        normalized: map score_range to 0..1 (all rewards have weight 1).
        api_key_env: environment variable that holds the key; the key itself is never stored or pickled.
        temperature, max_tokens: of the judge's reply; `extra_body` is merged into the request.
        retries: further attempts after a failed one. Retried: no connection, statuses 408, 409, 429 and 5xx, a broken
            body, a reply without a usable score. Waits double from `backoff_s`; a Retry-After header is obeyed.
        deadline_s: for one completion, all attempts and waits, from when it has its place.
        max_concurrency: requests at once, over all groups of this process.
        cache_size: replies kept in memory. cache_path: sqlite file for them besides.
        give_up_after: completions in a row without a usable score before it is an error.
        name: metric name; default "JudgeReward".

    `counts` holds "requests", "cache_hits", "retries" and "unscored" of this process.

    Raises (when called):
        RewardError: the judge is down, refuses the request, or gives no usable scores.
        ConfigError: a placeholder that names no column, or no such environment variable.
    """

    def __init__(
        self,
        *,
        base_url: str,
        model: str,
        rubric: str,
        system: str | None = None,
        score_range: tuple[float, float] = (0.0, 1.0),
        score_pattern: str | None = None,
        score_key: str | None = None,
        normalized: bool = False,
        api_key_env: str | None = None,
        temperature: float = 0.0,
        max_tokens: int = 1024,
        extra_body: Mapping[str, Any] | None = None,
        retries: int = 4,
        backoff_s: float = 1.0,
        deadline_s: float = 300.0,
        max_concurrency: int = 32,
        cache_size: int = 10_000,
        cache_path: str | None = None,
        give_up_after: int = 64,
        name: str | None = None,
    ) -> None:
        self._arguments = {key: value for key, value in locals().items() if key not in ("self", "__class__")}
        low, high = score_range
        if not low < high or (score_pattern and score_key):
            raise ConfigError(
                f"JudgeReward: score_range={score_range}, score_pattern={score_pattern!r}, score_key={score_key!r}.",
                "Give a range (low, high) with low < high, and a pattern or a key, not both.",
            )
        pattern = re.compile(score_pattern or SCORE_PATTERN)
        if pattern.groups < 1:
            raise ConfigError(f"score_pattern {score_pattern!r} has no group.", "Put the number into (...).")
        if retries < 0 or max_concurrency < 1 or not deadline_s > 0:
            raise ConfigError(
                f"JudgeReward: retries={retries}, max_concurrency={max_concurrency}, deadline_s={deadline_s}.",
                "Give retries >= 0, max_concurrency >= 1 and deadline_s > 0.",
            )
        self.url = base_url.rstrip("/") + "/chat/completions"
        self.rubric, self.system = rubric, system
        self.api_key_env = api_key_env
        self.body = {"model": model, "temperature": temperature, "max_tokens": max_tokens, **(extra_body or {})}
        self.retries, self.backoff_s, self.deadline_s = retries, backoff_s, deadline_s
        self.max_concurrency, self.give_up_after = max_concurrency, give_up_after
        self._range, self._normalized = (low, high), normalized
        self._pattern, self._key = pattern, score_key
        self._cache = ReplyCache(cache_size, cache_path)
        self._open: dict[asyncio.AbstractEventLoop, _OpenJudge] = {}
        self._unscored_in_a_row = 0
        self.counts: Counter[str] = Counter()
        if name is not None:
            self.__name__ = name

    def __reduce__(self) -> Any:
        return (_rebuild, (type(self), self._arguments))

    async def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Sequence[Any]
    ) -> list[float | None]:
        """One score, or None, per completion; equal texts are judged once."""
        questions = [
            self._question(prompt, completion, {name: values[index] for name, values in columns.items()})
            for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
        ]
        loop = asyncio.get_running_loop()
        opened = self._open.get(loop)
        if opened is None:
            opened = self._open[loop] = self._new_session()
        opened.groups += 1
        tasks = {question: asyncio.create_task(self._score(question, opened)) for question in dict.fromkeys(questions)}
        try:
            await asyncio.gather(*tasks.values())
        finally:
            for task in tasks.values():
                task.cancel()
            try:
                await asyncio.gather(*tasks.values(), return_exceptions=True)
            finally:
                opened.groups -= 1
                if opened.groups == 0:  # an event loop that ends must not find an open session
                    del self._open[loop]
                    await opened.session.close()
        self.counts["cache_hits"] += len(questions) - len(tasks)
        return [tasks[question].result() for question in questions]

    def _new_session(self) -> _OpenJudge:
        import aiohttp

        headers = {}
        if self.api_key_env is not None:
            if not os.environ.get(self.api_key_env):
                raise ConfigError(
                    f"The judge at {self.url} wants a key and the environment variable {self.api_key_env} is not set.",
                    f"Set {self.api_key_env} where the run is started.",
                )
            headers["Authorization"] = f"Bearer {os.environ[self.api_key_env]}"
        connector = aiohttp.TCPConnector(limit=self.max_concurrency)
        return _OpenJudge(
            aiohttp.ClientSession(headers=headers, connector=connector), asyncio.Semaphore(self.max_concurrency)
        )

    # one completion

    def _question(self, prompt: Any, completion: Any, columns: dict[str, Any]) -> str:
        known = {**columns, "prompt": _transcript(prompt), "completion": completion_text(completion)}

        def fill(match: re.Match[str]) -> str:
            if match.group(1) is None:
                return match.group(0)[0]
            if match.group(1) not in known:
                raise ConfigError(
                    f"The judge's rubric has the placeholder {match.group(0)}, and there is no such column.",
                    f"Use one of {sorted(known)}, or write {{{match.group(0)}}} for the braces themselves.",
                )
            return str(known[match.group(1)])

        return _PLACEHOLDER.sub(fill, self.rubric)

    async def _score(self, question: str, opened: _OpenJudge) -> float | None:
        key = cache_key(self.system, self.rubric, question, self.body)
        reply = await self._cached(key)
        score = None if reply is None else self.read_score(reply)
        if score is not None:
            self.counts["cache_hits"] += 1
            return score
        async with opened.places:
            return await self._ask(question, key, opened)

    async def _cached(self, key: str) -> str | None:
        if self._cache.path is None:
            return self._cache.get(key)
        return await asyncio.to_thread(self._cache.get, key)  # a disk may be slow

    async def _ask(self, question: str, key: str, opened: _OpenJudge) -> float | None:
        messages = [{"role": "user", "content": question}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        score: float | None = None

        def usable(reply: str) -> bool:
            nonlocal score
            score = self.read_score(reply)
            return score is not None

        reply = await post_chat(
            opened.session,
            self.url,
            {**self.body, "messages": messages},
            usable=usable,
            retries=self.retries,
            backoff_s=self.backoff_s,
            deadline_s=self.deadline_s,
            counts=self.counts,
        )
        if score is None:
            self._left_unscored(reply)
            return None
        self._unscored_in_a_row = 0
        if self._cache.path is None:
            self._cache.put(key, reply)
        else:
            await asyncio.to_thread(self._cache.put, key, reply)
        return score

    def _left_unscored(self, reply: str) -> None:
        self.counts["unscored"] += 1
        self._unscored_in_a_row += 1
        logger.warning("the judge at %s gave no usable score; its last reply ends %r", self.url, reply[-200:])
        if self._unscored_in_a_row >= self.give_up_after:
            raise RewardError(
                f"The judge at {self.url} gave no usable score for {self._unscored_in_a_row} completions in a row; "
                f"its last reply ends {reply[-200:]!r}.",
                "Make the rubric ask for the score in the form that score_pattern or score_key reads, within "
                f"score_range {self._range}; a longer max_tokens helps when replies are cut.",
            )

    def read_score(self, reply: str) -> float | None:
        """The score in a reply; None when there is none, or one outside score_range."""
        value = self._json_score(reply) if self._key is not None else self._pattern_score(reply)
        low, high = self._range
        if value is None or not math.isfinite(value) or not low <= value <= high:
            return None
        return (value - low) / (high - low) if self._normalized else value

    def _pattern_score(self, reply: str) -> float | None:
        found = list(self._pattern.finditer(reply))
        try:
            return float(found[-1].group(1)) if found else None
        except (TypeError, ValueError):
            return None

    def _json_score(self, reply: str) -> float | None:
        value, start, decoder = None, reply.find("{"), json.JSONDecoder()
        while start >= 0:
            try:
                parsed, end = decoder.raw_decode(reply, start)
            except (json.JSONDecodeError, RecursionError):
                end = start + 1
            else:
                value = parsed.get(self._key, value)
            start = reply.find("{", end)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _rebuild(cls: type[JudgeReward], arguments: dict[str, Any]) -> JudgeReward:
    return cls(**arguments)


def _transcript(prompt: Any) -> str:
    """The text of a single message; of several, each with its role before it."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return message_text(prompt[0])
    return "\n\n".join(f"{message.get('role', '')}: {message_text(message)}" for message in prompt)
