"""The training flow.

    prepare ─► [ vLLM server │ trainer process ] ─► register checkpoint ─► report

Phases: `prepare` makes the run folder and opens the MLflow run; the trainer starts and imports while the server
starts (`wait-for-server`); `train-policy` watches the trainer until it ends; the final checkpoint is registered.
The flow process holds no model and no CUDA. Needs: PREFECT_API_URL (the command line starts a server without one);
MLFLOW_TRACKING_URI unless `tracking.uri` is set. Deployed by its module entrypoint, `flows.train.train`.
"""

from __future__ import annotations

from typing import Any

from prefect import flow
from prefect.states import Cancelled, State

from asyncgrpo_core.launch.config import RunConfig
from tasks.flow_state import CancelRequested
from tasks.prepare import prepare
from tasks.record import RunRecord
from tasks.registry import register_checkpoint
from tasks.reporting import report
from tasks.serving import serving, wait_for_server
from tasks.training import train_policy, trainer_process


@flow(name="asyncgrpo-train", flow_run_name="{cfg.name}", persist_result=False)
def train(cfg: RunConfig) -> dict[str, Any] | State:
    """Train a policy with asynchronous GRPO.

    Args:
        cfg: everything that decides the run.

    Returns:
        {"run_dir", "mlflow_run_id"} of a completed run, or the state Cancelled.

    Raises:
        AsyncGRPOError: what made the run fail, with its own type, also when a child process met it.
    """
    run = prepare(cfg)
    try:
        with RunRecord(run):
            with serving(run) as server, trainer_process(run) as trainer:
                wait_for_server(run, server, trainer)
                train_policy(run, trainer, server)
            registered = register_checkpoint(run)
    except CancelRequested as request:
        return Cancelled(message=str(request))
    report(run, registered)
    return {"run_dir": str(run.run_dir), "mlflow_run_id": run.attempt.mlflow_run_id}
