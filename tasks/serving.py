"""The vLLM server around training: a context manager, with the wait for its health as a task."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prefect import task

from asyncgrpo_core.launch.preparation import PreparedRun
from asyncgrpo_core.launch.progress import console
from asyncgrpo_core.launch.trainer_process import TrainerProcess
from asyncgrpo_core.launch.vllm_server import ServerSlot
from tasks.options import SIDE_EFFECT


@contextmanager
def serving(run: PreparedRun) -> Iterator[ServerSlot]:
    """Holds the server's place; whatever `wait_for_server` starts in it is ended when the block ends."""
    slot = ServerSlot(run.command, run.attempt.server_url)
    try:
        yield slot
    finally:
        slot.stop()


@task(name="wait-for-server", **SIDE_EFFECT)
def wait_for_server(run: PreparedRun, slot: ServerSlot, trainer: TrainerProcess) -> str:
    """Start the server (or find the existing one) and return its URL when it is healthy.

    The trainer imports and loads meanwhile; when it fails, the wait ends with its error.

    Raises:
        ServerError: the server died, its port is taken, or it was not healthy in time.
        AsyncGRPOError: the trainer's error.
    """
    timeout_s = run.cfg.server.start_timeout_s if slot.is_ours else run.cfg.training.vllm_server_timeout

    def on_progress(line: str) -> None:
        trainer.raise_if_failed()
        console().status(line.partition(":")[0])  # how long it takes; what vLLM says meanwhile is in its log

    console().status(f"starting vLLM on {run.placement.device}" if slot.is_ours else f"waiting for {slot.url}")
    slot.start(run.run_dir, timeout_s, on_progress)
    return slot.url
