"""A trainer whose server, worker and books are played: for runs on one and on several ranks, in seconds.

Samples are fixed, the policy is float64, so that one rank and two can be compared to the last digits.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, TrainerCallback

from asyncgrpo_core import AsyncGRPOConfig, AsyncGRPOTrainer
from asyncgrpo_core.packing.planner import MicroBatch
from asyncgrpo_core.training.checkpoint import RolloutState
from asyncgrpo_core.training.run_context import Counters
from asyncgrpo_core.types import Slot, TopLogprobs, TrainingSample, TrainingSequence

ROOT = Path(__file__).resolve().parents[2]
NUM_STEPS, PER_STEP = 3, 2  # micro-batches per step


def one_reward(completions, **_columns):
    return [1.0] * len(completions)


def sample(rng: np.random.Generator, group: int, rollout: int) -> TrainingSample:
    """Random tokens over the prompt of the group; every third sample has no trained token at all."""
    prompt = np.random.default_rng(group).integers(3, 200, 6)
    completion = rng.integers(3, 200, int(rng.integers(2, 7)))
    tokens = np.concatenate([prompt, completion]).astype(np.int32)
    mask = (np.arange(len(tokens)) >= len(prompt)) & (rollout % 3 != 2)
    trained = int(mask.sum())
    top = TopLogprobs(
        np.stack([rng.permutation(200)[:4] for _ in range(trained)]).astype(np.int32).reshape(trained, 4)
        if trained
        else np.empty((0, 4), np.int32),
        np.log(rng.dirichlet(np.ones(5), trained)[:, :4]).astype(np.float32),
    )
    sequence = TrainingSequence(
        token_ids=tokens,
        loss_mask=mask,
        sampler_logprobs=np.where(mask, rng.normal(-5.0, 0.3, len(tokens)), 0.0).astype(np.float32),
        versions=np.zeros(len(tokens), np.int32),
        top=top,
    )
    return TrainingSample(
        sequence=sequence,
        advantage=float(rng.normal()),
        reward=float(rng.normal()),
        group_reward_std=0.5,
        slot=Slot(0, group, group),
        generation=0,
        group_id=group,
        model_version=0,
        rollout_id=f"r{group}-{rollout}",
        queued_at=0.0,
        sample_id=f"s{group}-{rollout}",
    )


def steps(world_size: int) -> list[list[MicroBatch]]:
    """The same samples for any number of ranks; on two, groups are split over the rows and one row is empty."""
    made = []
    for number in range(NUM_STEPS):
        step = []
        for i in range(PER_STEP):
            rng = np.random.default_rng(100 * number + i)
            samples = [sample(rng, 10 * number + 2 * i + group, rollout) for group in range(2) for rollout in range(3)]
            rows = [tuple(samples)] + [()] * (world_size - 1)
            if world_size > 1 and not (number == 1 and i == 0):
                rows = [tuple(samples[rank::world_size]) for rank in range(world_size)]
            tokens = tuple(sum(s.sequence.num_tokens for s in row) for row in rows)
            step.append(MicroBatch(rows=tuple(rows), row_tokens=tokens, row_costs=tuple(map(float, tokens))))
        made.append(step)
    return made


class FakePipeline:
    """Rank 0's pipeline without server, worker and ledger; keeps what was sent and scored.

    Attributes:
        sent: the weights of every sync, by name.
        scores: the canary's, of every sync.
        on_plan, on_sync: called with the step's number and the link; may raise.
    """

    def __init__(self, world_size: int) -> None:
        self.steps = steps(world_size)
        self.at = 0
        self.sent: list[dict[str, torch.Tensor]] = []
        self.scores: list[list[float]] = []
        self.on_plan: Any = lambda number: None
        self.on_sync: Any = lambda number, link: None
        self.finished: list[int] = []
        self.skipped: list[int] = []
        self.counters, self.num_rows, self.token_budget, self.policy_version = Counters(), 64, 200, 0
        self.overlap: Any = None
        self.book = SimpleNamespace(passes=lambda: 0.5, passes_done=lambda epochs: False)
        self.ledger = SimpleNamespace(snapshot=lambda path: path.write_bytes(b"ledger"))
        self.stopped = False

    def start(self, link: Any, resumed: Any) -> None:
        self.link, self.overlap = link, SimpleNamespace(computing=False)
        if resumed is not None:
            self.at = resumed[0].global_step
        self._sync()

    def _sync(self) -> None:
        self.on_sync(self.at, self.link)
        self.sent.append({name: tensor.clone() for name, tensor in self.link.parameters()})
        self.scores.append(self.link.score(self.link.canary_ids))

    def next_step(self, num_microbatches: int) -> list[MicroBatch] | None:
        self.on_plan(self.at)
        assert num_microbatches == PER_STEP
        return self.steps[self.at] if self.at < len(self.steps) else None

    def finish_step(self, step: list[MicroBatch], number: int, *, skipped: bool = False) -> None:
        assert step is self.steps[self.at]
        self.at += 1
        if skipped:
            self.skipped.append(number)
            return
        self.finished.append(number)
        self._sync()

    def finish(self) -> None:
        return None

    def stop(self) -> None:
        self.stopped = True

    def rollout_state(self, global_step: int) -> RolloutState:
        return RolloutState(global_step=global_step, policy_version=0, slots={}, counters=vars(self.counters))

    def buffered_samples(self) -> list[TrainingSample]:
        return []


class Watch(TrainerCallback):
    """Full gradients of every step, before the optimizer step (no clipping happens in these runs)."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        grads = {}
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                grad = parameter.grad
                grads[name.removeprefix("module.")] = (
                    grad.full_tensor() if hasattr(grad, "full_tensor") else grad
                ).clone()
        self.gradients.append(grads)


