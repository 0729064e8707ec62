"""Start, watch and stop the trainer process."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

from asyncgrpo_core.guard import GuardedProcess, start_guarded
from asyncgrpo_core.launch.config import RunConfig
from asyncgrpo_core.launch.failure import clear_error, read_error
from asyncgrpo_core.launch.placement import Placement, trainer_threads
from asyncgrpo_core.launch.progress import PROGRESS_FILE
from asyncgrpo_core.launch.run_folder import CONFIG_FILE

# When the flow is killed nothing may be left 10 s later: the trainer gets this long to save, then it is ended.
ORPHAN_GRACE_S = 6.0


class TrainerProcess:
    """The guarded trainer child of one attempt. One thread at a time may use it."""

    def __init__(self, process: GuardedProcess, run_dir: Path, stop_grace_s: float) -> None:
        self._process = process
        self._run_dir = run_dir
        self._stop_grace_s = stop_grace_s

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_running(self) -> bool:
        return self._process.poll() is None

    def raise_if_failed(self) -> None:
        """Raise the trainer's own error, with its type, when it has ended with one.

        Raises:
            AsyncGRPOError: what `failure.read_error` makes of it.
        """
        code = self._process.poll()
        if code is not None and code != 0:
            raise read_error(self._run_dir, code, self._process.log_tail(20))

    def stop(self) -> None:
        """Ask it to save and end (TERM), wait for `resources.stop_grace_s`, then end it. Idempotent."""
        self._process.stop(grace_s=self._stop_grace_s)


def start_trainer(cfg: RunConfig, run_dir: Path, placement: Placement) -> TrainerProcess:
    """Start the trainer under a guard.

    Should this process die, the guard ends the trainer and then marks the run as interrupted.
    """
    clear_error(run_dir)
    (run_dir / PROGRESS_FILE).unlink(missing_ok=True)  # an earlier attempt's
    process = start_guarded(
        trainer_command(run_dir, placement),
        name="trainer-0",
        run_dir=run_dir,
        log_path=run_dir / "logs" / "trainer-0.log",
        env=trainer_environment(cfg, placement),
        grace_s=ORPHAN_GRACE_S,
        on_owner_death=[sys.executable, "-m", "asyncgrpo_core.tracking.close_run", str(run_dir)],
    )
    return TrainerProcess(process, run_dir, cfg.resources.stop_grace_s)


def trainer_command(run_dir: Path, placement: Placement) -> list[str]:
    """One process, or torchrun over one for each rank, which meet at a port of their own.

    Rank 0 and torchrun itself write to trainer-0.log, the other ranks each to their own (trainer_main).
    """
    program = ["-m", "asyncgrpo_core.launch.trainer_main", str(run_dir / CONFIG_FILE)]
    if placement.ranks == 1:
        return [sys.executable, *program]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    return [sys.executable, *torchrun, "--nproc-per-node", str(placement.ranks), *program]


def trainer_environment(cfg: RunConfig, placement: Placement) -> dict[str, str]:
    """The trainer's environment: its devices and threads, and an import path that has the working folder."""
    env = dict(os.environ)
    env["OMP_NUM_THREADS"] = str(trainer_threads(cfg.resources, placement.ranks))
    env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, placement.trainer))
    env["PYTHONUNBUFFERED"] = "1"
    env["TOKENIZERS_PARALLELISM"] = "false"
    env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(math.ceil(cfg.resources.stop_grace_s))  # torchrun: from TERM to KILL
    paths = [str(Path.cwd()), *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return env
