"""The rollout process: builds the loop from what the trainer pickled and runs it until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncgrpo_core.rollout.adapter_uses import PLACES, AdapterUses
from asyncgrpo_core.rollout.admission import BUSY
from asyncgrpo_core.rollout.buffer import SampleBuffer
from asyncgrpo_core.rollout.outbox import ErrorOutbox, MetricOutbox

logger = logging.getLogger("asyncgrpo_core.rollout.worker")


@dataclass
class SharedValues:
    """Numbers in shared memory, each with one writer and no lock (aligned 8-byte stores are atomic).

    Written by the trainer: version, server_versions (one per server, `LEFT_OUT` for a server that holds no proved
    policy), allowance, oldest_adapter, stop. By the worker: heartbeat (time.monotonic()), ready, in_flight,
    idle_at, generated_tokens, adapter_uses (see `AdapterUses`).
    """

    version: Any
    server_versions: Any
    allowance: Any
    stop: Any
    heartbeat: Any
    ready: Any
    in_flight: Any
    idle_at: Any  # the allowance at which no group is in progress and none may start (admission.BUSY: there is one)
    generated_tokens: Any
    adapter_uses: Any
    oldest_adapter: Any

    @classmethod
    def create(cls, context: Any, version: int, allowance: int, servers: int = 1) -> SharedValues:
        def integer(value: int = 0) -> Any:
            return context.RawValue("q", value)

        return cls(
            version=integer(version),
            server_versions=context.RawArray("q", [version] * servers),
            allowance=integer(allowance),
            stop=integer(),
            heartbeat=context.RawValue("d", 0.0),
            ready=integer(),
            in_flight=integer(),
            idle_at=integer(BUSY),
            generated_tokens=integer(),
            adapter_uses=context.RawArray("q", PLACES),
            oldest_adapter=integer(),
        )


def worker_main(payload: bytes, shared: SharedValues, buffer_dir: str, trainer_pid: int, log_path: Path | None) -> None:
    """Entry point of the spawned process. Exits 1 after an error, which it leaves in the buffer's folder."""
    if log_path is not None:
        _redirect_output(log_path)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    _follow_parent(trainer_pid)
    # Ctrl-C reaches the whole group; the trainer decides and tells us
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: setattr(shared.stop, "value", 1))
    buffer = SampleBuffer(buffer_dir)
    failed = threading.Event()
    try:
        loop_cls, arguments = pickle.loads(payload)
        loop = loop_cls(
            **arguments,
            rollout_buffer=buffer,
            model_version_value=shared.version,
            token_allowance=shared.allowance,
            heartbeat_value=shared.heartbeat,
            failed_event=failed,
            exception_info_queue=ErrorOutbox(buffer),
            metrics_queue=MetricOutbox(),
            in_flight_value=shared.in_flight,
            generated_tokens_value=shared.generated_tokens,
        )
        loop.server_versions = shared.server_versions
        loop.idle_at_value = shared.idle_at
        if loop.lora_name is not None:
            loop.adapters = AdapterUses(loop.lora_name, shared.version, shared.adapter_uses, shared.oldest_adapter)
        logger.info(
            "Rollout worker %d of trainer %d: %r at %s, at most %d rollouts at once.",
            os.getpid(),
            trainer_pid,
            loop.model_name,
            loop.config.vllm_server_base_url,
            loop.config.max_concurrent_rollouts,
        )
        # What the imports made stays for ever; without this every full collection walks through all of it again.
        gc.collect()
        gc.freeze()
        # Replies make many objects and no cycles: the usual thresholds spend a fifth of the CPU time on looking.
        gc.set_threshold(100_000, 20, 50)
        sys.setswitchinterval(0.0005)  # a reward thread must not wait 5 ms for each turn beside a busy event loop
        asyncio.run(loop.run(lambda: bool(shared.stop.value), lambda: setattr(shared.ready, "value", 1)))
        logger.info("Stopped after %d generated tokens.", shared.generated_tokens.value)
    except BaseException as error:
        traceback.print_exc()
        if not failed.is_set():  # else the loop has reported it
            buffer.put_error(error, traceback.format_exc())
        sys.stderr.flush()
        # not sys.exit: a reward function's thread that never returns would keep the process
        os._exit(1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _redirect_output(log_path: Path) -> None:
    log_path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _follow_parent(trainer_pid: int) -> None:
    """End this process as soon as the trainer is gone, however it went, and whatever the event loop is doing."""

    def watch() -> None:
        while os.getppid() == trainer_pid:
            time.sleep(0.5)
        with contextlib.suppress(OSError):  # the log's reader may be gone too
            print("the trainer is gone; the rollout worker ends", file=sys.stderr, flush=True)
        _end_children()
        os._exit(1)

    threading.Thread(target=watch, name="follow-parent", daemon=True).start()


def _end_children() -> None:
    import psutil

    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
