"""Only the adapter is sent, on a real vLLM CPU server with --enable-lora (F139, F140, F143, F144)."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback

from asyncgrpo_core.errors import WeightSyncError
from asyncgrpo_core.launch.evaluation import evaluate_heldout
from asyncgrpo_core.server.command import ServerNeeds, server_command
from asyncgrpo_core.server.control import VLLMControl
from asyncgrpo_core.server.process import free_port, start_server
from asyncgrpo_core.server.settings import ServerConfig
from tests.conftest import MAX_MODEL_LEN, SERVED_MODEL_NAME, LiveServer
from tests.integration.test_training_loop import spread_reward, trainer

pytestmark = [pytest.mark.integration, pytest.mark.slow]  # a server of its own: 20 s

STALENESS = 2
STEPS = 6


@pytest.fixture(scope="module")
def lora_server(tmp_path_factory, policy_folder: Path) -> Iterator[LiveServer]:
    run_dir = tmp_path_factory.mktemp("lora-run")
    needs = ServerNeeds(
        model_path=str(policy_folder),
        served_model_name=SERVED_MODEL_NAME,
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        num_sampler_logprobs=8,
        max_concurrent_rollouts=32,
        device="cpu",
        backend="shm",
        cpu_count=os.cpu_count() or 1,
        port=free_port(),
        max_lora_rank=4,
        max_staleness=STALENESS,
    )
    running = start_server(server_command(ServerConfig(load_format="auto", enable_lora=True), needs), run_dir=run_dir)
    try:
        with VLLMControl(running.base_url, timeout_s=60.0) as control:
            yield LiveServer(running.base_url, control, str(policy_folder), SERVED_MODEL_NAME, run_dir, running)
    finally:
        running.stop()


def adapter_trainer(server: LiveServer, tmp_path: Path, **settings):
    settings = {"max_staleness": STALENESS, "learning_rate": 1e-3, "save_strategy": "no", **settings}
    peft_config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    return trainer(server, tmp_path, peft_config=peft_config, **settings)


class Watch(TrainerCallback):
    """What the server and the cache folder hold after every sync."""

    def __init__(self, server: LiveServer, cache: Path) -> None:
        self.server, self.cache = server, cache
        self.before = set(server.control.adapters())  # of runs with other folders
        self.listed: list[list[int]] = []
        self.folders: list[list[int]] = []

    def on_step_end(self, args, state, control, **kwargs):
        names = set(self.server.control.adapters()) - self.before
        self.listed.append(sorted(int(name.rpartition("-v")[2]) for name in names))
        self.folders.append(sorted(int(path.name.partition("-")[0]) for path in self.cache.iterdir()))


def test_f139_f143_f144_only_the_adapter_is_sent_and_old_versions_go(lora_server, tmp_path):
    cache = tmp_path / "checkpoints" / ".vllm_lora"
    watch = Watch(lora_server, cache)
    made = adapter_trainer(lora_server, tmp_path, max_steps=STEPS, callbacks=[watch])
    made.train()
    sync = made.summary()["weight_sync"]
    assert (sync["backend"], sync["count"], sync["verified"], sync["unverified"]) == ("lora", STEPS, STEPS, 0)
    assert sync["max_abs_logp_diff"] < 1e-3
    for done, (listed, folders) in enumerate(zip(watch.listed, watch.folders, strict=True), 1):
        assert done in listed and listed == sorted(set(listed))
        assert len(listed) <= STALENESS + 2, "never more than --max-loras"
        assert set(range(max(done - STALENESS, 0), done + 1)) <= set(listed)
        assert set(listed) <= set(folders), "a listed adapter whose folder is gone would end the engine"
        assert len(folders) <= STALENESS + 3
    assert min(watch.folders[-1]) >= STEPS - STALENESS - 2
    assert set(lora_server.control.adapters()) - watch.before == {made.pipeline.adapters.store.name(STEPS)}
    body = lora_server.control.prompt_logprobs([5, 6, 7, 8], model=made.pipeline.adapters.store.name(STEPS))
    assert len(body) == 3


def test_f143_a_request_goes_on_under_its_version_while_the_next_ones_are_loaded(lora_server, tmp_path):
    made = adapter_trainer(lora_server, tmp_path, max_steps=3)
    replies: list[httpx.Response] = []

    class Long(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            name = made.pipeline.adapters.store.name(0)
            body = {
                "model": name,
                "token_ids": [5, 6, 7],
                "sampling_params": {"max_tokens": 100, "ignore_eos": True, "temperature": 0},
            }
            url = f"{lora_server.base_url}/inference/v1/generate"
            self.thread = threading.Thread(target=lambda: replies.append(httpx.post(url, json=body, timeout=60.0)))
            self.before = httpx.post(url, json=body, timeout=60.0).json()["choices"][0]["token_ids"]
            self.thread.start()

    long = Long()
    made.add_callback(long)
    made.train()
    long.thread.join()
    assert replies[0].status_code == 200
    assert replies[0].json()["choices"][0]["token_ids"] == long.before


def test_a_second_attempt_unloads_what_the_first_left(lora_server, tmp_path):
    """Resume: the first sync loads the current version again; folders and names of before are gone."""
    first = adapter_trainer(lora_server, tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    first.train()
    left = {name for name in lora_server.control.adapters() if name.startswith(first.pipeline.adapters.store.stem)}
    assert left == {first.pipeline.adapters.store.name(2)}
    second = adapter_trainer(lora_server, tmp_path, max_steps=4, save_strategy="steps", save_steps=2)
    second.train(resume_from_checkpoint=True)
    assert second.state.global_step == 4
    assert left.isdisjoint(lora_server.control.adapters())
    cache = tmp_path / "checkpoints" / ".vllm_lora"
    assert all(path.name.endswith(second.pipeline.adapters.store.stem[-8:]) for path in cache.iterdir())
    assert second.summary()["weight_sync"]["count"] == 4


def test_held_out_prompts_are_answered_by_the_newest_adapter(lora_server, tmp_path):
    """The second evaluation is of an adapter that is known to answer otherwise: the bare model would not."""
    made = adapter_trainer(lora_server, tmp_path, max_steps=1)
    rows = [{"prompt": [{"role": "user", "content": f"What is {i} plus 1?"}]} for i in range(16)]
    answers: list[list[str]] = []

    def measure() -> None:
        result = evaluate_heldout(
            config=made.args,
            model_name=made.pipeline.model_name,
            rows=rows,
            reward_funcs=[spread_reward],
            seed=1,
            **made.pipeline.rollout_setup(),
        )
        assert result.n == len(rows)
        answers.append([record["completion"] for record in result.records])

    class Measure(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            measure()
            with torch.no_grad():
                for name, parameter in made.model.named_parameters():
                    if "lora_B" in name:
                        parameter.normal_(0, 0.1)

        def on_train_end(self, args, state, control, **kwargs):
            measure()

    made.add_callback(Measure())
    made.train()
    assert answers[0] != answers[1]


def test_f140_a_server_with_merged_weights_is_refused_for_its_base_model(lora_server, tmp_path):
    """Merged sync works on a server with --enable-lora too, and changes its base model for good."""
    merged = adapter_trainer(lora_server, tmp_path / "merged", max_steps=2, weight_sync_backend="shm")
    merged.train()
    sync = merged.summary()["weight_sync"]
    assert (sync["backend"], sync["verified"]) == ("shm", 2)
    with pytest.raises(WeightSyncError, match="base model is not the one"):
        adapter_trainer(lora_server, tmp_path / "adapter", max_steps=2).train()
