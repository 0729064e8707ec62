"""Runs the groups of an AsyncRolloutLoop: four kinds of task on one event loop.

    dispatch   takes regenerations and prompts, starts a group when the token allowance and the gate have room;
               freed by ended groups, by the trainer raising the allowance
    groups     one task per group: its rollouts at once, each through the gate; then into the score queue
    scorers    take groups from the score queue, many at once; write the group's record to the buffer
    clocks     heartbeat, /metrics poll, report

The first task that ends, even cleanly, ends the run; only the heartbeat ends cleanly, when the trainer says stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from asyncgrpo_core.errors import AsyncGRPOError, RolloutError, ServerError
from asyncgrpo_core.rollout.adapter_uses import AdapterRevokedError
from asyncgrpo_core.rollout.admission import BUSY, RolloutGate, TokenAdmission
from asyncgrpo_core.rollout.assemble import FinishedGroup, ended_record, make_group
from asyncgrpo_core.rollout.cancelling import cancel
from asyncgrpo_core.rollout.clocks import REPORT_EVERY_S, LoadWatch, Reporter
from asyncgrpo_core.rollout.context import FirstPrompt, RolloutContext
from asyncgrpo_core.rollout.environments import EnvironmentFailedError
from asyncgrpo_core.rollout.group_metrics import agent_events, generation_events
from asyncgrpo_core.rollout.load_control import ConcurrencyCap
from asyncgrpo_core.rollout.one_rollout import FinishedRollout, run_rollout
from asyncgrpo_core.rollout.picker import Picked, PromptPicker
from asyncgrpo_core.rollout.prompts import open_prompts
from asyncgrpo_core.rollout.reward_counts import RewardCounts
from asyncgrpo_core.rollout.scoring import GroupScorer, RewardTimeoutError
from asyncgrpo_core.rollout.streak import FailureStreak
from asyncgrpo_core.server.fleet import ServerFleet
from asyncgrpo_core.server.generation import RequestRejectedError, ServerUnavailableError
from asyncgrpo_core.types import GroupRecord, RolloutGroup, Slot

if TYPE_CHECKING:
    from asyncgrpo_core.rollout.loop import AsyncRolloutLoop

logger = logging.getLogger(__name__)

_WAKE_EVERY_S = 0.02  # the trainer's shared values have no way to wake us
_HEARTBEAT_EVERY_S = 0.2
_STATE_EVERY_S = 1.0
# Groups that failed by a reward's deadline or by replies that make no sense: one now and then is generated again, so
# many in a row end the run.
_FAILED_IN_A_ROW = 8
# A server that has answered nothing for this long while groups fail is down, not busy.
_SILENT_SERVER_S = 120.0


@dataclass
class _Origin:
    """Where a running group comes from; `version` is set when its first rollout starts.

    `open_rollouts` counts its rollouts that have not finished, running or waiting at the gate.
    """

    slot: Slot
    generation: int
    group_id: int
    open_rollouts: int
    version: int | None = None


class GroupPipeline:
    """One run of a loop; see the module's picture."""

    def __init__(self, loop: AsyncRolloutLoop, fleet: ServerFleet, should_stop: Callable[[], bool]) -> None:
        config = loop.config
        self._loop = loop
        self._fleet = fleet
        self._should_stop = should_stop
        prompts = open_prompts(
            loop.dataset,
            config.seed,
            config.train_sampling_strategy,
            start_index=loop.dataset_start_index,
            resume_state=loop.resume_state,
        )
        self._picker = PromptPicker(
            prompts,
            loop.rollout_buffer.take_regenerations,
            loop.filter_prompt,
            needs_prompt=loop.environments is None,
        )
        self._admission = TokenAdmission(loop.token_allowance.value)
        self._cap = ConcurrencyCap(config.max_concurrent_rollouts, loop.max_model_len, fleet.num_servers)
        self._gate = RolloutGate(config.max_concurrent_rollouts)
        self._scorer = GroupScorer(
            loop.reward_funcs,
            num_threads=loop.groups_scored_at_once,
            timeout_s=config.reward_timeout,
            environments=loop.environment_classes,
        )
        self._reward_counts = RewardCounts(loop.reward_funcs)
        self._replies = FailureStreak(
            "Reading the server's replies", count=_FAILED_IN_A_ROW, seconds=0.0, fix="Look at the server's log."
        )
        self._rewards = FailureStreak(
            "Scoring",
            count=_FAILED_IN_A_ROW,
            seconds=config.reward_timeout,
            fix="Make the reward function faster, or raise reward_timeout.",
        )
        self._score_queue: asyncio.Queue[FinishedGroup] = asyncio.Queue(loop.score_queue_maxsize)
        self._dispatched: list[tuple[Slot, int]] = []
        self._groups: set[asyncio.Task[None]] = set()
        self._group_error: asyncio.Future[None] | None = None
        self._open_rollouts = 0  # of all groups
        self._to_score = 0  # groups whose rollouts have finished and that no scorer has taken
        self._next_group_id = 0
        self._last_answer = time.monotonic()
        self._eos = frozenset(loop.eos_token_ids)
        self._changed = asyncio.Event()
        self._last_put = time.monotonic()
        self._last_state = 0.0
        self._load_watch = LoadWatch(fleet, self._cap, self._gate, loop.metrics_queue)
        self._reporter = Reporter(
            loop.metrics_queue,
            lambda: loop.generated_tokens_value.value,
            {
                "rollout/concurrency": lambda: self._gate.running,
                "rollout/concurrency_cap": lambda: self._cap.value,
                "rollout/score_queue_size": self._score_queue.qsize,
            },
            self._after_report,
        )

    async def run(self) -> None:
        """Run until the trainer says stop. Raises the first error of any task."""
        self._group_error = asyncio.get_running_loop().create_future()
        await self._load_watch.poll()  # the cap must hold before the first request
        heartbeat = asyncio.create_task(self._heartbeat())
        tasks = [
            heartbeat,
            asyncio.create_task(self._dispatch()),
            asyncio.create_task(self._load_watch.run()),
            asyncio.create_task(self._reporter.run()),
            *(asyncio.create_task(self._score_loop()) for _ in range(self._loop.groups_scored_at_once)),
        ]
        try:
            done, _ = await asyncio.wait([*tasks, self._group_error], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            if heartbeat not in done:
                raise RolloutError("A task of the rollout loop ended on its own.", "This is a bug; please report it.")
        finally:
            await cancel([*tasks, *self._groups])
            if not self._group_error.done():
                self._group_error.cancel()

    def close(self) -> None:
        self._scorer.close()

    # dispatch

    async def _dispatch(self) -> None:
        while True:
            await self._wait_for_room()
            picked, rejected = self._picker.pick()
            if picked is not None:
                self._start_group(picked)
                continue
            assert rejected is not None
            self._dispatched.append((rejected, 0))
            self._put(GroupRecord(outcome="filtered", slot=rejected))
            self._picker.check_rejections()
            await asyncio.sleep(0)  # a filter may reject many prompts in a row

    async def _wait_for_room(self) -> None:
        waited_from: float | None = None
        while True:
            self._admission.allowance = self._loop.token_allowance.value
            self._loop.idle_at_value.value = self._admission.allowance if self._admission.is_idle else BUSY
            if not self._admission.may_start():
                if waited_from is None and not self._admission.probing:
                    waited_from = time.monotonic()
            elif self._open_rollouts < self._gate.limit and self._to_score <= self._score_queue.maxsize:
                break
            self._changed.clear()
            # not asyncio.wait_for: in Python 3.11 it swallows a cancellation that meets the event being set
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_WAKE_EVERY_S):
                    await self._changed.wait()
        if waited_from is not None:
            self._loop.metrics_queue.record("rollout/backpressure_s", time.monotonic() - waited_from)

    def _start_group(self, picked: Picked) -> None:
        slot, generation, row = picked
        origin = _Origin(slot, generation, self._next_group_id, self._loop.config.num_generations)
        self._next_group_id += 1
        self._open_rollouts += origin.open_rollouts
        self._admission.group_started()
        self._dispatched.append((slot, generation))
        task = asyncio.create_task(self._run_group(origin, row))
        self._groups.add(task)
        task.add_done_callback(self._group_done)

    def _group_done(self, task: asyncio.Task[None]) -> None:
        self._groups.discard(task)
        self._changed.set()
        error = None if task.cancelled() else task.exception()
        if error is not None and self._group_error is not None and not self._group_error.done():
            self._group_error.set_exception(error)

    # one group

    async def _run_group(self, origin: _Origin, row: dict[str, Any]) -> None:
        shared = FirstPrompt()
        tasks = [
            asyncio.create_task(self._run_rollout(origin, index, row, shared)) for index in range(origin.open_rollouts)
        ]
        try:
            rollouts = await asyncio.gather(*tasks)
        except RequestRejectedError:
            raise
        except ServerError as error:
            self._admission.group_failed()
            self._put_failed(origin.slot, origin.generation, origin, error)
            if not isinstance(error, ServerUnavailableError):  # it answered, and not what was asked for
                self._replies.failed(time.monotonic(), str(error))
            self._raise_if_silent(error)
            return
        # how often an environment may fail is the environments' own watch's business
        except (EnvironmentFailedError, AdapterRevokedError) as error:
            self._admission.group_ended(0)
            self._put_failed(origin.slot, origin.generation, origin, error)
            return
        finally:
            await cancel(tasks)
            self._open_rollouts -= origin.open_rollouts
            self._fleet.forget(origin.group_id)
        self._replies.succeeded(time.monotonic())
        group = make_group(row, rollouts, origin.version or 0, origin.group_id, origin.slot.row)
        finished = FinishedGroup(origin.slot, origin.generation, group, rollouts)
        self._admission.group_generated(finished.forwarded_tokens)
        self._changed.set()
        finished.events = generation_events(rollouts, self._eos) + agent_events(rollouts, tools=self._loop.tools_on)
        blocked_from = time.monotonic()
        finished.group.queued_at = blocked_from
        self._to_score += 1
        await self._score_queue.put(finished)
        self._loop.metrics_queue.record("rollout/score_block_s", time.monotonic() - blocked_from)

    async def _run_rollout(
        self, origin: _Origin, index: int, row: dict[str, Any], shared: FirstPrompt
    ) -> FinishedRollout:
        loop = self._loop
        async with self._gate:
            if origin.version is None:
                origin.version = loop.model_version_value.value
            context = RolloutContext(origin.slot, origin.generation, index, shared, origin.group_id, row)
            rollout = await self._run_under_version(context, origin.version)
        origin.open_rollouts -= 1
        self._open_rollouts -= 1
        self._cap.rollout_finished(self._fleet.server_of(origin.group_id, index))
        self._last_answer = time.monotonic()
        self._changed.set()
        return rollout

    async def _run_under_version(self, context: RolloutContext, version: int) -> FinishedRollout:
        loop = self._loop

        async def run(adapter_version: int | None) -> FinishedRollout:
            context.adapter_version = adapter_version
            return await run_rollout(loop, context, version, want_top=loop.config.score_centering)

        return await (run(None) if loop.adapters is None else loop.adapters.run(run))

    def _put_failed(self, slot: Slot, generation: int, ids: _Origin | RolloutGroup, error: AsyncGRPOError) -> None:
        version = ids.version or 0 if isinstance(ids, _Origin) else ids.model_version
        logger.error("group %d (slot %s) failed: %s", ids.group_id, slot, error)
        self._put(
            GroupRecord(
                outcome="failed",
                slot=slot,
                generation=generation,
                group_id=ids.group_id,
                model_version=version,
                error=str(error),
            )
        )
        self._changed.set()

    def _raise_if_silent(self, error: ServerError) -> None:
        silent_s = time.monotonic() - self._last_answer
        if silent_s > _SILENT_SERVER_S:
            raise RolloutError(
                f"The vLLM server at {self._fleet.base_url} has answered no group for "
                f"{silent_s:.0f} s; the last error was: {error}",
                "Look at the server's log and restart it.",
            )

    # scoring

    async def _score_loop(self) -> None:
        while True:
            finished = await self._score_queue.get()
            self._to_score -= 1
            started = time.monotonic()
            try:
                scores = await self._scorer.score(finished.group)
            except RewardTimeoutError as error:
                self._admission.group_ended(0)
                self._put_failed(finished.slot, finished.generation, finished.group, error)
                self._rewards.failed(time.monotonic(), str(error))
                continue
            self._rewards.succeeded(time.monotonic())
            finished.group.rewards = scores.total
            advantages = self._loop.compute_advantages(finished.group)
            record = ended_record(finished, scores, advantages)
            now = time.monotonic()
            record.metrics.append(("rollout/score_s", "mean", now - started, 1.0))
            record.metrics.append(("rollout/score_wait_s", "mean", started - finished.group.queued_at, 1.0))
            self._admission.group_ended(sum(sample.sequence.num_tokens for sample in record.samples))
            self._put(record)
            self._changed.set()

    def _put(self, record: GroupRecord) -> None:
        record.dispatched, self._dispatched = self._dispatched, []
        record.metrics += self._loop.metrics_queue.drain()
        if time.monotonic() - self._last_state >= _STATE_EVERY_S:
            record.loop_state = self._loop.state_dict()
            self._last_state = time.monotonic()
        self._loop.rollout_buffer.put(record)
        self._last_put = time.monotonic()

    # clocks

    async def _heartbeat(self) -> None:
        while not self._should_stop():
            self._loop.heartbeat_value.value = time.monotonic()
            if self._loop.adapters is not None:
                self._loop.adapters.end_revoked()
            await asyncio.sleep(_HEARTBEAT_EVERY_S)

    def _after_report(self) -> None:
        """Metrics and announcements must not wait for a group that takes minutes."""
        self._loop.metrics_queue.extend(self._reward_counts.events())
        if time.monotonic() - self._last_put >= REPORT_EVERY_S:
            self._put(GroupRecord(outcome="report"))
