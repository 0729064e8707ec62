"""Ranks that talk over sockets, each in a thread: leading, following, ends and errors (F005, F021)."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch.distributed.checkpoint.api import CheckpointException

from asyncgrpo_core.errors import AsyncGRPOError, CheckpointError, ConfigError, RankLostError, ServerError
from asyncgrpo_core.training import distributed
from asyncgrpo_core.training.distributed import Ranks
from asyncgrpo_core.training.rank_channel import Hub, Spoke, Wire, _greeted


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


def ranks(world_size: int, deadline_s: float = 5.0, alive_every_s: float = 60.0) -> list[Ranks]:
    pairs = {rank: tcp_pair() for rank in range(1, world_size)}
    made = [Ranks(rank, world_size, deadline_s) for rank in range(world_size)]
    made[0]._end = Hub({r: Wire(a, f"rank {r}", deadline_s) for r, (a, _) in pairs.items()}, alive_every_s)
    for rank, (_, b) in pairs.items():
        made[rank]._end = Spoke(Wire(b, "rank 0", deadline_s))
    return made


def on_all(made: list[Ranks], work: Callable[[Ranks], Any]) -> list[Any]:
    """Run the same on every rank; what each returned or raised."""
    results: list[Any] = [None] * len(made)

    def body(rank: int) -> None:
        try:
            results[rank] = work(made[rank])
        except BaseException as error:
            made[rank].fail(error)
            results[rank] = error

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(len(made))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive(), "a rank hangs"
    return results


def test_one_rank_needs_nobody():
    alone = Ranks(0, 1, 5.0)
    alone.open()
    alone.on("score", lambda x: 2 * x)
    alone.on("parameters", lambda: [1, 2])
    assert alone.lead("a", lambda: alone.together("score", 4)) == 8
    assert list(alone.iterate("parameters")) == [1, 2]
    assert alone.scatter("rows", ["x"]) == "x" and alone.gather("m", 3) == [3] and not alone.is_open
    alone.check()
    alone.close()


def test_f021_every_rank_gets_its_own_item_and_rank_zero_hears_of_all():
    rows = [np.arange(rank * 1000, dtype=np.int32) for rank in range(3)]

    def work(r: Ranks):
        mine = r.scatter("rows", rows if r.is_leader else None)
        return len(mine), r.gather("sums", (r.rank, float(mine.sum())))

    results = on_all(ranks(3), work)
    assert [length for length, _ in results] == [0, 1000, 2000]
    assert results[0][1] == [(rank, float(rows[rank].sum())) for rank in range(3)] and results[1][1] == []


def test_a_row_larger_than_the_sockets_buffers_arrives():
    row = np.random.default_rng(0).integers(0, 1 << 30, 3_000_000, dtype=np.int32)
    results = on_all(ranks(2), lambda r: r.scatter("rows", [0, row] if r.is_leader else None))
    np.testing.assert_array_equal(results[1], row)


def test_the_others_do_along_what_rank_zero_asks_and_hear_the_result():
    done: list[list[Any]] = [[], []]
    made = ranks(2)
    for r in made:
        r.on("score", lambda x, r=r: done[r.rank].append(("score", x)) or r.rank)
        r.on("parameters", lambda r=r: (done[r.rank].append(i) or i for i in range(4)))

    def rank_zero() -> Any:
        seen = list(made[0].iterate("parameters"))
        return seen, made[0].together("score", [7])

    assert on_all(made, lambda r: r.lead("sync", rank_zero)) == [([0, 1, 2, 3], 0)] * 2
    assert done[0] == done[1] == [0, 1, 2, 3, ("score", [7])]


def test_an_abandoned_iteration_is_run_out_before_the_error_is_told():
    steps: list[list[int]] = [[], []]
    made = ranks(2)
    for r in made:
        r.on("parameters", lambda r=r: (steps[r.rank].append(i) or i for i in range(6)))

    def rank_zero() -> None:
        next(made[0].iterate("parameters"))
        raise ServerError("refused", "restart it")

    errors = on_all(made, lambda r: r.lead("sync", rank_zero))
    assert [type(e) for e in errors] == [ServerError, ServerError] and errors[1].fix == "restart it"
    assert "Raised on rank 0; rank 1 was told." in errors[1].__notes__
    assert steps[0] == steps[1] == list(range(6))


def test_an_iteration_that_failed_itself_is_left():
    made = ranks(2)

    def broken():
        yield 1
        raise ConfigError("a layer cannot be merged.")

    for r in made:
        r.on("parameters", broken)
    errors = on_all(made, lambda r: r.lead("sync", lambda: list(made[0].iterate("parameters"))))
    assert all(isinstance(e, ConfigError) for e in errors)


def test_interrupts_and_what_cannot_be_pickled_are_told_in_words():
    errors = on_all(ranks(2), lambda r: r.lead("plan", lambda: (_ for _ in ()).throw(KeyboardInterrupt())))
    assert isinstance(errors[0], KeyboardInterrupt) and type(errors[1]) is AsyncGRPOError

    class Local(Exception):
        pass

    errors = on_all(ranks(2), lambda r: r.lead("plan", lambda: (_ for _ in ()).throw(Local("x"))))
    assert type(errors[1]) is AsyncGRPOError and "Local: x" in str(errors[1])


def test_ranks_that_got_out_of_step_say_so():
    errors = on_all(ranks(2), lambda r: r.agree("save" if r.is_leader else "log", 1))
    assert "waits for 'log' and rank 0 is at 'save'" in str(errors[1])


def test_a_dead_rank_zero_is_noticed_at_once():
    made = ranks(2, deadline_s=60.0)
    made[0].close(failed=True)
    started = time.monotonic()
    with pytest.raises(RankLostError, match=r"rank 0 is lost .*process has ended"):
        made[1].lead("plan", lambda: None)
    assert time.monotonic() - started < 5


def test_a_silent_rank_zero_is_waited_for_only_until_the_deadline():
    made = ranks(2, deadline_s=0.3)
    with pytest.raises(RankLostError, match="nothing was heard in time"):
        made[1].lead("plan", lambda: None)


def test_a_rank_zero_that_is_busy_but_alive_is_waited_for():
    made = ranks(2, deadline_s=0.5, alive_every_s=0.05)
    assert on_all(made, lambda r: r.lead("plan", lambda: time.sleep(1.5) or "rows")) == ["rows", "rows"]


def test_rank_zero_hears_of_an_error_while_it_waits_and_while_it_gathers():
    made = ranks(2)

    def wait() -> None:
        while True:
            made[0].check()
            time.sleep(0.01)

    def work(r: Ranks) -> None:
        if r.rank == 1:
            raise ZeroDivisionError("in a row")
        r.lead("plan", wait)

    errors = on_all(made, work)
    assert "rank 1 failed with ZeroDivisionError: in a row" in str(errors[0])
    made = ranks(2)
    made[1].fail(ZeroDivisionError("in a row"))
    with pytest.raises(AsyncGRPOError, match="rank 1 failed with ZeroDivisionError"):
        made[0].gather("metrics", 1)


def test_a_wish_to_stop_reaches_rank_zero_while_it_waits_and_is_no_item():
    made = ranks(3)

    def wait() -> str:
        while made[0].asked_to_stop is None:
            made[0].check()
            time.sleep(0.01)
        return made[0].asked_to_stop

    def work(r: Ranks) -> Any:
        if r.rank == 2:
            r.ask_to_stop("SIGTERM")  # as a signal handler does, at any moment
        answer = r.lead("plan", wait)
        r.ask_to_stop("SIGINT")
        numbers = r.gather("metrics", r.rank)
        r.close()
        return answer, numbers

    assert on_all(made, work) == [("SIGTERM", [0, 1, 2]), ("SIGTERM", []), ("SIGTERM", [])]
    assert made[0].asked_to_stop == "SIGINT"


def test_a_signal_that_interrupts_a_message_neither_hangs_nor_tears_it():
    """The handler runs in the thread that holds the connection."""
    a, b = tcp_pair()
    wire, other = Wire(a, "rank 0", 5.0), Wire(b, "rank 1", 5.0)
    with wire._lock:
        wire.send_from_handler("stop")
    assert not other.has_message()
    wire.send_from_handler("stop")
    assert other.receive() == "stop"
    other.close()
    for _ in range(3):
        wire.send_from_handler("nobody hears it")  # and nothing is raised in the middle of other work


def test_a_dead_rank_is_noticed_by_rank_zero():
    made = ranks(2, deadline_s=60.0)
    made[1].close(failed=True)
    with pytest.raises(RankLostError, match="rank 1 is lost"):
        made[0].check()


GLOO = "[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer. GLHF!"


def broken_collective() -> RuntimeError:
    return RuntimeError(GLOO)


def broken_save() -> CheckpointError:
    """What a sharded checkpoint makes of it."""
    error = CheckpointError("The checkpoint could not be written.")
    error.__cause__ = CheckpointException("save", {1: (RuntimeError(GLOO), None)})
    return error


@pytest.mark.parametrize("broken", [broken_collective, broken_save])
def test_a_broken_collective_is_explained_by_the_rank_that_broke_it(broken):
    """In the middle of a forward nobody listens: the word of another rank waits in the connection."""
    made = ranks(3)
    made[1].gather("metrics", "of the step before")
    made[2].fail(ZeroDivisionError("a bug of rank 2."))
    assert "rank 2 failed with ZeroDivisionError: a bug of rank 2. The traceback" in str(made[0].explained(broken()))
    made = ranks(3)
    made[2].close(failed=True)  # killed
    cause = made[0].explained(broken())
    assert isinstance(cause, RankLostError) and "rank 2 is lost (its process has ended)" in str(cause)
    assert "logs/trainer-2.log" in str(cause)


def test_a_broken_collective_is_explained_by_rank_zero_too():
    made = ranks(2)
    made[0].fail(ServerError("The server is away.", "Start it."))
    assert isinstance(cause := made[1].explained(broken_collective()), ServerError)
    assert cause.told_by_rank_zero and str(cause) == "The server is away. Start it."
    made = ranks(2)
    made[0].close(failed=True)
    assert isinstance(cause := made[1].explained(broken_collective()), RankLostError)
    assert "rank 0 is lost" in str(cause) and "logs/trainer-0.log" in str(cause)


def test_the_rank_between_hears_the_cause_and_not_its_own_broken_collective():
    """Rank 2 fails, ranks 0 and 1 find the same collective broken: all of them name rank 2's error."""
    made = ranks(3)

    def work(r: Ranks) -> None:
        error = ZeroDivisionError("a bug of rank 2") if r.rank == 2 else broken_collective()
        cause = r.explained(error)
        r.fail(cause)
        raise cause

    errors = on_all(made, work)
    assert all("ZeroDivisionError: a bug of rank 2" in f"{type(e).__name__}: {e}" for e in errors)


