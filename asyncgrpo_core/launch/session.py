"""`asyncgrpo train` and `quickstart`: one training flow in this process, from the Prefect API to the exit code.

The flow is imported by name, late: the core does not depend on Prefect.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from asyncgrpo_core.errors import AsyncGRPOError, RunInterrupted
from asyncgrpo_core.launch.config import RunConfig
from asyncgrpo_core.launch.embedded import (
    EmbeddedPrefect,
    check_prefect_reachable,
    configured_api_url,
    start_embedded,
    wait_until_healthy,
)
from asyncgrpo_core.launch.failure import TrainerFailed
from asyncgrpo_core.launch.logs import close_remote_handlers, log_to_file
from asyncgrpo_core.launch.preflight import check_code_and_rows, check_settings
from asyncgrpo_core.launch.preparation import reachable_uri
from asyncgrpo_core.launch.progress import console
from asyncgrpo_core.launch.run_folder import choose_run_dir, make_run_dir, refuse_live_run

FLOW = "flows.train"

logger = logging.getLogger("asyncgrpo_core.flow")


def run_training(cfg: RunConfig) -> int:
    """Run the training flow; the exit code. Prints where everything is, at the end.

    Raises:
        AsyncGRPOError: what made the run fail; its traceback is in RUN/logs/flow.log by then.
    """
    if str(Path.cwd()) not in sys.path:  # a console script does not see the working folder's modules
        sys.path.insert(0, str(Path.cwd()))
    run_dir = choose_run_dir(cfg)
    refuse_live_run(run_dir)
    check_settings(cfg)
    cfg.run_dir = str(run_dir)
    make_run_dir(run_dir)
    log_path = run_dir / "logs" / "flow.log"
    for name in ("MLFLOW_CONFIGURE_LOGGING", "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR"):
        os.environ.setdefault(name, "false")  # they would write to the console
    log_to_file(log_path)
    console().say(f"Run folder: {run_dir}")
    with _terminable():
        try:
            with _prefect_api(run_dir, while_starting=partial(_meanwhile, cfg)):
                return _run_flow(cfg, log_path)
        except KeyboardInterrupt as interrupt:
            raise RunInterrupted(
                f"The run in {run_dir} was interrupted.", "Continue it with --resume (and the same --run-dir)."
            ) from interrupt
        except AsyncGRPOError:
            logger.exception("The run ended with an error")
            raise
        except Exception as error:
            logger.exception("The run ended with an error")
            raise TrainerFailed(
                f"The run failed with {type(error).__name__}: {' '.join(str(error).split())[:500]}.",
                f"The traceback is in {log_path}.",
            ) from error


def _meanwhile(cfg: RunConfig) -> None:
    """Beside the Prefect server's start: what the flow would otherwise do after it."""
    check_code_and_rows(cfg)
    if reachable_uri(cfg.tracking) is not None:
        from asyncgrpo_core.tracking.lookup import open_store

        open_store(cfg.tracking)


def _run_flow(cfg: RunConfig, log_path: Path) -> int:
    flow = getattr(importlib.import_module(FLOW), "train")  # noqa: B009 - by name: the core imports no flow
    log_to_file(log_path)  # again: Prefect has set up logging for itself
    state: Any = flow(cfg, return_state=True)
    if state.is_cancelled():
        raise RunInterrupted(f"The run was cancelled: {state.message}", "Continue it with --resume.")
    state.result()  # raises what ended the flow, with its own type
    return 0


@contextmanager
def _prefect_api(run_dir: Path, while_starting: Callable[[], None]) -> Iterator[None]:
    """Prefect's API for this run: the configured one, or an embedded server, ended with the block.

    `while_starting` is called in any case; beside the embedded server's start it costs no time.
    """
    url = configured_api_url()
    if url is not None:
        check_prefect_reachable(url)
        while_starting()
        yield
        return
    server: EmbeddedPrefect = start_embedded(run_dir)
    try:
        console().status("starting the Prefect server")
        while_starting()
        importlib.import_module(FLOW)
        wait_until_healthy(server, console().status)
        yield
    finally:
        close_remote_handlers()
        server.stop()


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM and SIGHUP end this process like Ctrl-C: everything that was started is stopped."""

    def handle(number: int, frame: FrameType | None) -> None:
        raise RunInterrupted(f"The run got {signal.Signals(number).name}.", "Continue it with --resume.")

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGHUP)}
    # A shell that starts the command in the background lets it ignore Ctrl-C: an explicit `kill -INT` must work.
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
