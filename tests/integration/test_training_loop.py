"""The whole loop on a real vLLM server: train, checkpoint, resume (F001, F018, F031, F040, F102, F104, F169, F195)."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback
from transformers.trainer_utils import TrainOutput

from asyncgrpo_core import AsyncGRPOConfig, AsyncGRPOTrainer, AsyncRolloutLoop
from asyncgrpo_core.errors import ConfigError, RewardError, ServerError, ServerMismatchError
from asyncgrpo_core.manifest import newest_checkpoint
from asyncgrpo_core.training.checkpoint import load_rollout_state
from asyncgrpo_core.training.run_context import RunContext


def spread_reward(completion_ids, **kwargs):
    """Different for nearly all different replies, so that few groups have equal rewards, whatever the policy says."""
    return [float(sum(ids) % 13) for ids in completion_ids]


def raising_reward(completions, **kwargs):
    raise ZeroDivisionError("the verifier broke")


def short_reward(completions, **kwargs):
    return [1.0]


def dataset(n=64):
    return Dataset.from_list([{"prompt": [{"role": "user", "content": f"What is {i} plus 1?"}]} for i in range(n)])


def trainer(
    server,
    run_dir: Path,
    *,
    reward=spread_reward,
    callbacks=None,
    rows=64,
    data: object = "numbers",  # a dataset, or None
    name=None,
    peft_config=None,
    environment_factory=None,
    trainer_cls=AsyncGRPOTrainer,
    config_cls=AsyncGRPOConfig,
    **kwargs,
):
    settings = {
        "max_steps": 4,
        "learning_rate": 1e-3,
        "num_generations": 4,
        "max_completion_length": 6,
        "token_budget": 64,  # forwarded and trained tokens: two or three groups
        "save_steps": 2,
        "max_concurrent_rollouts": 32,
        "vllm_server_timeout": 60.0,
        "disable_tqdm": True,
    } | kwargs
    return trainer_cls(
        model=server.model_path,
        reward_funcs=reward,
        args=config_cls(output_dir=str(run_dir / "checkpoints"), vllm_server_base_url=server.base_url, **settings),
        train_dataset=dataset(rows) if data == "numbers" else data,
        callbacks=callbacks,
        peft_config=peft_config,
        environment_factory=environment_factory,
        run=RunContext(run_dir=run_dir, served_model_name=name or server.served_model_name),
    )


@pytest.fixture(scope="module")
def finished(vllm_server, tmp_path_factory):
    """One run of four steps: (trainer, output, run folder)."""
    run_dir = tmp_path_factory.mktemp("run")
    made = trainer(vllm_server, run_dir)
    return made, made.train(), run_dir


def test_f001_f018_f195_a_run_ends_with_every_sync_proved(finished):
    made, output, _ = finished
    assert isinstance(output, TrainOutput) and output.global_step == 4
    sync = made.summary()["weight_sync"]
    assert (sync["count"], sync["verified"], sync["unverified"]) == (4, 4, 0)
    assert sync["max_abs_logp_diff"] <= 1e-3
    assert made.pipeline.policy_version == 4


def test_the_ledger_accounts_for_every_prompt_and_sample(finished):
    made, _, run_dir = finished
    ledger = made.summary()["ledger"]
    assert ledger["lost"] == 0 and ledger["trained_twice"] == 0
    assert ledger["prompts"] == ledger["trained"] + sum(ledger["dropped"].values()) + ledger["pending"]
    with sqlite3.connect(run_dir / "ledger.sqlite") as db:
        steps = dict(db.execute("select step, count(*) from trainings group by step"))
    logged = {e["step"]: e["batch/samples_per_step"] for e in made.state.log_history if "batch/samples_per_step" in e}
    assert steps == logged


def test_f040_metrics_are_logged_every_step(finished):
    made, _, _ = finished
    logs = [entry for entry in made.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in logs] == [1, 2, 3, 4]
    for name in ("reward_kept", "entropy", "perf/step_s", "sample/staleness_mean", "clip_ratio/region_mean"):
        assert all(name in entry for entry in logs), name
    for name in ("reward", "completions/mean_length", "frac_reward_zero_std"):  # only when a group was scored
        assert any(name in entry for entry in logs), name
    forwarded = [entry["batch/forwarded_tokens_per_step"] for entry in logs]
    assert [entry["num_tokens"] for entry in logs] == [sum(forwarded[: i + 1]) for i in range(4)]
    # perf/step_s holds waiting, computing, optimizer and sync
    for entry in logs:
        parts = ("perf/fwd_bwd_s", "perf/optimizer_s", "perf/rollout_wait_s", "perf/weight_sync_s")
        assert sum(entry[name] for name in parts) <= entry["perf/step_s"] + 0.05


def test_f031_on_fresh_samples_trainer_and_sampler_agree(finished):
    made, _, _ = finished
    first = next(entry for entry in made.state.log_history if "loss" in entry)
    assert first["sample/staleness_max"] == 0  # step 1 trains what policy version 0 generated
    assert first["sampling/sampling_logp_difference/max"] < 1e-3
    assert abs(first["sampling/importance_sampling_ratio/mean"] - 1) < 1e-3


def test_f169_a_resumed_run_goes_on_where_the_checkpoint_ended(vllm_server, finished):
    made, _, run_dir = finished
    (run_dir / "checkpoints" / "checkpoint-4" / "rollout_state.json").unlink()  # as if killed while saving it
    assert newest_checkpoint(run_dir / "checkpoints").name == "checkpoint-2"
    before = made.state.log_history
    resumed = trainer(vllm_server, run_dir, max_steps=6)
    resumed.train(resume_from_checkpoint=True)
    summary = resumed.summary()
    assert summary["global_step"] == 6
    assert summary["resumed_from"].endswith("checkpoint-2")
    assert summary["weight_sync"]["count"] == 6  # steps 1 and 2 of the first attempt, 3 to 6 of this one
    assert summary["ledger"]["lost"] == 0 and summary["ledger"]["trained_twice"] == 0
    assert summary["ledger"]["rolled_back"] > 0  # steps 3 and 4 of the first attempt
    tokens = {e["step"]: e["num_tokens"] for e in before if "num_tokens" in e}
    logs = [entry for entry in resumed.state.log_history if "num_tokens" in entry]
    assert [entry["step"] for entry in logs] == [1, 2, 3, 4, 5, 6]
    assert logs[1]["num_tokens"] == tokens[2] < logs[2]["num_tokens"]


def test_f018_weight_sync_steps_spreads_the_syncs(vllm_server, tmp_path):
    made = trainer(vllm_server, tmp_path, max_steps=4, weight_sync_steps=3, save_strategy="no")
    made.train()
    assert made.summary()["weight_sync"]["count"] == 2  # after step 3, and the last one so that the server is current


def test_f138_an_adapter_is_trained_and_its_merged_weights_reach_the_server(vllm_server, tmp_path):
    made = trainer(
        vllm_server,
        tmp_path,
        max_steps=2,
        learning_rate=1e-2,
        save_steps=2,
        peft_config=LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    base = {name: p.detach().clone() for name, p in made.model.named_parameters() if "lora_" not in name}
    made.train()
    sync = made.summary()["weight_sync"]
    assert (sync["count"], sync["verified"]) == (2, 2)  # the canary compares with the adapted policy
    after = dict(made.model.named_parameters())
    assert all((after[name] == value).all() for name, value in base.items()), "merging must not touch the base"
    assert any(p.abs().max() > 0 for name, p in after.items() if "lora_B" in name), "the adapter has moved"
    assert (tmp_path / "checkpoints" / "checkpoint-2" / "adapter_model.safetensors").is_file()


def test_a_stop_request_ends_after_the_step_with_a_checkpoint(vllm_server, tmp_path):
    class StopAtTwo(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                made.request_stop("a test")

    made = trainer(vllm_server, tmp_path, max_steps=50, save_steps=100, callbacks=[StopAtTwo()])
    made.train()
    assert made.state.global_step in (2, 3)
    assert newest_checkpoint(tmp_path / "checkpoints").name == f"checkpoint-{made.state.global_step}"


def test_f028_f215_an_epoch_of_equal_rewards_ends_although_nothing_is_trained(vllm_server, tmp_path):
    made = trainer(vllm_server, tmp_path, reward=constant_reward, rows=6, max_steps=-1, num_train_epochs=1.0)
    made.train()
    assert made.state.global_step == 0
    assert made.summary()["ledger"]["dropped"]["zero_std"] >= 6


def constant_reward(completions, **kwargs):
    return [0.5] * len(completions)


@pytest.mark.parametrize(
    ("reward", "error", "said"),
    [(raising_reward, ZeroDivisionError, "the verifier broke"), (short_reward, RewardError, "short_reward")],
)
def test_f149_errors_of_a_reward_function_reach_the_trainer(vllm_server, tmp_path, reward, error, said):
    with pytest.raises(Exception, match=said) as caught:
        trainer(vllm_server, tmp_path, reward=reward).train()
    assert error.__name__ in type(caught.value).__name__ + str(caught.value)


def test_f150_a_lambda_reward_is_refused_when_training_starts(vllm_server, tmp_path):
    with pytest.raises(TypeError, match="pickle"):
        trainer(vllm_server, tmp_path, reward=lambda completions, **kwargs: [0.0] * len(completions)).train()


def test_a_server_with_another_model_is_refused(vllm_server, tmp_path):
    with pytest.raises(ServerMismatchError, match="--served-model-name other"):
        trainer(vllm_server, tmp_path, name="other").train()


def test_f001_an_unreachable_server_is_named(vllm_server, tmp_path):
    made = trainer(vllm_server, tmp_path, vllm_server_timeout=2.0)
    made.args.vllm_server_base_url = "http://127.0.0.1:9"
    with pytest.raises(ServerError, match=r"127\.0\.0\.1:9"):
        made.train()


class CurriculumRolloutLoop(AsyncRolloutLoop):
    """The reference's example, in our words: prompts that the policy solves are not sampled again."""

    def filter_prompt(self, row_index, row, epoch):
        return self.pass_rates.get(row_index, 0.0) < self.config.pass_rate_cap

    async def setup(self):
        self.pass_rates = {}

    def compute_advantages(self, group):
        scored = group.rewards[~np.isnan(group.rewards)]
        if len(scored):
            self.pass_rates[group.row_index] = float(np.mean(scored > 0))
        return super().compute_advantages(group)

    def state_dict(self):
        return {str(row): rate for row, rate in self.pass_rates.items()}

    def load_state_dict(self, state):
        self.pass_rates = {int(row): rate for row, rate in state.items()}


