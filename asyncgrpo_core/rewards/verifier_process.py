"""The inside of a verifier process: reads one request per line on stdin, answers on stdout. See verifiers.py.

    {"load": "pkg.mod"}                                   -> {"ok": null} | {"missing": "why"}
    {"job": "pkg.mod:func", "request": ..., "timeout_s"}  -> {"stage": name} ..., then {"ok": value} | {"error": "why"}

It ends when stdin does, when its parent is another process than at the start, and, whatever it is stuck in, shortly
after the deadline of the request it works on: SIGALRM keeps its default action, which ends the process in the kernel,
so an owner that was killed leaves no verifier even when a single C call (a power of huge integers) never returns.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import select
import signal
import sys
from typing import Any, TextIO

GRACE_S = 1.0  # the owner kills at the deadline; this is for an owner that is gone
LOAD_S = 120.0  # imports, on a slow disk
_MAX_MEMORY = 8 << 30  # address space: an expression that blows up raises MemoryError instead of filling the machine
_LOOK_EVERY_S = 5.0


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is no reply
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-c in a terminal reaches the whole group; the owner ends us
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = _MAX_MEMORY if hard == resource.RLIM_INFINITY else min(_MAX_MEMORY, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    parent = os.getppid()
    while True:
        readable, _, _ = select.select([0], [], [], _LOOK_EVERY_S)
        if not readable:
            if os.getppid() != parent:
                return  # a forked sibling may hold our stdin open
            continue
        line = sys.stdin.buffer.readline()
        if not line.endswith(b"\n"):
            return
        message = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, message.get("timeout_s", LOAD_S) + GRACE_S)
        reply = _load(message["load"]) if "load" in message else _run(message, replies)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _say(replies, reply)


def _load(module: str) -> dict[str, Any]:
    try:
        importlib.import_module(module).load()
    except ImportError as error:
        return {"missing": str(error)}
    return {"ok": None}


def _run(message: dict[str, Any], replies: TextIO) -> dict[str, Any]:
    module, _, name = message["job"].partition(":")
    job = getattr(importlib.import_module(module), name)
    try:
        return {"ok": job(message["request"], lambda stage: _say(replies, {"stage": stage}))}
    except Exception as error:  # also RecursionError and MemoryError: what a model writes can raise anything
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def _say(replies: TextIO, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
