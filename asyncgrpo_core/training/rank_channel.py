"""Messages between rank 0 and the other trainer ranks: plans, rows and numbers, never the model's tensors.

    rank 0 (Hub) ── one TCP connection per rank ── rank k (Spoke)

Not a collective, because rank 0 waits for rollouts, servers and syncs for as long as they take: a rank that listens
here notices at once when rank 0 has died, is told of its errors, and hears every few seconds that it is still alive,
so that every wait has a short enough deadline. Samples travel as they are (int32 and float32 arrays, pickled): every
rank packs its own row.
"""

from __future__ import annotations

import hmac
import os
import pickle
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from asyncgrpo_core.errors import RankLostError

_LENGTH, _RANK = struct.Struct("<Q"), struct.Struct("<I")
_ALIVE: tuple[str] = ("alive",)
_TELL_S = 10.0  # an error is told within this time, or not at all


class Wire:
    """One end of a connection. Every call has a deadline and raises RankLostError when the other end is gone."""

    def __init__(self, sock: socket.socket, other: str, deadline_s: float) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._other, self._deadline_s = sock, other, deadline_s
        self._lock = threading.Lock()  # whole messages, from two threads

    def send(self, message: Any, deadline_s: float | None = None) -> None:
        data = pickle.dumps(message, protocol=5)
        with self._lock:
            self._put(data, deadline_s or self._deadline_s)

    def send_from_handler(self, message: Any) -> None:
        """As `send`, from a signal handler: nothing when it interrupts a `send`, or when the other end is gone."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._put(pickle.dumps(message, protocol=5), _TELL_S)
        except RankLostError:
            return  # the thread that was interrupted finds out by itself
        finally:
            self._lock.release()

    def _put(self, data: bytes, deadline_s: float) -> None:
        try:
            self._socket.settimeout(deadline_s)
            self._socket.sendall(_LENGTH.pack(len(data)))
            self._socket.sendall(data)
        except OSError as error:
            raise self._lost(error) from error

    def receive(self, deadline_s: float | None = None) -> Any:
        """The next message."""
        deadline = time.monotonic() + (deadline_s or self._deadline_s)
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size, deadline))
        return pickle.loads(self._exactly(length, deadline))

    def has_message(self) -> bool:
        """Whether `receive` would find something at once: a message, or that the other end is gone."""
        return self._readable(0)

    def close(self) -> None:
        self._socket.close()

    def _exactly(self, count: int, deadline: float) -> bytearray:
        data = bytearray(count)
        view, done = memoryview(data), 0
        while done < count:
            left = deadline - time.monotonic()
            try:
                # not a socket timeout: that belongs to the sending thread
                if left <= 0 or not self._readable(left):
                    raise TimeoutError(f"nothing was heard in time; ddp_timeout is {self._deadline_s:g} s")
                got = self._socket.recv_into(view[done:])
            except OSError as error:
                raise self._lost(error) from error
            if got == 0:
                raise self._lost(None)
            done += got
        return data

    def _readable(self, timeout_s: float) -> bool:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(1000 * timeout_s))

    def _lost(self, error: OSError | None) -> RankLostError:
        why = "its process has ended" if error is None else f"{type(error).__name__}: {error}"
        number = self._other.rpartition(" ")[2]
        return RankLostError(
            f"The connection to trainer {self._other} is lost ({why}).",
            f"Look at the end of its log (logs/trainer-{number}.log of the run); a process that ended without an error "
            "there was killed, mostly because memory ran out.",
        )


class Hub:
    """Rank 0's end: a wire to every other rank, and a thread that says every few seconds that it lives."""

    def __init__(self, wires: dict[int, Wire], alive_every_s: float) -> None:
        self.wires = wires
        self._closed = threading.Event()
        self._every_s = alive_every_s
        self._thread = threading.Thread(target=self._say_alive, name="asyncgrpo-ranks-alive", daemon=True)
        self._thread.start()

    def tell(self, message: Any) -> None:
        for wire in self.wires.values():
            wire.send(message)

    def tell_error(self, message: Any) -> None:
        """As `tell`, to as many ranks as can be reached soon."""
        for wire in self.wires.values():
            try:
                wire.send(message, _TELL_S)
            except RankLostError:
                continue  # that rank has ended by itself

    def news(self) -> tuple[int, tuple[bytes | None, str] | RankLostError] | None:
        """A rank that has ended by itself, and its error (None: no word of one); messages before it are dropped."""
        for rank, wire in self.wires.items():
            try:
                while wire.has_message():
                    kind, _, value = wire.receive(_TELL_S)
                    if kind == "error":
                        return rank, value
            except RankLostError as lost:
                return rank, lost
        return None

    def close(self) -> None:
        self._closed.set()
        self._thread.join(_TELL_S)
        for wire in self.wires.values():
            wire.close()

    def _say_alive(self) -> None:
        while not self._closed.wait(self._every_s):
            try:
                self.tell(_ALIVE)
            except RankLostError:
                return  # the main thread finds out by itself