@dataclass
class CurriculumConfig(AsyncGRPOConfig):
    pass_rate_cap: float = 0.9


class CurriculumTrainer(AsyncGRPOTrainer):
    loop_cls = CurriculumRolloutLoop


def even_rows_are_hard(prompts, completions, completion_ids, **kwargs):
    """Positive (solved) for odd numbers, negative for even ones; different for different replies."""
    sign = 1.0 if int(prompts[0][-1]["content"].split()[2]) % 2 else -1.0
    return [sign * (1.0 + sum(ids) % 13) for ids in completion_ids]


def test_f155_f163_the_curriculum_example_trains_and_its_state_is_in_the_checkpoint(vllm_server, tmp_path):
    """Odd rows are solved by their first group and not sampled again."""
    made = trainer(
        vllm_server,
        tmp_path,
        trainer_cls=CurriculumTrainer,
        config_cls=CurriculumConfig,
        reward=even_rows_are_hard,
        rows=12,
        max_steps=-1,
        num_train_epochs=2.0,
        save_steps=1,
    )
    made.train()
    ledger = made.summary()["ledger"]
    assert ledger["filtered"] > 0 and ledger["lost"] == 0
    state, _ = load_rollout_state(newest_checkpoint(tmp_path / "checkpoints"))
    assert state.loop_state and set(state.loop_state) <= {str(row) for row in range(12)}


