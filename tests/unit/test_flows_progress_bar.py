"""Prefect may go away while a run trains: its progress page is late, and nothing else happens."""

from __future__ import annotations

import uuid

from asyncgrpo_core.launch.progress import Progress
from tasks import training


def test_an_outage_of_prefect_does_not_reach_training(monkeypatch, caplog):
    calls = []

    def create(**kwargs):
        calls.append(kwargs["progress"])
        if len(calls) == 1:
            raise ConnectionError("no route to Prefect")
        return uuid.uuid4()

    clock = [100.0]
    monkeypatch.setattr(training, "create_progress_artifact", create)
    monkeypatch.setattr(training.time, "monotonic", lambda: clock[0])
    bar = training._ProgressBar()
    bar.show(Progress("training", 1, 10))
    assert "no route to Prefect" in caplog.text
    clock[0] += training.ARTIFACT_EVERY_S + 1
    bar.show(Progress("training", 2, 10))
    assert calls == [10.0], "not tried again at once"
    clock[0] += training.ARTIFACT_RETRY_S
    bar.show(Progress("training", 3, 10))
    assert calls == [10.0, 30.0]