def test_a_collective_that_nobody_explains_names_the_deadline(monkeypatch):
    monkeypatch.setattr("asyncgrpo_core.training.distributed._LEADER_ASKS_S", 0.1)
    made = ranks(2, deadline_s=17.0)  # rank 1 hangs
    cause = made[0].explained(broken_collective())
    assert isinstance(cause, RankLostError) and "ddp_timeout (17 s)" in str(cause) and "reset by peer" in str(cause)


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("x"), RuntimeError("CUDA out of memory"), ServerError("gloo"), KeyboardInterrupt()]
)
def test_a_rank_s_own_error_is_its_own(error):
    made = ranks(2)
    made[1].close(failed=True)
    assert made[0].explained(error) is error
    assert Ranks(0, 1, 1.0).explained(broken_collective()).args == (GLOO,)  # alone


def test_no_rank_leaves_before_rank_zero_has_ended():
    made, order = ranks(2), []

    def work(r: Ranks) -> None:
        if r.is_leader:
            time.sleep(0.3)
            order.append("rank 0 has ended")
        r.close()
        order.append(r.rank)

    on_all(made, work)
    assert order[0] == "rank 0 has ended"


def test_a_rank_that_was_told_of_an_error_stays_until_rank_zero_has_closed():
    """A rank that ends first is why torchrun kills rank 0, which still has checkpoints and its error to write."""
    made, order = ranks(2), []

    def work(r: Ranks) -> None:
        try:
            r.lead("plan", lambda: (_ for _ in ()).throw(ServerError("away")))
        except ServerError as error:
            r.fail(error)
        if r.is_leader:
            time.sleep(0.3)  # its pipeline closes
            order.append("rank 0 has closed")
        r.close(failed=True)
        order.append(r.rank)

    on_all(made, work)
    assert order[0] == "rank 0 has closed" and sorted(order[1:]) == [0, 1]


def test_an_error_of_its_own_does_not_make_a_rank_wait(monkeypatch):
    made = ranks(2)
    made[1].fail(ZeroDivisionError("a bug"))
    started = time.monotonic()
    made[1].close(failed=True)
    assert time.monotonic() - started < 2
    made = ranks(2)
    monkeypatch.setattr(distributed, "_HANG_UP_S", 0.2)
    made[0].fail(ServerError("away"))
    with pytest.raises(ServerError):
        made[1].lead("plan", lambda: None)
    made[1].close(failed=True)  # rank 0 hangs: not for ever


def test_a_stranger_is_not_let_in():
    key = b"k" * 32
    for hello, rank in [(key + b"\x03\0\0\0", 3), (b"x" * 36, None), (b"short", None)]:
        ours, theirs = socket.socketpair()
        theirs.sendall(hello)
        theirs.close()
        assert _greeted(ours, key) == rank
