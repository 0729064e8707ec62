"""What every task with a side effect has in common: it is never cached and its result is never written."""

from __future__ import annotations

from typing import Any

from prefect.cache_policies import NO_CACHE

SIDE_EFFECT: dict[str, Any] = {"cache_policy": NO_CACHE, "persist_result": False}
