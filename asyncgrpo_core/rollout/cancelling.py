"""Ends tasks whose hooks may not want to end."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

logger = logging.getLogger(__name__)


async def cancel(tasks: list[asyncio.Task[Any]], deadline_s: float = 5.0) -> None:
    """Cancel tasks and wait until they are gone; their errors have been or are being raised elsewhere.

    A hook or reward function may swallow a cancellation, so it is repeated; after `deadline_s` the task is left to the
    end of the process.
    """
    pending = {task for task in tasks if not task.done()}
    for _ in range(int(deadline_s / 0.25)):
        if not pending:
            break
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=0.25)
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()  # mark it as seen
    if pending:
        logger.error("%d tasks did not end when they were cancelled: %s", len(pending), pending)
