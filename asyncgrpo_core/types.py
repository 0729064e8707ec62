"""The carriers of the data path: slot -> turn -> rollout -> group -> sample -> buffer record.

Words (used everywhere, no synonyms): *group* = one prompt and its rollouts; *rollout* = one conversation;
*turn* = one sampling request; *sample* = the tokens a loss is computed on; *row* = what one rank forwards in
one micro-batch; *step* = one optimizer step; *policy version* = number of weight syncs done.
Names of `TurnRecord`, `Rollout` and `RolloutGroup` and of their fields are the reference's (API pages).
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np


class Slot(NamedTuple):
    """A prompt slot: the unit of 'exactly once'. Unique key is (epoch, row).

    Example: row 17 of the dataset, drawn as the 3rd prompt of epoch 0 -> `Slot(0, 17, 3)`.
    """

    epoch: int
    row: int  # index into the training dataset
    position: int  # place in this epoch's prompt order, counted from 0


@dataclass
class TopLogprobs:
    """The sampler's most likely tokens at T positions, as flat arrays (never dicts per token in the hot path).

    A position with fewer than k reported tokens is padded with id -1 and log-probability -inf.
    """

    ids: np.ndarray  # int32 [T, k]
    logprobs: np.ndarray  # float32 [T, k]

    @classmethod
    def from_dicts(cls, rows: list[dict[int, float]]) -> TopLogprobs:
        """Convert the reference's one-dict-per-token form."""
        k = max((len(r) for r in rows), default=0)
        ids = np.full((len(rows), k), -1, dtype=np.int32)
        logprobs = np.full((len(rows), k), -np.inf, dtype=np.float32)
        for t, row in enumerate(rows):
            ids[t, : len(row)] = list(row.keys())
            logprobs[t, : len(row)] = list(row.values())
        return cls(ids, logprobs)

    def __len__(self) -> int:
        return len(self.ids)


@dataclass
class CandidateSets:
    """The tokens that each of T tokens was drawn from under top-k / top-p / min-p, laid end to end.

    Token t was drawn from `ids[offsets[t] : offsets[t + 1]]`.

    Example: `CandidateSets.from_lists([[7], [8, 9]])` has ids [7, 8, 9] and offsets [0, 1, 3].
    """

    ids: np.ndarray  # int32 [C]
    offsets: np.ndarray  # int64 [T + 1], from 0 to C

    @classmethod
    def from_lists(cls, rows: Sequence[Sequence[int]]) -> CandidateSets:
        """Convert the reference's one-list-per-token form."""
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        return cls(np.fromiter(chain.from_iterable(rows), np.int32, int(offsets[-1])), offsets)

    @classmethod
    def join(cls, parts: Sequence[CandidateSets]) -> CandidateSets:
        """The sets of several runs of tokens, one after another."""
        sizes = np.concatenate([np.zeros(1, np.int64), *(part.sizes for part in parts)])
        return cls(np.concatenate([np.empty(0, np.int32), *(part.ids for part in parts)]), np.cumsum(sizes))

    @property
    def sizes(self) -> np.ndarray:
        """int64 [T]."""
        return np.diff(self.offsets)

    def select(self, kept: np.ndarray) -> CandidateSets:
        """The sets of the tokens where bool [T] `kept` is True."""
        sizes = self.sizes
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes[kept])])
        return CandidateSets(self.ids[np.repeat(kept, sizes)], offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, tokens: slice) -> CandidateSets:
        """The sets of a run of tokens, as for a list: `sets[:3]`."""
        kept = np.zeros(len(self), dtype=bool)
        kept[tokens] = True
        return self.select(kept)

    def tolist(self) -> list[list[int]]:
        return [ids.tolist() for ids in np.split(self.ids, self.offsets[1:-1])] if len(self) else []