class Spoke:
    """The end of a rank that is not 0."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def receive(self) -> Any:
        """The next message of rank 0."""
        while (message := self._wire.receive()) == _ALIVE:
            pass
        return message

    def send(self, message: Any) -> None:
        self._wire.send(message)

    def send_from_handler(self, message: Any) -> None:
        self._wire.send_from_handler(message)

    def news(self) -> tuple[int, tuple[bytes | None, str] | RankLostError] | None:
        """As `Hub.news`, of rank 0."""
        try:
            while self._wire.has_message():
                message = self._wire.receive(_TELL_S)
                if message[0] == "error":
                    return 0, message[2]
        except RankLostError as lost:
            return 0, lost
        return None

    def wait_for_hang_up(self, timeout_s: float) -> None:
        """Wait until rank 0 has closed the connection; whatever else it says is not heard."""
        deadline = time.monotonic() + timeout_s
        try:
            while (left := deadline - time.monotonic()) > 0:
                self._wire.receive(left)
        except RankLostError:
            return

    def close(self) -> None:
        self._wire.close()


def connect(rank: int, world_size: int, deadline_s: float) -> Hub | Spoke:
    """Connect all ranks of the default process group; every rank calls it at the same time.

    Args:
        deadline_s: longest time without a word from the other end.

    Raises:
        RankLostError: a rank did not come within the deadline.
    """
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    where: list[Any] = [None]
    listener: socket.socket | None = None
    if rank == 0:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family, backlog=world_size)
        where = [(listener.getsockname()[1], secrets.token_bytes(32))]
    try:
        torch.distributed.broadcast_object_list(where, src=0)
    except RuntimeError as error:
        raise RankLostError(
            f"Rank {rank} did not find all trainer ranks at the start ({' '.join(str(error).split())[:200]}).",
            "One of them ended while it loaded the policy or the data: look at the ends of logs/trainer-<rank>.log of "
            "the run; one without an error there was killed, mostly because memory ran out.",
        ) from error
    port, key = where[0]
    if listener is None:
        return _join(host, port, key, rank, deadline_s)
    with listener:
        return _accept_all(listener, key, world_size, deadline_s)


def _join(host: str, port: int, key: bytes, rank: int, deadline_s: float) -> Spoke:
    try:
        sock = socket.create_connection((host, port), timeout=deadline_s)
        sock.sendall(key + _RANK.pack(rank))
    except OSError as error:
        raise RankLostError(f"Rank {rank} cannot reach rank 0 at {host}:{port} ({error}).") from error
    return Spoke(Wire(sock, "rank 0", deadline_s))


def _accept_all(listener: socket.socket, key: bytes, world_size: int, deadline_s: float) -> Hub:
    wires: dict[int, Wire] = {}
    deadline = time.monotonic() + deadline_s
    while len(wires) < world_size - 1:
        try:
            listener.settimeout(max(deadline - time.monotonic(), 0.01))
            sock, _ = listener.accept()
        except OSError as error:
            missing = sorted(set(range(1, world_size)) - set(wires))
            raise RankLostError(f"The trainer ranks {missing} did not connect to rank 0 ({error}).") from error
        rank = _greeted(sock, key)
        if rank is None:
            sock.close()  # somebody else on this machine
        else:
            wires[rank] = Wire(sock, f"rank {rank}", deadline_s)
    return Hub(wires, alive_every_s=min(30.0, deadline_s / 4))


def _greeted(sock: socket.socket, key: bytes) -> int | None:
    """The rank at the other end, None when it is none of ours."""
    size, data = len(key) + _RANK.size, b""
    sock.settimeout(_TELL_S)
    try:
        while len(data) < size:
            part = sock.recv(size - len(data))
            if not part:
                return None
            data += part
    except OSError:
        return None
    return _RANK.unpack(data[len(key) :])[0] if hmac.compare_digest(data[: len(key)], key) else None


def encode_error(error: BaseException) -> tuple[bytes | None, str]:
    """An error for another process: pickled where that works, and its text."""
    text = f"{type(error).__name__}: {error}"
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:  # an exception of user code may hold anything
        return None, text
    return data, text


def decode_error(encoded: tuple[bytes | None, str], otherwise: Callable[[str], BaseException]) -> BaseException:
    """The error, or what `otherwise` makes of its text when it could not be pickled (or is no Exception)."""
    data, text = encoded
    if data is not None:
        error = pickle.loads(data)
        if isinstance(error, Exception):
            return error
    return otherwise(text)
