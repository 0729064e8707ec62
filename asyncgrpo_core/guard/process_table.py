"""Reading /proc: who is alive, who descends from whom, who carries our mark.

A process is named by its pid *and* its start time in clock ticks since boot (field 22 of /proc/<pid>/stat). A pid
alone may have been given to another process since it was written down.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

# Set in the environment of everything a guard starts.
RUN_MARK = "ASYNCGRPO_RUN"  # the run folder
GUARD_MARK = "ASYNCGRPO_GUARD"  # a random id, one per guard


class ProcessId(NamedTuple):
    """A process that cannot be mistaken for another one of this boot."""

    pid: int
    start_ticks: int


class _Stat(NamedTuple):
    state: str
    ppid: int
    start_ticks: int


def boot_id() -> str:
    """The kernel's random id of this boot: start times and pids of another boot (or host) mean nothing here."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the program's name in parentheses and may itself hold spaces and parentheses.
    fields = text[text.rindex(")") + 2 :].split()
    return _Stat(fields[0], int(fields[1]), int(fields[19]))


def identify(pid: int) -> ProcessId | None:
    """The full name of a running process; None when there is none or it is a zombie."""
    stat = _stat(pid)
    if stat is None or stat.state in "ZX":
        return None
    return ProcessId(pid, stat.start_ticks)


def is_running(process: ProcessId) -> bool:
    """Whether exactly this process still runs (a zombie does not)."""
    return identify(process.pid) == process


def _all_stats() -> dict[int, _Stat]:
    stats = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (stat := _stat(int(entry))) is not None:
            stats[int(entry)] = stat
    return stats


def descendants(pid: int) -> list[ProcessId]:
    """All running processes below `pid`, parents before their children; zombies are passed through, not listed."""
    stats = _all_stats()
    children: dict[int, list[int]] = {}
    for child, stat in stats.items():
        children.setdefault(stat.ppid, []).append(child)
    found: list[ProcessId] = []
    todo = list(children.get(pid, []))
    while todo:
        current = todo.pop(0)
        todo.extend(children.get(current, []))
        if stats[current].state not in "ZX":
            found.append(ProcessId(current, stats[current].start_ticks))
    return found


def ancestors(pid: int) -> set[int]:
    """`pid` and every process above it."""
    line: set[int] = set()
    while pid > 0 and pid not in line:
        line.add(pid)
        stat = _stat(pid)
        pid = stat.ppid if stat is not None else 0
    return line


def marked(mark: str, value: str) -> list[ProcessId]:
    """Running processes that were started with `mark=value` in their environment.

    Processes of other users cannot be read and are left out. A program that writes its title over this area
    (vLLM's engine does) loses the mark, so it alone is not enough to find everything.
    """
    wanted = f"{mark}={value}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            environ = Path(f"/proc/{entry}/environ").read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if wanted in environ.split(b"\0") and (process := identify(int(entry))) is not None:
            found.append(process)
    return found


def send_signal(process: ProcessId, number: int) -> bool:
    """Signal exactly this process; False when it is gone already.

    The pid is pinned by a pidfd before its start time is compared, so it cannot change hands in between.
    """
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        if not is_running(process):
            return False
        signal.pidfd_send_signal(handle, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)


def kill_all(processes: list[ProcessId], timeout_s: float = 10.0) -> list[ProcessId]:
    """SIGKILL all of them and wait; returns those that still run after `timeout_s` (stuck in the kernel)."""
    left = list(processes)
    deadline = time.monotonic() + timeout_s
    while left:
        for process in left:
            send_signal(process, signal.SIGKILL)
        left = [p for p in left if is_running(p)]
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return left


def kill_leftovers(guard_id: str, known: list[ProcessId]) -> list[ProcessId]:
    """Kill what carries a dead guard's mark, what it had listed, and everything below; returns what survived."""
    spare = ancestors(os.getpid())
    for _ in range(5):  # a fork in flight can add a process between the look and the kill
        found = {p for p in known if is_running(p)} | set(marked(GUARD_MARK, guard_id))
        for process in list(found):
            found.update(descendants(process.pid))
        targets = [p for p in found if p.pid not in spare]
        if not targets:
            return []
        survivors = kill_all(targets)
        if survivors:
            return survivors
    return []
