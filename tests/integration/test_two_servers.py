"""Training over two real vLLM servers; one is killed in the middle, started again, and taken in again."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from transformers import TrainerCallback

from asyncgrpo_core.server.command import ServerNeeds, server_command
from asyncgrpo_core.server.freshness import LEFT_OUT
from asyncgrpo_core.server.process import RunningServer, free_port, start_server
from asyncgrpo_core.server.settings import ServerConfig
from tests.conftest import MAX_MODEL_LEN, SERVED_MODEL_NAME
from tests.integration.test_training_loop import trainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def start_second(policy_folder: Path, run_dir: Path, port: int) -> RunningServer:
    """Like the session's server, but with random weights: whatever is generated well came by a sync."""
    needs = ServerNeeds(
        model_path=str(policy_folder),
        served_model_name=SERVED_MODEL_NAME,
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        num_sampler_logprobs=8,
        max_concurrent_rollouts=64,
        device="cpu",
        backend="shm",
        cpu_count=os.cpu_count() or 1,
        port=port,
    )
    return start_server(server_command(ServerConfig(load_format="dummy"), needs), run_dir=run_dir)


def kill(server: RunningServer) -> None:
    """SIGKILL to every process of the server; its guard is left to notice."""
    for process in psutil.Process(server.process.guard_pid).children(recursive=True):
        process.kill()


@dataclass
class KillAndRestart(TrainerCallback):
    """Kills the second server after step `at`, starts it again, and stops the run when that one has generated enough.

    `max_steps` bounds the run otherwise.
    """

    second: RunningServer
    restart: object
    enough: float = 50.0  # tokens, ten rollouts of five
    at: int = 6
    trainer: object = None
    seen: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)  # (step, version of each server)
    taken_in: int | None = None
    errors: list[BaseException] = field(default_factory=list)

    def on_step_end(self, args, state, control, **kwargs):
        versions = tuple(self.trainer.pipeline.publisher.versions)
        self.seen.append((state.global_step, versions))
        if state.global_step == self.at:
            kill(self.second)
            threading.Thread(target=self._start_again, daemon=True).start()
        was_out = any(LEFT_OUT in versions for _, versions in self.seen)
        if was_out and LEFT_OUT not in versions and self.taken_in is None:
            self.taken_in = state.global_step
        taken_in = self.taken_in is not None and state.global_step >= self.taken_in + 3
        if self.errors or (taken_in and generated_by(self.second.base_url) > self.enough):
            control.should_training_stop = True

    def _start_again(self) -> None:
        try:
            time.sleep(2.0)
            self.second = self.restart()
        except BaseException as error:
            self.errors.append(error)


def generated_by(url: str) -> float:
    import httpx

    from asyncgrpo_core.server.load import parse_metrics

    return parse_metrics(httpx.get(f"{url}/metrics", trust_env=False).text).generated_tokens or 0.0


def test_a_run_over_two_servers_outlives_one_and_takes_it_in_again(vllm_server, policy_folder, tmp_path):
    port = free_port()
    second = start_second(policy_folder, tmp_path / "second", port)
    urls = [vllm_server.base_url, second.base_url]
    watch = KillAndRestart(second, lambda: start_second(policy_folder, tmp_path / "again", port))
    before = generated_by(urls[0])
    try:
        made = trainer(
            vllm_server,
            tmp_path / "run",
            callbacks=[watch],
            max_steps=400,
            num_train_epochs=100,
            save_strategy="no",
            learning_rate=1e-5,  # what a few steps of staleness change is small beside what random weights would
        )
        made.args.vllm_server_base_url = urls
        watch.trainer = made
        made.train()
        again = generated_by(urls[1])
    finally:
        watch.second.stop()
        second.stop()
    assert not watch.errors
    assert watch.taken_in is not None, "the second server was taken in again"
    summary, steps = made.summary(), made.state.global_step
    ledger, sync = summary["ledger"], summary["weight_sync"]
    assert ledger["lost"] == 0 and ledger["trained_twice"] == 0 and ledger["dropped"]["failed"] == 0
    assert ledger["prompts"] == ledger["trained"] + sum(ledger["dropped"].values()) + ledger["pending"]
    assert (sync["count"], sync["verified"]) == (steps, steps)
    out = [step for step, versions in watch.seen if versions[1] == LEFT_OUT]
    assert sync["left_out"] == len(out) > 0 and min(out) >= watch.at
    assert all(versions[0] != LEFT_OUT for _, versions in watch.seen)
    assert sync["max_abs_logp_diff"] <= 1e-3, "both servers compute with the trainer's weights"
    assert generated_by(urls[0]) > before, "the first server generated"
    assert again > watch.enough, "and the second one, after its return"
    logged = [entry for entry in made.state.log_history if "loss" in entry]
    assert max(entry["sampling/sampling_logp_difference/max"] for entry in logged) < 1.5, "no reply of random weights"
    assert sum(entry.get("sync/servers_left_out_count", 0) for entry in logged) >= len(out) - 1
