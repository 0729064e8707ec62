"""The candidate sets of a row's loss terms: under top-k, top-p and min-p, what each token was drawn from.

Laid end to end in the order of the loss terms: term n was drawn from ids[offsets[n] : offsets[n + 1]], ascending.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncgrpo_core.errors import DataError
from asyncgrpo_core.types import CandidateSets, TrainingSample

_MORE_THAN_ANY_ID = 1 << 32


def row_candidates(
    samples: Sequence[TrainingSample], target_ids: np.ndarray, top_ids: np.ndarray, sample_index: np.ndarray
) -> tuple[np.ndarray, np.ndarray] | None:
    """The sets of the row's N loss terms; None where every token was drawn from the whole vocabulary.

    Args:
        samples: in row order. One without sets gives its terms empty ones, which mean the whole vocabulary.
        target_ids: int64 [N], the sampled tokens.
        top_ids: int64 [N, k], the sampler's top tokens, -1 at padding.
        sample_index: int64 [N], which sample a term is of.

    Returns:
        (ids int64 [C], offsets int64 [N + 1]).

    Raises:
        DataError: names the sample whose sets are fewer or more than its trained tokens, empty, name a token twice, or
            lack the sampled token or one of the sampler's top tokens: the sampler's log-probabilities are then not
            those of a distribution over the set.
    """
    if all(sample.sequence.sampling_mask is None for sample in samples):
        return None
    sets = CandidateSets.join([_sets(sample) for sample in samples])
    term = np.repeat(np.arange(len(sets)), sets.sizes)
    keys = term * _MORE_THAN_ANY_ID + sets.ids
    if not (keys[1:] > keys[:-1]).all():
        keys.sort()
    twice = np.flatnonzero(keys[1:] == keys[:-1])
    if len(twice):
        raise _refused(samples[sample_index[term[twice[0]]]], "names a token twice")
    asked = np.concatenate([target_ids[:, None], top_ids], axis=1)
    wanted = np.arange(len(asked))[:, None] * _MORE_THAN_ANY_ID + asked
    found = np.zeros(wanted.shape, dtype=bool)
    if len(keys):
        found = keys[np.searchsorted(keys, wanted).clip(max=len(keys) - 1)] == wanted
    outside = ~found & (asked >= 0) & (sets.sizes > 0)[:, None]
    if outside.any():
        row, column = np.argwhere(outside)[0]
        which = "the sampled token" if column == 0 else "one of the sampler's most likely tokens,"
        raise _refused(samples[sample_index[row]], f"lacks {which} {asked[row, column]}")
    return keys % _MORE_THAN_ANY_ID, sets.offsets


def _sets(sample: TrainingSample) -> CandidateSets:
    seq = sample.sequence
    sets = seq.sampling_mask
    if sets is None:
        return CandidateSets(np.empty(0, np.int32), np.zeros(seq.num_trained + 1, np.int64))
    if len(sets) != seq.num_trained:
        raise DataError(
            f"sample {sample.sample_id} of slot {tuple(sample.slot)}: {len(sets)} candidate sets for "
            f"{seq.num_trained} trained tokens.",
            "Return one list in output_sampling_mask for every generated token.",
        )
    if (sets.sizes == 0).any():
        raise _refused(sample, "is empty")
    if (sets.ids < 0).any():
        raise _refused(sample, f"names the token {sets.ids.min()}")
    return sets


def _refused(sample: TrainingSample, what: str) -> DataError:
    return DataError(
        f"sample {sample.sample_id} of slot {tuple(sample.slot)}: the candidate set of a trained token {what}.",
        "output_sampling_mask must list the tokens that each token was drawn from, and output_log_probs and "
        "output_sampler_logprobs must be of the distribution over them (vLLM: --logprobs-mode processed_logprobs).",
    )
