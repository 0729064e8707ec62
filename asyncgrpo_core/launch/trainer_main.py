"""The trainer process: `python -m asyncgrpo_core.launch.trainer_main RUN/config.resolved.json`.

Reads the resolved config and the attempt, builds the trainer, trains, evaluates before and after, and says how it
went: progress.json and run_summary.json while it runs, error.json when it fails. Ends with the error's exit code.

Under torchrun every rank runs this. Rank 0 alone speaks: progress, summary, MLflow, the held-out evaluation, the
server. The others have a log of their own, and error-<rank>.json when something fails there first.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncgrpo_core.errors import AsyncGRPOError, ConfigError, RunInterrupted
from asyncgrpo_core.launch.config import RunConfig
from asyncgrpo_core.launch.failure import clear_error, write_error
from asyncgrpo_core.launch.loading import read_resolved
from asyncgrpo_core.launch.placement import num_ranks, rank_of_this_process, trainer_threads
from asyncgrpo_core.launch.progress import Progress, write_progress
from asyncgrpo_core.launch.run_folder import Attempt, read_attempt
from asyncgrpo_core.launch.stopping import StopSignal, outlive_stdout
from asyncgrpo_core.server.control import VLLMControl

if TYPE_CHECKING:
    from asyncgrpo_core.launch.build import Inputs
    from asyncgrpo_core.training.trainer import AsyncGRPOTrainer

logger = logging.getLogger("asyncgrpo_core.launch.trainer")


def main(argv: list[str] | None = None) -> int:
    """Run one attempt of a run; the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if len(argv) != 1:
        print("usage: python -m asyncgrpo_core.launch.trainer_main RUN/config.resolved.json", file=sys.stderr)
        return 2
    config_path = Path(argv[0]).resolve()
    run_dir = config_path.parent
    rank = rank_of_this_process()
    if rank > 0:
        _log_to(run_dir / "logs" / f"trainer-{rank}.log")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stdout)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line per call to the server says nothing
    stop = StopSignal()
    stop.install()
    if num_ranks() == 1:  # else the launcher did, before any rank could write one
        clear_error(run_dir)
    try:
        run(read_resolved(config_path), run_dir, stop)
    except BaseException as error:
        outlive_stdout()
        traceback.print_exc()
        if rank == 0 or not getattr(error, "told_by_rank_zero", False):
            write_error(run_dir, error, rank)
        return error.exit_code if isinstance(error, AsyncGRPOError) else 1
    finally:
        outlive_stdout()
    return 0


def run(cfg: RunConfig, run_dir: Path, stop: StopSignal) -> None:
    """Build, train, evaluate.

    Raises:
        RunInterrupted: a signal asked to stop; the checkpoint is saved by then.
        AsyncGRPOError: whatever made the run impossible.
    """
    attempt = read_attempt(run_dir)
    if attempt is None:
        raise ConfigError(f"{run_dir} has no attempt.json.", "Start the run with `asyncgrpo train`.")
    leads = rank_of_this_process() == 0
    if leads:
        write_progress(run_dir, Progress("loading the policy and the data"))
    _set_threads(cfg)
    # Torch and transformers take seconds to import: only after the config has been read.
    from asyncgrpo_core.launch.build import build_trainer, load_inputs

    inputs = load_inputs(cfg)
    if leads:
        trainer = _train_and_tell(cfg, run_dir, attempt, inputs, stop)
    else:
        trainer = build_trainer(cfg, run_dir, attempt, inputs, [])
        _await_servers(cfg, trainer)
        stop.arm(trainer.request_stop)
        trainer.train(resume_from_checkpoint=attempt.resume_from)
    if trainer.stop_reason is not None:
        raise RunInterrupted(f"Training was stopped by {trainer.stop_reason} after step {trainer.state.global_step}.")


def _train_and_tell(
    cfg: RunConfig, run_dir: Path, attempt: Attempt, inputs: Inputs, stop: StopSignal
) -> AsyncGRPOTrainer:
    """What rank 0 does around the training; the trainer, when it has ended."""
    from asyncgrpo_core.launch.build import build_trainer
    from asyncgrpo_core.launch.evaluation import HeldoutCallback
    from asyncgrpo_core.launch.reporting import ProgressCallback, SummarySource
    from asyncgrpo_core.launch.trainer_tracking import Tracking
    from asyncgrpo_core.tracking.summary import SummaryThread

    source = SummarySource()
    # The error is written before the tracker's last uploads: torchrun does not wait for those when a rank has failed.
    with Tracking(cfg, run_dir, attempt) as tracking, _error_written(run_dir):

        def on_heldout(result: dict[str, Any], step: int) -> None:
            source.heldout(result)
            tracking.log({f"heldout/{when}": result.get(when) for when in ("before", "after")}, step)

        heldout = HeldoutCallback(run_dir, cfg.evaluation, inputs.heldout, inputs.rewards, on_heldout)
        callbacks = [tracking.callback, heldout, ProgressCallback(run_dir)]
        trainer = build_trainer(cfg, run_dir, attempt, inputs, callbacks)
        heldout.trainer = trainer
        source.attach(trainer)
        tracking.log_settings(trainer)
        write_progress(run_dir, Progress("waiting for the vLLM server"))
        _await_servers(cfg, trainer)
        write_progress(run_dir, Progress("sending the policy to the server"))
        stop.arm(trainer.request_stop)
        summary = SummaryThread(run_dir, source, every_s=2.0)
        summary.start()
        try:
            trainer.train(resume_from_checkpoint=attempt.resume_from)
        finally:
            summary.stop()
    return trainer


@contextmanager
def _error_written(run_dir: Path) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        write_error(run_dir, error)
        raise


def _await_servers(cfg: RunConfig, trainer: AsyncGRPOTrainer) -> None:
    """Rank 0 waits, and the others with it: training would begin with a collective, which waits for `ddp_timeout` only.

    Here and not in `train()`, so that the wait counts as no training time.
    """

    def wait() -> None:
        for url in trainer.args.server_urls:
            with VLLMControl(url) as control:
                control.wait_until_ready(max(cfg.server.start_timeout_s, cfg.training.vllm_server_timeout))

    trainer.ranks.open()
    try:
        trainer.ranks.lead("servers", wait)
    except BaseException as error:
        trainer.ranks.fail(error)
        raise


def _log_to(path: Path) -> None:
    """Send this process's output, and its libraries', to a file of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(file, stream.fileno())
    os.close(file)


def _set_threads(cfg: RunConfig) -> None:
    """OMP_NUM_THREADS is set by the launcher; torch's own pool is set here, for every way of starting."""
    import torch

    torch.set_num_threads(trainer_threads(cfg.resources, num_ranks()))


if __name__ == "__main__":
    sys.exit(main())