class AskEnv:
    """Owns its data: makes a task on every reset and scores by itself, without looking at the text."""

    made = 0

    def reset(self, **kwargs):
        AskEnv.made += 1
        self.number = AskEnv.made
        return f"What is {self.number % 90} plus 1?"

    def get_reward(self):
        return float(self.number % 2)


def test_f178_f168_an_environment_without_a_dataset_trains_and_resumes(vllm_server, tmp_path):
    settings = {"reward": None, "environment_factory": AskEnv, "data": None, "save_steps": 2}
    with pytest.raises(ConfigError, match="max_steps"):
        trainer(vllm_server, tmp_path, max_steps=-1, **settings)
    trainer(vllm_server, tmp_path, max_steps=2, **settings).train()
    resumed = trainer(vllm_server, tmp_path, max_steps=4, **settings)
    resumed.train(resume_from_checkpoint=True)
    summary = resumed.summary()
    assert summary["global_step"] == 4
    assert summary["ledger"]["lost"] == 0 and summary["ledger"]["trained_twice"] == 0
    logs = [entry for entry in resumed.state.log_history if "rewards/AskEnv/mean" in entry]
    assert logs and 0 < logs[-1]["rewards/AskEnv/mean"] < 1 and logs[-1]["env/reset_s"] >= 0


