"""One chat completion over HTTP: attempts, waits and the deadline. Used by judge.py."""

from __future__ import annotations

import asyncio
import datetime
import email.utils
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from asyncgrpo_core.errors import RewardError

if TYPE_CHECKING:
    import aiohttp

_RETRIED = frozenset({408, 409, 425, 429})  # and every 5xx
_LONGEST_BACKOFF_S = 60.0


class _Failed(Exception):
    """An attempt that failed. `retry_after_s` is what the server asked for; `final` means that another cannot help."""

    def __init__(self, why: str, *, retry_after_s: float | None = None, final: bool = False) -> None:
        super().__init__(why)
        self.retry_after_s, self.final = retry_after_s, final


async def post_chat(
    session: aiohttp.ClientSession,
    url: str,
    body: dict[str, Any],
    *,
    usable: Callable[[str], bool],
    retries: int,
    backoff_s: float,
    deadline_s: float,
    counts: Counter[str],
) -> str:
    """The reply's text; when no attempt gave a usable one, the last unusable one.

    Args:
        usable: whether a reply will do; if not, the next attempt is made.
        retries, backoff_s, deadline_s: see `JudgeReward`.
        counts: gets "requests" and "retries".

    Raises:
        RewardError: the last attempt failed, the server refused the request, or the deadline passed.
    """
    deadline = time.monotonic() + deadline_s
    why, unusable = "no attempt was made", None
    for attempt in range(retries + 1):
        counts["requests"] += 1
        counts["retries"] += attempt > 0
        wait_s = min(_LONGEST_BACKOFF_S, backoff_s * 2**attempt) * random.uniform(0.5, 1.0)
        try:
            reply = await _attempt(session, url, body, deadline)
        except _Failed as failed:
            why, unusable = str(failed), None
            if failed.final:
                raise _error(url, f"refused the request: {why}", body) from None
            wait_s = wait_s if failed.retry_after_s is None else failed.retry_after_s
        else:
            if usable(reply):
                return reply
            why, unusable = "its reply holds no usable score", reply
        if time.monotonic() + wait_s >= deadline:
            if unusable is not None:
                return unusable
            raise _error(url, f"gave no reply within deadline_s={deadline_s:g} ({attempt + 1} attempts): {why}", body)
        if attempt < retries:
            await asyncio.sleep(wait_s)
    if unusable is not None:
        return unusable
    raise _error(url, f"failed {retries + 1} times, last: {why}", body)


def _error(url: str, what: str, body: dict[str, Any]) -> RewardError:
    return RewardError(
        f"The judge at {url} (model {body['model']!r}) {what}.",
        "Look at that server; when it is only slow or busy, raise deadline_s or retries or lower max_concurrency.",
    )


async def _attempt(session: aiohttp.ClientSession, url: str, body: dict[str, Any], deadline: float) -> str:
    import aiohttp

    left = deadline - time.monotonic()
    try:
        async with session.post(url, json=body, timeout=aiohttp.ClientTimeout(total=max(left, 1e-3))) as response:
            text = await response.text()
    except TimeoutError:
        raise _Failed(f"no reply after {left:.1f} s") from None
    except (aiohttp.ClientError, OSError, UnicodeDecodeError) as error:
        raise _Failed(f"{type(error).__name__}: {error}") from None
    if response.status != 200:
        retried = response.status in _RETRIED or response.status >= 500
        raise _Failed(
            f"HTTP {response.status}: {text[:300]}",
            retry_after_s=_retry_after(response.headers.get("Retry-After")) if retried else None,
            final=not retried,
        )
    try:
        content = json.loads(text)["choices"][0]["message"].get("content")
    except (ValueError, LookupError, TypeError, AttributeError):
        raise _Failed(f"the body is no chat completion: {text[:300]}") from None
    return content if isinstance(content, str) else ""


def _retry_after(value: str | None) -> float | None:
    """Seconds of a Retry-After header: a number, or a date."""
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        when = email.utils.parsedate_to_datetime(value)
    except ValueError:
        return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=datetime.UTC)
    return max(0.0, (when - datetime.datetime.now(datetime.UTC)).total_seconds())
