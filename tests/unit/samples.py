"""Small hand-made samples and records for the unit tests."""

from __future__ import annotations

import zlib

import numpy as np

from asyncgrpo_core.types import GroupRecord, Slot, TopLogprobs, TrainingSample, TrainingSequence


def make_sample(
    position: int = 0,
    *,
    prompt_tokens: int = 3,
    completion_tokens: int = 2,
    version: int = 0,
    epoch: int = 0,
    generation: int = 0,
    reward: float = 1.0,
    advantage: float = 1.0,
    sample_id: str | None = None,
    rollout: int = 0,
    queued_at: float = 0.0,
    group_reward_std: float = 0.5,
    top_k: int = 0,
) -> TrainingSample:
    n = prompt_tokens + completion_tokens
    mask = np.arange(n) >= prompt_tokens
    top = None
    if top_k:
        ids = np.tile(np.arange(top_k, dtype=np.int32), (completion_tokens, 1))
        top = TopLogprobs(ids, np.full(ids.shape, np.log(0.9 / top_k), dtype=np.float32))
    sample_id = sample_id or f"s{epoch}-{position}-{generation}-{rollout}"
    tokens = np.arange(1, n + 1, dtype=np.int32)
    tokens[0] = 1000 + zlib.crc32(sample_id.encode()) % 1_000_000  # no two samples share a token of a row
    sequence = TrainingSequence(
        token_ids=tokens,
        loss_mask=mask,
        sampler_logprobs=np.where(mask, np.float32(-1.0), np.float32(0.0)),
        versions=np.full(n, version, dtype=np.int32),
        top=top,
    )
    return TrainingSample(
        sequence=sequence,
        advantage=advantage,
        reward=reward,
        group_reward_std=group_reward_std,
        slot=Slot(epoch, position, position),
        generation=generation,
        group_id=position,
        model_version=version,
        rollout_id=f"r{epoch}-{position}-{generation}-{rollout}",
        queued_at=queued_at,
        sample_id=sample_id,
    )


def make_record(position: int = 0, samples: int = 2, *, outcome: str = "scored", **kwargs) -> GroupRecord:
    made = [make_sample(position, rollout=i, **kwargs) for i in range(samples)] if outcome == "scored" else []
    slot = Slot(kwargs.get("epoch", 0), position, position)
    generation = kwargs.get("generation", 0)
    return GroupRecord(
        outcome=outcome,
        slot=slot,
        generation=generation,
        group_id=position,
        model_version=kwargs.get("version", 0),
        samples=made,
        reward=0.5,
        dispatched=[(slot, generation)],
    )
