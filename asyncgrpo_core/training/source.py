"""From the rollout worker's buffer to the rows of one step.

    buffer (files) -> records -> pending samples -> [stale? oversize?] -> row -> step

Consumes: `GroupRecord`s from the buffer. Waits for: enough fresh samples to fill the rows of a step. Unblocked
by: the rollout worker; or by the stop condition, which ends the wait with no step.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from asyncgrpo_core.errors import ConfigError
from asyncgrpo_core.ledger import LedgerWriter
from asyncgrpo_core.metrics import MetricWindow
from asyncgrpo_core.packing.planner import CostModel, MicroBatch, RowPlanner
from asyncgrpo_core.rollout.buffer import SampleBuffer
from asyncgrpo_core.slots import SlotBook
from asyncgrpo_core.types import Slot, TrainingSample

Step = list[MicroBatch]

logger = logging.getLogger(__name__)

_POLL_S = 0.004  # the buffer is a folder; listing it costs some 20 microseconds
_CHECK_EVERY_S = 1.0
_MOST_OVERSIZE = 512  # samples dropped for their length, with none in between that fits: then the run ends
_STARVED_AFTER_S = 0.5


class WorkerHandle(Protocol):
    """What the source needs of the rollout worker."""

    def check(self) -> None: ...

    def in_flight(self) -> int: ...

    def is_idle(self) -> bool: ...

    def set_allowance(self, tokens: int) -> None: ...


@dataclass
class TokenAllowance:
    """How many tokens the worker may have produced, counted from its start (reference, 'Staleness').

    The worker may keep max(max_staleness, 1) steps of tokens queued or in progress. A step's size is what the
    last step used; before the first step every row counts as full.

    Example: max_staleness=4, first step assumed 2,048 tokens -> the worker may produce 8,192. A step then uses
    1,900 -> 1,900 consumed + 4 x 1,900 = 9,500.
    """

    max_staleness: int
    step_tokens: int  # tokens of the last step (before the first: rows x token_budget)
    preloaded: int = 0  # tokens that came from a checkpoint's buffer, not from this worker
    consumed: int = 0  # tokens trained or dropped by the trainer, preloaded ones included
    granted: int = 0  # extra tokens given because the trainer starved with an idle worker

    @property
    def value(self) -> int:
        return self.consumed - self.preloaded + self.granted + max(self.max_staleness, 1) * self.step_tokens


class SampleSource:
    """Pulls samples and forms the rows of a step.

    Args:
        token_budget: most tokens in a row.
        world_size: rows per micro-batch.
        row_cost: what they are balanced by.
        version: the current policy version (number of weight syncs done).
        should_stop: asked while waiting; True ends the wait without a step.
        synchronous: generate only while a step is being formed. The worker is shut out as soon as the rows are full,
            and the step is handed out when its last group has ended; what did not fit waits for the next step.
    """

    def __init__(
        self,
        *,
        buffer: SampleBuffer,
        book: SlotBook,
        ledger: LedgerWriter,
        window: MetricWindow,
        worker: WorkerHandle,
        allowance: TokenAllowance,
        token_budget: int,
        max_staleness: int,
        version: Callable[[], int],
        should_stop: Callable[[], bool],
        world_size: int = 1,
        row_cost: CostModel | None = None,
        synchronous: bool = False,
    ) -> None:
        self.buffer, self.book, self.ledger, self.window, self.worker = buffer, book, ledger, window, worker
        self.allowance = allowance
        self.token_budget, self.max_staleness, self.world_size = token_budget, max_staleness, world_size
        self._version, self._should_stop, self._row_cost = version, should_stop, row_cost
        self.pending: deque[TrainingSample] = deque()
        self.loop_state: Any = None  # the newest state of a custom loop
        self.wait_s = 0.0  # of the step being formed
        self._granted_and_waiting = False  # tokens were granted, and no group has come since
        self._forming: Step = []
        self._oversize_in_a_row = 0
        self._synchronous, self._shut, self._shuttings = synchronous, synchronous, 0

    def preload(self, samples: Iterable[TrainingSample]) -> None:
        """Put a checkpoint's buffered samples at the head of the queue."""
        samples = list(samples)
        self.pending.extend(samples)
        self.allowance.preloaded += _tokens(samples)

    def publish_allowance(self) -> None:
        """Tell the worker how far it may go: nowhere while it is shut out."""
        # Each shutting has a number of its own, so that the worker's answer to an earlier one is not taken for it.
        self.worker.set_allowance(-self._shuttings if self._shut else self.allowance.value)

    def next_step(self, num_microbatches: int) -> Step | None:
        """The micro-batches of a step; None when asked to stop before it was full.

        What an unfinished step had pulled goes back to the head of the queue, so a stop loses nothing.

        Raises:
            RolloutError: the worker failed, died or hangs.
        """
        self.wait_s = 0.0
        self._open()
        step: Step = []
        self._forming = step
        for _ in range(num_microbatches):
            microbatch = self._next_microbatch()
            if microbatch is None:
                self._put_back(_samples(step))
                return None
            step.append(microbatch)
        if not self._wait_until_shut():
            self._put_back(_samples(step))
            return None
        self.window.add("rollout/queue_size", len(self.pending))
        self.window.add("perf/rollout_wait_s", self.wait_s)
        return step

    def finish_step(self, step: Step, step_number: int) -> None:
        """Write a finished step into the books and let the worker run on."""
        for sample in _samples(step):
            self.book.sample_trained(sample, step_number)
        self._used_up(step)

    def drop_step(self, step: Step) -> None:
        """Give up the samples of a step that was skipped because it was not finite, and let the worker run on."""
        for sample in _samples(step):
            self.book.sample_dropped(sample, "non_finite")
        self._used_up(step)

    def _used_up(self, step: Step) -> None:
        used = _tokens(_samples(step))
        self.ledger.write(self.book.drain_rows())
        self.allowance.consumed += used
        self.allowance.step_tokens = used
        self.allowance.granted = 0
        self.publish_allowance()

    def drain(self) -> None:
        """Take what the worker has put into the buffer: metrics to the window, outcomes to the book."""
        records = self.buffer.take()
        if not records:
            return
        for record in records:
            self.window.extend(record.metrics)
            samples, regenerate = self.book.apply(record)
            self._regenerate(regenerate)
            self.pending.extend(samples)
            # what the book refused is produced for the worker, and nobody will train it
            self.allowance.consumed += _tokens(record.samples) - _tokens(samples)
            self._granted_and_waiting &= record.outcome == "report"  # a worker that is only scoring reports too
            self.loop_state = record.loop_state if record.loop_state is not None else self.loop_state
        # Oldest policy first, then in the order of generation: a group of long rollouts arrives late and would
        # otherwise go stale behind shorter ones that started after it.
        self.pending = deque(sorted(self.pending, key=lambda sample: (sample.model_version, sample.group_id)))
        self.ledger.write(self.book.drain_rows())

    def _next_microbatch(self) -> MicroBatch | None:
        planner = RowPlanner(self.token_budget, world_size=self.world_size, cost=self._row_cost)
        waiting_since: float | None = None
        last_check = time.monotonic()
        while True:
            is_idle = self.worker.is_idle()  # asked before what it has made is taken
            self.drain()
            closed = self._fill(planner)
            if closed is not None:
                return closed
            if self._should_stop():
                self._put_back(planner.open_samples)
                return None
            now = time.monotonic()
            waiting_since = waiting_since or now
            if now - last_check > _CHECK_EVERY_S:
                self.worker.check()
                last_check = now
            if is_idle:
                self._grant_missing(planner)
            elif not self._synchronous and now - waiting_since > _STARVED_AFTER_S:
                self._feed_starving(planner)
            time.sleep(_POLL_S)
            self.wait_s += time.monotonic() - now

    # synchronous steps

    def _open(self) -> None:
        if self._shut:
            self._shut = False
            self.publish_allowance()

    def _wait_until_shut(self) -> bool:
        """Shut the worker out and wait for the groups that it has begun; False when asked to stop meanwhile."""
        if not self._synchronous:
            return True
        self._shut = True
        self._shuttings += 1
        self.publish_allowance()
        last_check = time.monotonic()
        while not self.worker.is_idle():
            now = time.monotonic()
            if self._should_stop():
                return False
            if now - last_check > _CHECK_EVERY_S:
                self.worker.check()
                last_check = now
            time.sleep(_POLL_S)
            self.wait_s += time.monotonic() - now
        self.drain()
        return True

    def _grant_missing(self, planner: RowPlanner) -> None:
        """Let an idle worker make what the open micro-batch lacks."""
        capacity, forwarded = self.token_budget * self.world_size, planner.open_tokens
        # samples that share tokens fill it slower than they count
        missing = (capacity - forwarded) * _tokens(planner.open_samples) // forwarded if forwarded else capacity
        self._grant(max(1, self._lacking(planner, max(1, missing))))

    def _lacking(self, planner: RowPlanner, tokens: int) -> int:
        """By how much the allowance is too small for `tokens` more than the worker has produced; no sample waits."""
        taken = _tokens(planner.open_samples) + _tokens(_samples(self._forming))
        return self.allowance.consumed - self.allowance.preloaded + taken + tokens - self.allowance.value

    def _fill(self, planner: RowPlanner) -> MicroBatch | None:
        """Move pending samples into the planner; the micro-batch once a sample does not fit any more."""
        while self.pending:
            sample = self.pending[0]
            if self._version() - sample.model_version > self.max_staleness:
                self._drop(self.pending.popleft(), "stale", "sample/dropped_stale_count")
                continue
            placement = planner.add(sample)
            if placement.closed is not None:
                return placement.closed  # the sample that closed it stays pending, for the next micro-batch
            self.pending.popleft()
            if placement.oversize:
                self._drop_oversize(sample)
            else:
                self._oversize_in_a_row = 0
        return None

    def _drop_oversize(self, sample: TrainingSample) -> None:
        length = sample.sequence.num_tokens
        logger.warning(
            "A sample of %d tokens is longer than token_budget=%d and is dropped.", length, self.token_budget
        )
        self._drop(sample, "oversize", "batch/dropped_oversize_count")
        self._oversize_in_a_row += 1
        if self._oversize_in_a_row >= _MOST_OVERSIZE:
            raise ConfigError(
                f"The last {_MOST_OVERSIZE} samples were all longer than training.token_budget = {self.token_budget} "
                f"tokens (the last has {length}) and were dropped: no step would ever be full.",
                "Raise training.token_budget above a prompt and its completion, or lower max_completion_length.",
            )

    def _put_back(self, samples: list[TrainingSample]) -> None:
        self.pending.extendleft(reversed(samples))

    def _feed_starving(self, planner: RowPlanner) -> None:
        # A row closes when the next sample does not fit, and samples that share tokens fill it slower than they
        # count: filling it can need more than the last step used. The worker then stands at its allowance while the
        # trainer waits: with no group left it says so (`is_idle`). With groups that are only being scored one row's
        # tokens are granted, and again only when a group has come: they may take a minute, and the worker must not
        # run ahead meanwhile.
        if self._granted_and_waiting or self.worker.in_flight() != 0 or self.buffer.size != 0:
            return
        self._granted_and_waiting = True
        row = self.token_budget * self.world_size
        self._grant(max(row, self._lacking(planner, row)))

    def _grant(self, tokens: int) -> None:
        self.allowance.granted += tokens
        self.publish_allowance()

    def _drop(self, sample: TrainingSample, reason: str, counter: str) -> None:
        self.window.add(counter, 1)
        self.allowance.consumed += sample.sequence.num_tokens
        self._regenerate(self.book.sample_dropped(sample, reason))
        self.ledger.write(self.book.drain_rows())
        self.publish_allowance()

    def _regenerate(self, request: tuple[Slot, int] | None) -> None:
        if request is not None:
            self.buffer.request_regeneration(*request)


def _samples(step: Step) -> list[TrainingSample]:
    return [sample for microbatch in step for sample in microbatch.samples]


def _tokens(samples: Iterable[TrainingSample]) -> int:
    """As the worker counts them: each sample whole."""
    return sum(sample.sequence.num_tokens for sample in samples)
