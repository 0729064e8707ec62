"""The delivery proof: is the server computing with the weights that were sent?

A fixed prompt (the canary) is scored by the server and by the trainer. Closeness alone is no proof when the
policy moves less than the arithmetic rounds (bf16: a step at learning rate 1e-6 moves log-probabilities by
2e-3, rounding by 8e-3 to 3e-2), so `judge` weighs three kinds of evidence. It is a pure function; the rules
are those of the project's design ('Weight sync').
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from asyncgrpo_core.sync.backend import TensorEvidence, name_list

PROVED, UNVERIFIED, FAILED = "proved", "unverified", "failed"

FLOAT32_LIMIT = 1e-3  # largest |difference| that float32 arithmetic explains (measured: 5e-7)
FLOAT32_ROUNDING = 1e-5  # two float32 scores of the same weights agree to this


@dataclass(frozen=True)
class Noise:
    """How far two right implementations may be apart on the canary.

    Attributes:
        margin: the server must be nearer to the new weights than to the old ones by more than this
            (mean absolute log-probability difference, nats) for nearness to prove anything.
        limit: a difference above this means wrong weights. Of the *largest* difference where `exact`,
            else of the mean.
        exact: both sides compute in float32.
    """

    margin: float
    limit: float
    exact: bool = False


# bf16: mean differences of 0.008 (0.6B) to 0.034 (1.7B) were measured for right weights, 0.57 to 0.85 for
# wrong ones. float16 rounds 8 times finer.
_NOISE = {
    "float32": Noise(margin=1e-3, limit=FLOAT32_LIMIT, exact=True),
    "float16": Noise(margin=5e-3, limit=3e-2),
    "bfloat16": Noise(margin=3e-2, limit=1e-1),
}


def noise_for(trainer_dtype: str | None, server_dtype: str | None) -> Noise:
    """The noise of the coarser of two dtypes; an unknown dtype counts as bfloat16."""
    order = ("float32", "float16", "bfloat16")
    known = [dtype if dtype in order else "bfloat16" for dtype in (trainer_dtype, server_dtype)]
    return _NOISE[max(known, key=order.index)]


@dataclass(frozen=True)
class Evidence:
    """What is known after one sync. Scores are log-probabilities of canary tokens 1..n-1, in nats.

    `previous` is the trainer's score of the weights that were proved last (before the first proof: the
    server's own score before the sync), None when there is none. `trusted_names` are the tensors whose
    checksums matched at an earlier sync, so that a mismatch now means a difference.
    """

    server: Sequence[float]
    trainer: Sequence[float]
    previous: Sequence[float] | None
    noise: Noise
    tensors: TensorEvidence | None = None
    trusted_names: Collection[str] = ()


@dataclass(frozen=True)
class Verdict:
    """`state` is proved, unverified or failed; `reason` is a clause for logs and errors."""

    state: str
    reason: str
    max_abs_diff: float
    mean_abs_diff: float
    differing: tuple[str, ...] = ()


def judge(evidence: Evidence) -> Verdict:
    """Decide what one sync's evidence means.

    failed      tensors differ, scores are not numbers, or the canary differs by more than the noise
    proved      all tensors are equal; or float32 scores agree (and the old weights do not explain them
                better); or the server is nearer to the new weights than to the old by more than the noise; or
                an adapter's folder was loaded by every engine of a server that a probe adapter was proved at
    unverified  anything else
    """
    noise, tensors = evidence.noise, evidence.tensors
    if len(evidence.server) != len(evidence.trainer) or not evidence.server:
        reason = f"server scored {len(evidence.server)} canary tokens, the trainer {len(evidence.trainer)}"
        return Verdict(FAILED, reason, math.inf, math.inf)
    largest, mean = _distances(evidence.server, evidence.trainer)
    differing = _conclusive(tensors, evidence.trusted_names)

    def verdict(state: str, reason: str) -> Verdict:
        return Verdict(state, reason, largest, mean, differing or (tensors.differing if tensors else ()))

    if differing:
        return verdict(FAILED, "the server does not compute with what was sent")
    distance = largest if noise.exact else mean
    if not distance <= noise.limit:  # also catches NaN
        measure = "largest" if noise.exact else "mean"
        return verdict(
            FAILED, f"the {measure} canary difference is {distance:.3g}, above the noise of {noise.limit:.3g}"
        )
    if tensors is not None and tensors.equal and tensors.kind != "adapter":
        return verdict(PROVED, f"all {tensors.compared} tensors are equal")
    state, reason = _by_canary(evidence, largest, mean)
    if state == UNVERIFIED and not noise.exact and tensors is not None and tensors.kind == "adapter":
        state, reason = PROVED, f"every engine has loaded its folder, and the canary is {mean:.2g} away"
    return verdict(state, reason)


def _by_canary(evidence: Evidence, largest: float, mean: float) -> tuple[str, str]:
    old = None if evidence.previous is None else _distances(evidence.server, evidence.previous)
    if evidence.noise.exact:
        if old is not None and old[0] + FLOAT32_ROUNDING < largest:
            return UNVERIFIED, f"the canary is nearer to the old weights ({old[0]:.2g} against {largest:.2g})"
        return PROVED, f"the largest canary difference is {largest:.2g}"
    if old is not None and old[1] - mean > evidence.noise.margin:
        return PROVED, f"the canary is {mean:.2g} from the new weights and {old[1]:.2g} from the old"
    return UNVERIFIED, f"the policy moved less than the arithmetic rounds, and {_open(evidence.tensors)}"


def _open(tensors: TensorEvidence | None) -> str:
    """Which tensors keep a comparison from proving anything."""
    if tensors is None or not tensors.compared:
        return "no tensors could be compared"
    names = [*tensors.differing, *tensors.unchecked]
    return f"the server holds {name_list(names)} in a way that could not be compared"


def _conclusive(tensors: TensorEvidence | None, trusted: Collection[str]) -> tuple[str, ...]:
    """Tensors that prove a wrong delivery: any that differ by value; by checksum those that matched before."""
    if tensors is None:
        return ()
    if tensors.kind == "values":
        return tensors.differing
    not_found = (*tensors.differing, *tensors.unchecked, *tensors.constant)
    return tuple(name for name in not_found if name in trusted)


def _distances(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """(largest, mean) absolute difference; (inf, inf) when lengths differ or anything is no number."""
    differences = [abs(x - y) for x, y in zip(a, b, strict=False)]
    if len(a) != len(b) or not differences or any(math.isnan(d) for d in differences):
        return math.inf, math.inf
    return max(differences), sum(differences) / len(differences)


def canary_token_ids(vocab_size: int, *, length: int = 32, seed: int = 0, exclude: Collection[int] = ()) -> list[int]:
    """A fixed pseudo-random prompt: `length` token ids below `vocab_size`, none of `exclude` (eos, pad).

    Random tokens make every layer matter; a natural sentence's log-probabilities sit near 0 and hide errors.
    """
    allowed = [token for token in range(min(vocab_size, 50_000)) if token not in exclude]
    return random.Random(seed).choices(allowed, k=length)
