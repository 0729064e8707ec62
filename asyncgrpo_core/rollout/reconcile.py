"""Turns -> training sequences (reference, 'Multi-turn rollouts').

A turn whose prompt starts with the tokens of a sequence held so far is appended to it; any other turn starts a new one.
All of a rollout's sequences stay open, because an agent framework may hold several conversations at once. Every
generated token that is trained on ends up in exactly one sequence. Flat numpy arrays, no per-token objects.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from asyncgrpo_core.errors import RolloutError
from asyncgrpo_core.types import CandidateSets, TopLogprobs, TrainingSequence, TurnRecord


@dataclass
class Reconciled:
    """The sequences of one rollout, and how its turn transitions went.

    `drift_tokens` has one entry per transition: held tokens that a fork rendered anew (0 where it did not fork), of the
    sequence that shares most with the turn's prompt.
    """

    sequences: list[TrainingSequence]
    transitions: int = 0
    forks: int = 0
    drift_tokens: list[int] = field(default_factory=list)


@dataclass
class _Held:
    """The turns appended so far; token i of `ids` belongs to the arrays' i-th entry."""

    ids: list[int]
    pieces: list[tuple[int, TurnRecord]]  # (length of `ids` before the turn's output, turn)


def reconcile(turns: list[TurnRecord], model_version: int, *, want_top: bool) -> Reconciled:
    """Build the training sequences of one rollout.

    Args:
        turns: the sampling requests in order.
        model_version: policy version of tokens whose turn does not report its own.
        want_top: whether every trained token needs the sampler's most likely tokens (score centering).

    Raises:
        RolloutError: a turn lacks log-probabilities (or, with `want_top`, the top ones) of a trained token, or its
            lists differ in length.
    """
    result = Reconciled(sequences=[])
    held: list[_Held] = []
    for number, turn in enumerate(turns):
        check_turn(turn, number, want_top)
        result.transitions += number > 0
        ids = turn.prompt_ids + turn.output_ids
        continued = max(
            (h for h in held if _starts_with(turn.prompt_ids, h.ids)), key=lambda h: len(h.ids), default=None
        )
        if continued is not None:
            continued.pieces.append((len(turn.prompt_ids), turn))
            continued.ids = ids
            result.drift_tokens.append(0)
            continue
        if held:
            result.forks += 1
            result.drift_tokens.append(_drift(turn.prompt_ids, held))
        held.append(_Held(ids, [(len(turn.prompt_ids), turn)]))
    for sequence in held:
        _close(sequence, model_version, want_top, result.sequences)
    return result


def _drift(prompt_ids: list[int], held: list[_Held]) -> int:
    common, _, tokens = max((_common_prefix(prompt_ids, h.ids), i, len(h.ids)) for i, h in enumerate(held))
    return tokens - common


def check_turn(turn: TurnRecord, number: int, want_top: bool) -> None:
    """Raise RolloutError unless the turn's lists fit together and hold what training needs."""
    n = len(turn.output_ids)
    mask = turn.output_mask
    trained = n > 0 if mask is None else any(mask)
    optional = {
        "output_mask": mask,
        "output_versions": turn.output_versions,
        "output_sampling_mask": turn.output_sampling_mask,
        "output_sampler_logprobs": turn.output_sampler_logprobs,
    }
    lengths = {name: len(value) for name, value in optional.items() if value is not None}
    if trained or turn.output_log_probs:
        lengths["output_log_probs"] = len(turn.output_log_probs)
    for name, length in lengths.items():
        if length != n:
            raise RolloutError(
                f"Turn {number} of a rollout has {n} output_ids and {length} {name}.",
                "Return one value per output token; output_log_probs are required when a token is trained on.",
            )
    if want_top and trained and turn.output_sampler_logprobs is None:
        raise RolloutError(
            f"Turn {number} of a rollout has no output_sampler_logprobs, which score_centering=True needs.",
            "Return the sampler's most likely tokens from generate_one_turn, or set score_centering=False.",
        )


def _starts_with(ids: list[int], prefix: list[int]) -> bool:
    return len(ids) >= len(prefix) and ids[: len(prefix)] == prefix


def _common_prefix(a: list[int], b: list[int]) -> int:
    low, high = 0, min(len(a), len(b))  # a and b agree up to low, and differ before high + 1
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _close(held: _Held, model_version: int, want_top: bool, out: list[TrainingSequence]) -> None:
    total = len(held.ids)
    loss_mask = np.zeros(total, dtype=bool)
    logprobs = np.zeros(total, dtype=np.float32)
    versions = np.full(total, model_version, dtype=np.int32)
    tops: list[TopLogprobs] = []
    candidates: list[CandidateSets] = []
    has_sampling_mask = any(turn.output_sampling_mask is not None for _, turn in held.pieces)
    begin = 0
    for start, turn in held.pieces:
        end = start + len(turn.output_ids)
        mask = _mask(turn)
        loss_mask[start:end] = mask
        if len(turn.output_log_probs):
            logprobs[start:end] = np.where(mask, np.asarray(turn.output_log_probs, dtype=np.float32), 0.0)
        if turn.output_versions:
            versions[start:end] = turn.output_versions
            versions[begin:start] = turn.output_versions[0]  # context counts as its first output token
        if want_top and mask.any():
            tops.append(_top(turn, mask))
        if has_sampling_mask and mask.any():
            candidates.append(_candidates(turn, mask))
        begin = end
    if not loss_mask.any():
        return  # nothing to train on; the rollout still counts with its reward
    out.append(
        TrainingSequence(
            token_ids=np.array(held.ids, dtype=np.int32),
            loss_mask=loss_mask,
            sampler_logprobs=logprobs,
            versions=versions,
            top=_join(tops) if want_top else None,
            sampling_mask=CandidateSets.join(candidates) if has_sampling_mask else None,
        )
    )


def _mask(turn: TurnRecord) -> np.ndarray:
    if turn.output_mask is None:
        return np.ones(len(turn.output_ids), dtype=bool)
    return np.asarray(turn.output_mask, dtype=bool)


def _top(turn: TurnRecord, mask: np.ndarray) -> TopLogprobs:
    top = turn.output_sampler_logprobs
    if not isinstance(top, TopLogprobs):
        top = TopLogprobs.from_dicts(top or [])
    return top if mask.all() else TopLogprobs(top.ids[mask], top.logprobs[mask])


def _candidates(turn: TurnRecord, mask: np.ndarray) -> CandidateSets:
    sets = turn.output_sampling_mask
    if sets is None:
        raise RolloutError(
            "Some turns of a rollout have an output_sampling_mask and others have none.",
            "Return it for every turn or for none.",
        )
    if not isinstance(sets, CandidateSets):
        sets = CandidateSets.from_lists(sets)
    return sets if mask.all() else sets.select(mask)


def _join(tops: list[TopLogprobs]) -> TopLogprobs:
    if len(tops) == 1:
        return tops[0]
    k = max(top.ids.shape[1] for top in tops)
    ids = np.full((sum(map(len, tops)), k), -1, dtype=np.int32)
    logprobs = np.full(ids.shape, -np.inf, dtype=np.float32)
    row = 0
    for top in tops:
        width = top.ids.shape[1]
        ids[row : row + len(top), :width] = top.ids
        logprobs[row : row + len(top), :width] = top.logprobs
        row += len(top)
    return TopLogprobs(ids, logprobs)