def make_trainer(
    model: Path,
    output: Path,
    *,
    callbacks: list[Any] | None = None,
    peft_config=None,
    weights: torch.dtype = torch.float64,
    **settings: Any,
):
    """A trainer with a `FakePipeline`; `settings` are AsyncGRPOConfig's, `weights` what the policy is loaded in."""
    args = AsyncGRPOConfig(
        **(
            {
                "output_dir": str(output),
                "use_cpu": True,
                "max_steps": NUM_STEPS,
                "gradient_accumulation_steps": PER_STEP,
                "learning_rate": 1e-2,
                "weight_decay": 0.1,
                "max_grad_norm": 0.0,
                "num_generations": 3,
                "max_completion_length": 16,
                "num_sampler_logprobs": 4,
                "save_strategy": "no",
                "disable_tqdm": True,
                "token_budget": 200,
                "ddp_timeout": 60,
                "seed": 3,
            }
            | settings
        )
    )
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=weights)
    trainer = AsyncGRPOTrainer(
        model=policy,
        reward_funcs=one_reward,
        args=args,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "What is 2 plus 1"}]}] * 4),
        callbacks=callbacks,
        peft_config=peft_config,
    )
    trainer.pipeline = FakePipeline(args.world_size)  # type: ignore[assignment]
    return trainer


def parameters_of(trainer: Any) -> dict[str, torch.Tensor]:
    """The whole weights, on every rank (all ranks call it)."""
    return {
        name.removeprefix("module."): (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in trainer.model.named_parameters()
    }


def start_ranks(world_size: int, job: str, *arguments: str) -> subprocess.Popen[str]:
    """Run `tests/ranks/rank_jobs.py JOB ARGUMENTS` on several ranks of this machine under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(world_size), "-m", "tests.ranks.rank_jobs", job, *arguments]
    # from TERM to KILL: on a busy machine the last checkpoint takes longer than torchrun's 30 s
    env = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "100"} | os.environ
    env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=pipe, stderr=pipe, text=True)


def on_ranks(world_size: int, job: str, *arguments: str, timeout_s: float = 270.0) -> tuple[int, str]:
    """As `start_ranks`, to the end: exit code, and the last of what was written."""
    torchrun = start_ranks(world_size, job, *arguments)
    try:
        out, err = torchrun.communicate(timeout=timeout_s)
    finally:
        end(torchrun)
    return torchrun.returncode, out[-2000:] + err[-6000:]


def end(torchrun: subprocess.Popen[str]) -> None:
    """TERM, which torchrun hands on to its ranks, then KILL; nothing when it has ended."""
    if torchrun.poll() is None:
        torchrun.terminate()
        try:
            torchrun.wait(45)
        except subprocess.TimeoutExpired:
            torchrun.kill()
            torchrun.wait(10)