@dataclass
class TurnRecord:
    """One sampling request: the prompt sent to the sampler and the tokens it generated (reference, TurnRecord).

    `output_sampler_logprobs` is `TopLogprobs` in our own loop and `output_sampling_mask` `CandidateSets`; a custom
    loop may pass the reference's list of dicts and list of lists. `output_versions` (ours) is the policy version of
    each output token where the server reports it. `finish_reason` (ours) is the server's own word, "stop" or "length".
    """

    prompt_ids: list[int]
    output_ids: list[int]
    output_log_probs: list[float] = field(default_factory=list)
    output_mask: list[int] | None = None
    output_sampling_mask: list[list[int]] | CandidateSets | None = None
    output_sampler_logprobs: list[dict[int, float]] | TopLogprobs | None = None
    output_versions: list[int] | None = None
    finish_reason: str | None = None


@dataclass
class Rollout:
    """One finished rollout, as returned by `generate_one` (reference, Rollout)."""

    completion: list[dict[str, Any]]
    completion_ids: list[int]
    turns: list[TurnRecord]
    tool_call_count: int = 0
    tool_failure_count: int = 0
    reward: float | None = None
    rollout_id: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass
class TrainingSequence:
    """The tokens of one sample before it has an advantage. T = number of forwarded tokens.

    `top` has one row per *trained* token, in order; None when score centering is off. So has `sampling_mask`: the
    candidate set of every trained token; None where tokens were drawn from the whole vocabulary.
    `versions` is the policy version of every token (of prompt tokens: that of the first output token).
    """

    token_ids: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # bool [T], True where the token is trained
    sampler_logprobs: np.ndarray  # float32 [T], 0 where not trained
    versions: np.ndarray  # int32 [T]
    top: TopLogprobs | None = None
    sampling_mask: CandidateSets | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_trained(self) -> int:
        return int(self.loss_mask.sum())


@dataclass
class RolloutGroup:
    """The `num_generations` rollouts of one prompt, scored together (reference, RolloutGroup)."""

    prompts: list[list[dict[str, Any]]]
    reward_kwargs: dict[str, list[Any]]
    completions: list[list[dict[str, Any]]]
    completions_ids: list[list[int]]
    completions_sequences: list[list[TrainingSequence]]
    tool_call_counts: list[int]
    tool_failure_counts: list[int]
    model_version: int
    group_id: int
    row_index: int
    env_rewards: list[tuple[type, float] | None]
    rollout_rewards: list[float | None]
    queued_at: float = 0.0
    rewards: np.ndarray | None = None


@dataclass
class TrainingSample:
    """One sample on its way to the loss: a sequence with its advantage and its origin.

    `queued_at` is `time.time()` when it entered the buffer (it may outlive the process that made it).
    """

    sequence: TrainingSequence
    advantage: float
    reward: float  # summed reward of its rollout
    group_reward_std: float
    slot: Slot
    generation: int  # how many times the slot was generated before (0 = first)
    group_id: int
    model_version: int  # policy version when the group's first rollout started
    rollout_id: str
    func_group_stds: dict[str, float] = field(default_factory=dict)  # reward function name -> std in the group
    queued_at: float = 0.0
    sample_id: str = field(default_factory=lambda: uuid.uuid4().hex)


# How a group's life in the rollout worker ended.
OUTCOMES = ("scored", "zero_std", "no_reward", "failed", "filtered", "report")


@dataclass
class GroupRecord:
    """What the rollout worker hands to the trainer through the buffer, one per ended group.

    `dispatched` lists the (slot, generation) pairs started since the worker's previous record, so a slot is
    always announced before (or with) its outcome. A record with outcome "report" carries no group: only
    `dispatched` and `metrics`.
    """

    outcome: str  # one of OUTCOMES
    slot: Slot | None = None
    generation: int = 0
    group_id: int = -1
    model_version: int = 0
    samples: list[TrainingSample] = field(default_factory=list)
    reward: float | None = None  # mean summed reward over the scored rollouts
    error: str | None = None  # for "failed"
    dispatched: list[tuple[Slot, int]] = field(default_factory=list)
    metrics: list[tuple[str, str, float, float]] = field(default_factory=list)  # see metrics.MetricEvent
    loop_state: Any = None  # what a custom loop's state_dict returned, when it is due