class TellEnv:
    """Takes its prompt from the row and adds to it; rewards are -1 and -2."""

    def reset(self, question, **kwargs):
        self.reward = -1.0 - AskEnv.made % 2
        AskEnv.made += 1
        return f"What is {question} plus 2?"

    async def get_reward(self):
        return self.reward


def test_f180_two_environments_mixed_by_a_column_train_together(vllm_server, tmp_path):
    """The trainer's own reward comes on top of both."""
    rows = [{"environment": name, "question": i % 90} for i in range(24) for name in ("ask", "tell")]
    made = trainer(
        vllm_server,
        tmp_path,
        data=Dataset.from_list(rows),
        environment_factory={"ask": AskEnv, "tell": TellEnv},
        max_steps=3,
        save_strategy="no",
    )
    made.train()
    logs = {name: value for entry in made.state.log_history for name, value in entry.items()}
    assert 0 <= logs["rewards/AskEnv/mean"] <= 1 and -2 <= logs["rewards/TellEnv/mean"] <= -1
    assert "rewards/spread_reward/mean" in logs and logs["env/reward_s"] >= 0
    assert made.summary()["ledger"]["lost"] == 0


def test_synchronous_steps_overlap_with_nothing_and_train_fresh_samples(vllm_server, tmp_path):
    """F017, F019: with max_staleness=0 every sample is of the newest policy; nothing is in flight while it trains."""

    class Watch(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            self.look()

        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            self.look()

        def on_step_end(self, args, state, control, **kwargs):
            self.look()  # after the sync

        def look(self):
            seen.append((made.pipeline.worker.in_flight(), made.pipeline.worker.is_idle()))

    seen = []
    made = trainer(
        vllm_server,
        tmp_path,
        max_steps=4,
        token_budget=100,
        gradient_accumulation_steps=2,
        synchronous=True,
        max_staleness=0,
        callbacks=[Watch()],
        save_strategy="no",
    )
    made.train()
    assert seen == [(0, True)] * 12
    summary = made.summary()
    assert summary["global_step"] == 4 and summary["throughput"]["overlap_frac"] == 0.0
    assert summary["weight_sync"]["count"] == summary["weight_sync"]["verified"] == 4
    logs = [entry for entry in made.state.log_history if "loss" in entry]
    assert [entry["sample/staleness_max"] for entry in logs] == [0, 0, 0, 0]
    assert all(entry["sampling/sampling_logp_difference/max"] < 1e-3 for entry in logs)
    assert all(entry["batch/microbatches_per_step"] == 2 for entry in logs)
    assert summary["ledger"]["lost"] == 0 and summary["ledger"]["trained_twice"] == 0


def test_f019_max_staleness_0_goes_on_with_fresh_samples(vllm_server, tmp_path):
    settings = {"token_budget": 100, "save_strategy": "no"}
    made = trainer(vllm_server, tmp_path, max_steps=4, max_staleness=0, **settings)
    made.train()
    logs = [entry for entry in made.state.log_history if "loss" in entry]
    assert [entry["sample/staleness_max"] for entry in logs] == [0, 0, 0, 0]
    assert made.summary()["ledger"]["lost"] == 0
