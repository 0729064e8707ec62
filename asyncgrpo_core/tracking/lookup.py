"""Look into the tracking store: that it is there, and which run has some tags (a resume on an empty disk)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from asyncgrpo_core.errors import TrackerError
from asyncgrpo_core.tracking.mlflow_store import connect
from asyncgrpo_core.tracking.settings import TrackingConfig


class FoundRun(NamedTuple):
    """A run in the store: what a resume on an empty disk needs to go on with its numbers."""

    run_id: str
    tags: dict[str, str]
    metrics: dict[str, float]  # newest value of each


def open_store(config: TrackingConfig) -> None:
    """Make sure that the store's tables are there. A first start makes them, which takes 7 to 20 s on two cores.

    Raises:
        TrackerError: the store refuses.
    """
    uri = config.resolved_uri()
    try:
        connect(uri).get_experiment_by_name(config.experiment)
    except Exception as error:  # mlflow raises its own type, requests' and SQLAlchemy's
        raise TrackerError(
            f"MLflow at {uri} refused a call: {type(error).__name__}: {error}.", "Check tracking.uri."
        ) from error


def find_run(config: TrackingConfig, tags: Mapping[str, str]) -> FoundRun | None:
    """The newest run of the experiment that has all these tags; None when there is none.

    Raises:
        TrackerError: the store does not answer.
    """
    uri = config.resolved_uri()
    query = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
    try:
        client = connect(uri)
        experiment = client.get_experiment_by_name(config.experiment)
        if experiment is None:
            return None
        runs = client.search_runs(
            [experiment.experiment_id], query, order_by=["attributes.start_time DESC"], max_results=1
        )
    except Exception as error:  # mlflow raises its own type, requests' and SQLAlchemy's
        raise TrackerError(
            f"MLflow at {uri} refused a search: {type(error).__name__}: {error}.", "Check tracking.uri."
        ) from error
    if not runs:
        return None
    return FoundRun(runs[0].info.run_id, dict(runs[0].data.tags), dict(runs[0].data.metrics))
