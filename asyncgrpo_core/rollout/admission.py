"""When a new group may start (token allowance) and how many rollouts may run at once (gate). No I/O, no clock."""

from __future__ import annotations

import asyncio
from collections import deque

BUSY = -(2**62)  # what the worker reports in place of the allowance at which it stands idle


class TokenAdmission:
    """Keeps generation from running ahead of training (reference, 'Staleness').

    The unit is *forwarded tokens*: prompt and completion tokens of a group's samples. `allowance` is cumulative: what
    this worker may have produced plus in progress since it started; the trainer raises it as it uses samples up.
    Groups in progress count with the mean size of the groups finished lately. Until the first group has finished
    there is no estimate and one group runs at a time; so it does after a group failed, until one succeeds again.
    """

    _WINDOW = 64  # finished groups in the mean: follows completions as they get longer or shorter

    def __init__(self, allowance: int) -> None:
        self.allowance = allowance
        self.produced = 0
        self.in_progress = 0
        self._sizes: deque[int] = deque(maxlen=self._WINDOW)
        self._sum = 0
        self._probing = True

    @property
    def group_estimate(self) -> float:
        """Expected forwarded tokens of one group; 0.0 before the first finished."""
        return self._sum / len(self._sizes) if self._sizes else 0.0

    def may_start(self) -> bool:
        """Whether a new group may start now."""
        if self._probing and self.in_progress:
            return False
        return self.produced + self.in_progress * self.group_estimate < self.allowance

    @property
    def is_idle(self) -> bool:
        """Whether no group is in progress and none may start: nothing happens until the allowance is raised."""
        return self.in_progress == 0 and not self.may_start()

    @property
    def probing(self) -> bool:
        """Whether groups run one at a time until one has finished."""
        return self._probing

    def group_started(self) -> None:
        self.in_progress += 1

    def group_generated(self, tokens: int) -> None:
        """All rollouts of a group are there: `tokens` forwarded tokens, not yet scored."""
        if len(self._sizes) == self._WINDOW:
            self._sum -= self._sizes[0]
        self._sizes.append(tokens)
        self._sum += tokens
        self._probing = False

    def group_ended(self, queued_tokens: int) -> None:
        """A group left the worker with `queued_tokens` forwarded tokens in the buffer (0 when dropped)."""
        self.in_progress -= 1
        self.produced += queued_tokens

    def group_failed(self) -> None:
        """A group ended because the server did not answer."""
        self.in_progress -= 1
        self._probing = True


class RolloutGate:
    """A semaphore whose limit may change while it is held; waiters are served in order.

    Lowering the limit lets running rollouts go on and new ones wait.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.running = 0
        self._waiters: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    @property
    def has_room(self) -> bool:
        """Whether a new rollout would start at once."""
        return self.running < self.limit and not self._waiters

    async def __aenter__(self) -> None:
        if self.has_room:
            self.running += 1
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self._release()  # the place was given and the task cancelled in the same turn of the loop
            elif waiter in self._waiters:  # a release in the same turn may have passed over it already
                self._waiters.remove(waiter)
            raise

    async def __aexit__(self, *_exc: object) -> None:
        self._release()

    def set_limit(self, limit: int) -> None:
        self.limit = max(1, limit)
        self._admit()

    def _release(self) -> None:
        self.running -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiters and self.running < self.limit:
            waiter = self._waiters.popleft()
            if not waiter.done():
                self.running += 1
                waiter.set_result(None)
