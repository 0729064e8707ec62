"""Several trainer ranks: rank 0 leads, the others follow. With one rank every call here is a plain function call.

    rank 0                                            other ranks
    lead("start", work): work() runs                  lead("start", ...): do along what is asked, until it is done
      together("score", ids): forward         ─────►    the same forward
      iterate("parameters"): gathers          ─────►    the same gathers
    ◄─ returns what work returned             ─────►  ◄─ returns the same; or raises rank 0's error

    scatter(rows of every rank)               ─────►  one item for each rank
    gather(numbers)                           ◄─────  a list on rank 0

Every rank makes the same calls in the same order, each with a name: ranks that got out of step say so.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from asyncgrpo_core.errors import AsyncGRPOError, RankLostError
from asyncgrpo_core.training.rank_channel import Hub, Spoke, Wire, connect, decode_error, encode_error

logger = logging.getLogger(__name__)

_HANG_UP_S = 120.0  # rank 0 closes its pipeline within this time after an error
# A failed collective is seen at once, by whoever is in it; the word of the rank that it failed for takes a little
# longer. Rank 0 passes such a word on, so the others wait longer than it does.
_LEADER_ASKS_S, _OTHERS_ASK_S = 3.0, 10.0


class Ranks:
    """What one rank knows of the others.

    Args:
        rank, world_size: of this process.
        deadline_s: longest time without a word from another rank (`ddp_timeout`).
    """

    def __init__(self, rank: int, world_size: int, deadline_s: float) -> None:
        self.rank, self.world_size = rank, world_size
        self._deadline_s = deadline_s
        self._handlers: dict[str, Callable[..., Any]] = {}
        self._end: Hub | Spoke | None = None
        self._iteration: _Iteration | None = None
        self._error_is_known = False
        self._was_told = False
        self.asked_to_stop: str | None = None  # on rank 0: why another rank wants to stop

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    @property
    def is_open(self) -> bool:
        """Whether there are other ranks, and they are connected."""
        return self._end is not None

    def open(self) -> None:
        """Connect the ranks; nothing when they are. Raises RankLostError when one is missing."""
        self._error_is_known = self._was_told = False
        self.asked_to_stop = None
        if self.world_size > 1 and self._end is None:
            self._end = connect(self.rank, self.world_size, self._deadline_s)

    def on(self, name: str, handler: Callable[..., Any]) -> None:
        """What every rank does when rank 0 calls `together(name)` or `iterate(name)`: forwards, gathers."""
        self._handlers[name] = handler

    # -- rank 0 works, the others do along what it asks ------------------------------------------------------------

    def lead(self, name: str, work: Callable[[], Any]) -> Any:
        """Run `work` on rank 0 alone; every rank returns what it returned (plain, picklable data).

        Raises:
            Whatever `work` raised, on every rank.
            RankLostError: the rank at the other end is gone.
        """
        if not self.is_leader:
            return self._follow(name)
        result = work()
        self._tell(("done", name, result))
        return result

    def agree(self, name: str, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        return self.lead(name, lambda: value)

    def together(self, name: str, *args: Any) -> Any:
        """Rank 0, inside `lead`: run a handler on all ranks at once; rank 0's result."""
        self._tell(("call", name, args))
        return self._handlers[name](*args)

    def iterate(self, name: str) -> Iterator[Any]:
        """Rank 0, inside `lead`: iterate over what a handler yields, while the other ranks iterate along.

        Abandoned half-way (a sync that failed), it is run to its end before rank 0 says anything else: the other
        ranks are in its collectives.
        """
        if self.world_size == 1:
            return iter(self._handlers[name]())
        self._tell(("iterate", name, ()))
        self._iteration = _Iteration(self._handlers[name]())
        return self._iteration

    def _follow(self, name: str) -> Any:
        assert isinstance(self._end, Spoke)
        while True:
            kind, what, value = self._end.receive()
            if kind == "done" and what == name:
                return value
            if kind == "call":
                self._handlers[what](*value)
            elif kind == "iterate":
                deque(self._handlers[what](), maxlen=0)
            elif kind == "error":
                raise self._told(value)
            else:
                raise AsyncGRPOError(
                    f"Rank {self.rank} waits for {name!r} and rank 0 is at {what!r}: the ranks are out of step.",
                    "A callback or an overridden method does something on some ranks only.",
                )

    # -- rows down, numbers up -------------------------------------------------------------------------------------

    def scatter(self, name: str, items: list[Any] | None) -> Any:
        """The item of this rank; rank 0 gives one for each rank, the others None."""
        if not self.is_leader:
            return self._follow(name)
        assert items is not None and len(items) == self.world_size
        self._finish_iteration()
        if isinstance(self._end, Hub):
            for rank, wire in self._end.wires.items():
                wire.send(("done", name, items[rank]))
        return items[0]

    def gather(self, name: str, item: Any) -> list[Any]:
        """The items of all ranks in rank order, on rank 0; an empty list on the others.

        Raises:
            AsyncGRPOError: another rank failed; says which and how.
        """
        if isinstance(self._end, Spoke):
            self._end.send(("item", name, item))
            return []
        items = [item]
        if isinstance(self._end, Hub):
            for rank in range(1, self.world_size):
                kind, what, value = self._hear(self._end.wires[rank])
                if kind == "error":
                    raise _failed(rank, value)
                if what != name:
                    raise AsyncGRPOError(f"Rank 0 waits for {name!r} and rank {rank} sent {what!r}: out of step.")
                items.append(value)
        return items

    def ask_to_stop(self, reason: str) -> None:
        """Another rank than 0, in a signal handler: rank 0 reads it in `check` and `gather`, and decides."""
        if isinstance(self._end, Spoke):
            self._end.send_from_handler(("stop", "", reason))

    def _hear(self, wire: Wire) -> tuple[str, str, Any]:
        """The next message that is no wish to stop."""
        while (message := wire.receive())[0] == "stop":
            self.asked_to_stop = message[2]
        return message

    def check(self) -> None:
        """Rank 0, while the others only listen: raise when one of them has ended or failed; see `asked_to_stop`."""
        if isinstance(self._end, Hub):
            for rank, wire in self._end.wires.items():
                while wire.has_message():
                    kind, _, value = wire.receive()
                    if kind == "stop":
                        self.asked_to_stop = value
                        continue
                    raise _failed(rank, value) if kind == "error" else AsyncGRPOError(f"Rank {rank} is out of step.")

    # -- ends ------------------------------------------------------------------------------------------------------

    def explained(self, error: BaseException) -> BaseException:
        """What ended another rank, when `error` is a collective that failed for it; else `error` itself.

        gloo and NCCL only say that a connection is gone, or that nothing came in time.
        """
        if self._end is None or not _is_of_a_collective(error):
            return error
        deadline = time.monotonic() + (_LEADER_ASKS_S if self.is_leader else _OTHERS_ASK_S)
        while (news := self._end.news()) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if news is None:
            return RankLostError(
                f"A collective of rank {self.rank} failed, and no trainer rank has said why "
                f"({' '.join(str(error).split())[:200]}).",
                f"A rank hangs or is slower than ddp_timeout ({self._deadline_s:g} s): look at the ends of "
                "logs/trainer-<rank>.log of the run.",
            )
        rank, what = news
        if isinstance(what, RankLostError):
            return what
        return _failed(rank, what) if self.is_leader else self._told(what)

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks of an error that ends this one. They need not listen; nothing is raised."""
        if self._error_is_known or self._end is None:
            return
        self._error_is_known = True
        message = ("error", "", encode_error(error))
        try:
            if isinstance(self._end, Hub):
                self._finish_iteration()
                self._end.tell_error(message)
            elif not isinstance(error, RankLostError):
                self._end.send(message)
        except Exception as second:  # the error itself is on its way up
            logger.warning("The other ranks could not be told of the error: %s", second)

    def close(self, *, failed: bool = False) -> None:
        """Wait until every rank has come this far, and disconnect.

        After an error rank 0 waits for nobody, and who was told of it waits for rank 0: torchrun ends all ranks soon
        after the first one, and rank 0 still has a worker to stop and an error to write.
        """
        if self._end is None:
            return
        try:
            if not failed:
                self.agree("end", None)
                self._end.news()  # a wish that came too late: closed unread, it would break the connection
            elif self._was_told and isinstance(self._end, Spoke):
                self._end.wait_for_hang_up(_HANG_UP_S)
        finally:
            self._end.close()
            self._end = None

    def _tell(self, message: tuple[str, str, Any]) -> None:
        self._finish_iteration()
        if isinstance(self._end, Hub):
            self._end.tell(message)

    def _finish_iteration(self) -> None:
        iteration, self._iteration = self._iteration, None
        if iteration is not None:
            iteration.run_out()

    def _told(self, encoded: tuple[bytes | None, str]) -> BaseException:
        self._error_is_known = self._was_told = True
        error = decode_error(encoded, lambda text: AsyncGRPOError(f"Trainer rank 0 ended with {text}"))
        error.add_note(f"Raised on rank 0; rank {self.rank} was told.")
        error.told_by_rank_zero = True  # type: ignore[attr-defined]  # read by launch.trainer_main
        return error


class _Iteration:
    """Rank 0's side of an iteration in which the other ranks take part."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = iter(items)
        self._failed = False

    def __iter__(self) -> _Iteration:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._items)
        except StopIteration:
            raise
        except BaseException:
            self._failed = True
            raise

    def run_out(self) -> None:
        if not self._failed:
            deque(self._items, maxlen=0)


def _failed(rank: int, encoded: tuple[bytes | None, str]) -> AsyncGRPOError:
    return AsyncGRPOError(
        f"Trainer rank {rank} failed with {' '.join(encoded[1].split()).rstrip('.')}.",
        f"The traceback is in its log (logs/trainer-{rank}.log of the run).",
    )


def _is_of_a_collective(error: BaseException) -> bool:
    """Of torch.distributed: gloo raises plain RuntimeErrors, and a sharded checkpoint wraps what failed in it."""
    for link in (error, error.__cause__):
        text = str(link).lower()
        plain = isinstance(link, RuntimeError | CheckpointException) and ("gloo" in text or "nccl" in text)
        if plain or isinstance(link, torch.distributed.DistError):
            return True
    return False
