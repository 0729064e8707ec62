"""The trainer process: `python -m asyncgrpo_core.launch.trainer_main RUN/config.resolved.json`.

Reads the resolved config and the attempt, builds the trainer, trains, evaluates before and after, and says how it
went: progress.json and run_summary.json while it runs, error.json when it fails. Ends with the error's exit code.
"""

from __future__ import annotations

import logging
import sys
import traceback
from pathlib import Path
from typing import Any

from asyncgrpo_core.errors import AsyncGRPOError, ConfigError, RunInterrupted
from asyncgrpo_core.launch.config import RunConfig
from asyncgrpo_core.launch.failure import clear_error, write_error
from asyncgrpo_core.launch.loading import read_resolved
from asyncgrpo_core.launch.progress import Progress, write_progress
from asyncgrpo_core.launch.run_folder import read_attempt
from asyncgrpo_core.launch.stopping import StopSignal, outlive_stdout
from asyncgrpo_core.server.control import VLLMControl

logger = logging.getLogger("asyncgrpo_core.launch.trainer")


def main(argv: list[str] | None = None) -> int:
    """Run one attempt of a run; the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if len(argv) != 1:
        print("usage: python -m asyncgrpo_core.launch.trainer_main RUN/config.resolved.json", file=sys.stderr)
        return 2
    config_path = Path(argv[0]).resolve()
    run_dir = config_path.parent
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stdout)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line per call to the server says nothing
    stop = StopSignal()
    stop.install()
    clear_error(run_dir)
    try:
        run(read_resolved(config_path), run_dir, stop)
    except BaseException as error:
        outlive_stdout()
        traceback.print_exc()
        write_error(run_dir, error)
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
    write_progress(run_dir, Progress("loading the policy and the data"))
    _set_threads(cfg)
    # Torch and transformers take seconds to import: only after the config has been read.
    from asyncgrpo_core.launch.build import build_trainer, load_inputs
    from asyncgrpo_core.launch.evaluation import HeldoutCallback
    from asyncgrpo_core.launch.reporting import ProgressCallback, SummarySource
    from asyncgrpo_core.launch.trainer_tracking import Tracking
    from asyncgrpo_core.tracking.summary import SummaryThread

    inputs = load_inputs(cfg)
    source = SummarySource()
    with Tracking(cfg, run_dir, attempt) as tracking:

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
        for url in trainer.args.server_urls:  # here, so that the wait counts as no training time
            with VLLMControl(url) as control:
                control.wait_until_ready(max(cfg.server.start_timeout_s, cfg.training.vllm_server_timeout))
        write_progress(run_dir, Progress("sending the policy to the server"))
        stop.arm(trainer.request_stop)
        summary = SummaryThread(run_dir, source, every_s=2.0)
        summary.start()
        try:
            trainer.train(resume_from_checkpoint=attempt.resume_from)
        finally:
            summary.stop()
    if trainer.stop_reason is not None:
        raise RunInterrupted(f"Training was stopped by {trainer.stop_reason} after step {trainer.state.global_step}.")


def _set_threads(cfg: RunConfig) -> None:
    """OMP_NUM_THREADS is set by the launcher; torch's own pool is set here, for every way of starting."""
    import torch

    from asyncgrpo_core.launch.placement import trainer_threads

    torch.set_num_threads(trainer_threads(cfg.resources))


if __name__ == "__main__":
    sys.exit(main())
