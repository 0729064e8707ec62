"""Task: what a run did, as a Prefect artifact and as text on the console."""

from __future__ import annotations

from prefect import task
from prefect.artifacts import create_markdown_artifact

from asyncgrpo_core.launch.finishing import final_text, markdown_report
from asyncgrpo_core.launch.preparation import PreparedRun
from asyncgrpo_core.launch.progress import console
from tasks.options import SIDE_EFFECT


@task(name="report", **SIDE_EFFECT)
def report(run: PreparedRun, registered: str | None) -> None:
    """Publish the report of a completed run."""
    create_markdown_artifact(key="run-report", markdown=markdown_report(run, registered), description=run.cfg.name)
    console().say(final_text(run))
