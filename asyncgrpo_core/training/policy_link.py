"""How the weight sync reaches the policy in training: its parameters, and its own score of a canary."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from asyncgrpo_core.models.parameters import iter_server_parameters
from asyncgrpo_core.packing.layout import pack_row
from asyncgrpo_core.training.pipeline import PolicyLink
from asyncgrpo_core.types import Slot, TrainingSample, TrainingSequence

if TYPE_CHECKING:
    from asyncgrpo_core.training.trainer import AsyncGRPOTrainer

_CANARY_TOKENS = 48
_CANARY_TEXT = "Count to twenty: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20. The end of the story is near."


def policy_link(trainer: AsyncGRPOTrainer) -> PolicyLink:
    """Connect a trainer to its pipeline."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    dtype = next(model.parameters()).dtype
    return PolicyLink(
        parameters=lambda: iter_server_parameters(model),
        score=lambda ids: score_tokens(trainer, ids),
        canary_ids=canary_tokens(trainer),
        dtype=str(dtype).removeprefix("torch."),
        on_cpu=trainer.args.device.type == "cpu",
    )


def canary_tokens(trainer: AsyncGRPOTrainer) -> list[int]:
    """A fixed text in the policy's own words: the first prompt, repeated up to 48 tokens."""
    tokenizer = trainer.processing_class
    ids: list[int] = []
    dataset = trainer.train_dataset
    first = next(iter(dataset)) if dataset is not None else {}
    if "prompt" in first:
        kwargs = trainer.args.chat_template_kwargs or {}
        text = tokenizer.apply_chat_template(first["prompt"], tokenize=False, add_generation_prompt=True, **kwargs)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    ids = list(ids) or tokenizer(_CANARY_TEXT, add_special_tokens=False)["input_ids"]
    repeats = -(-_CANARY_TOKENS // len(ids))
    return (ids * repeats)[:_CANARY_TOKENS]


@torch.no_grad()
def score_tokens(trainer: AsyncGRPOTrainer, ids: list[int]) -> list[float]:
    """Log-probability of every token after the first, at temperature 1, under the current weights."""
    mask = np.ones(len(ids), dtype=bool)
    mask[0] = False
    sequence = TrainingSequence(
        token_ids=np.asarray(ids, dtype=np.int32),
        loss_mask=mask,
        sampler_logprobs=np.zeros(len(ids), dtype=np.float32),
        versions=np.zeros(len(ids), dtype=np.int32),
    )
    sample = TrainingSample(
        sequence=sequence,
        advantage=0.0,
        reward=0.0,
        group_reward_std=0.0,
        slot=Slot(0, 0, 0),
        generation=0,
        group_id=0,
        model_version=0,
        rollout_id="canary",
    )
    model = trainer.model_wrapped
    training = model.training
    model.eval()
    try:
        row = trainer._prepare_inputs(pack_row([sample], 0))
        with trainer.compute_loss_context_manager():
            output = model(**row, temperature=1.0)
    finally:
        model.train(training)
    return output.logprobs.float().cpu().tolist()
