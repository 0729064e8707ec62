"""The `tracking` section of a run's config: where MLflow is and what goes there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class CheckpointTracking(BaseModel):
    """Which checkpoints are logged to the MLflow run (in the background, as they are saved)."""

    model_config = ConfigDict(extra="forbid")

    log: Literal["all", "last", "best", "path", "none"] = Field(
        default="all",
        description="all: every one; last: the newest, older ones are removed; best: the one with the best `metric` so "
        "far; path: only where it lies on disk (10 GB and more on one host); none: nothing.",
    )
    keep_last: int | None = Field(
        default=None, ge=1, description="With log=all: how many stay in the store; null = all of them."
    )
    metric: str = Field(default="reward", description="With log=best: the metric that decides.")
    higher_is_better: bool = True
    flush_timeout_s: float = Field(
        default=600.0, gt=0, description="How long the end of a run waits for uploads that are under way."
    )


class TrackingConfig(BaseModel):
    """MLflow tracking of a run."""

    model_config = ConfigDict(extra="forbid")

    enabled: bool = Field(default=True, description="False: nothing is sent to MLflow.")
    uri: str | None = Field(
        default=None,
        description="MLflow tracking URI: http(s)://..., sqlite:///..., postgresql+psycopg2://... "
        "null = MLFLOW_TRACKING_URI when set, else sqlite:///<working folder>/mlflow.db with artifacts in ./mlruns.",
    )
    experiment: str = Field(default="asyncgrpo", min_length=1, max_length=250)
    run_name: str | None = Field(default=None, description="null = the name of the run folder.")
    tags: dict[str, str] = Field(default_factory=dict)
    required: bool = Field(
        default=True,
        description="True: a run does not start when the tracker cannot be reached. False: it starts untracked.",
    )
    reach_timeout_s: float = Field(default=5.0, gt=0, description="How long the check at the start may take.")
    system_metrics: bool = Field(default=True, description="CPU, memory, disk, network and GPU use under system/.")
    checkpoints: CheckpointTracking = Field(default_factory=CheckpointTracking)

    def resolved_uri(self, working_dir: Path | None = None) -> str:
        """The tracking URI in use. `working_dir` (default: the current one) holds the default store."""
        if self.uri is not None:
            return self.uri
        from_env = os.environ.get("MLFLOW_TRACKING_URI")
        if from_env:
            return from_env
        folder = (working_dir or Path.cwd()).resolve()
        return f"sqlite:///{folder / 'mlflow.db'}"
