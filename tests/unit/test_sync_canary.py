"""The delivery verdict is a pure function: a table of evidence and what it means (design.md, 'Weight sync')."""

from __future__ import annotations

import math

import pytest

from asyncgrpo_core.sync.backend import TensorEvidence
from asyncgrpo_core.sync.canary import (
    FAILED,
    PROVED,
    UNVERIFIED,
    Evidence,
    Noise,
    canary_token_ids,
    judge,
    noise_for,
)

FLOAT32 = noise_for("float32", "float32")
BF16 = Noise(margin=0.03, limit=0.1)
NEW = [-1.0, -2.0, -3.0, -4.0]


def shifted(scores: list[float], by: float) -> list[float]:
    """Every second score moved by `by`: largest difference `by`, mean `by / 2`."""
    return [score + by * (i % 2) for i, score in enumerate(scores)]


def values(**found) -> TensorEvidence:
    return TensorEvidence(kind="values", compared=5, **found)


def checksums(**found) -> TensorEvidence:
    return TensorEvidence(kind="checksums", compared=5, **found)


CASES = {
    # float32: closeness proves, under 1e-3 of the largest difference
    "float32 close": (Evidence(shifted(NEW, 9e-4), NEW, None, FLOAT32), PROVED),
    "float32 above the limit": (Evidence(shifted(NEW, 1.1e-3), NEW, None, FLOAT32), FAILED),
    "float32 one token far": (Evidence([*NEW[:3], -4.5], NEW, None, FLOAT32), FAILED),
    "float32 close, but exactly the old weights": (
        Evidence(NEW, shifted(NEW, 5e-4), NEW, FLOAT32),
        UNVERIFIED,
    ),
    "float32 close, old and new the same": (Evidence(shifted(NEW, 1e-6), NEW, NEW, FLOAT32), PROVED),
    # bf16: only being nearer to the new than to the old by more than the noise proves
    "bf16 nearer by more than the noise": (Evidence(shifted(NEW, 0.01), NEW, shifted(NEW, 0.9), BF16), PROVED),
    "bf16 nearer by less than the noise": (
        Evidence(shifted(NEW, 0.01), NEW, shifted(NEW, 0.05), BF16),
        UNVERIFIED,
    ),
    "bf16 close, nothing to compare with": (Evidence(NEW, NEW, None, BF16), UNVERIFIED),
    "bf16 above the noise": (Evidence(shifted(NEW, 0.3), NEW, shifted(NEW, 0.9), BF16), FAILED),
    "bf16 mean counts, not the largest": (
        Evidence(shifted(NEW, 0.15), NEW, shifted(NEW, 0.9), BF16),
        PROVED,
    ),
    # tensors
    "values equal": (Evidence(NEW, NEW, None, BF16, values()), PROVED),
    "values differ although the canary is close": (
        Evidence(NEW, NEW, None, FLOAT32, values(differing=("lm_head.weight",))),
        FAILED,
    ),
    "values partly unchecked prove nothing": (
        Evidence(NEW, NEW, None, BF16, values(unchecked=("a",))),
        UNVERIFIED,
    ),
    "values equal, canary far: the models compute differently": (
        Evidence(shifted(NEW, 1.0), NEW, None, FLOAT32, values()),
        FAILED,
    ),
    "checksums equal": (Evidence(NEW, NEW, shifted(NEW, 1e-3), BF16, checksums()), PROVED),
    "checksums differ for a layout never seen equal": (
        Evidence(NEW, NEW, None, BF16, checksums(differing=("experts.w1",))),
        UNVERIFIED,
    ),
    "checksums differ for a tensor that matched before": (
        Evidence(NEW, NEW, None, BF16, checksums(differing=("q_proj.weight",)), {"q_proj.weight"}),
        FAILED,
    ),
    "a tensor that matched before is nowhere at the server": (
        Evidence(NEW, NEW, None, BF16, checksums(unchecked=("embed_in.weight",)), {"embed_in.weight"}),
        FAILED,
    ),
    "a constant tensor that matched before does no longer": (
        Evidence(NEW, NEW, None, BF16, checksums(constant=("layer_scalar",)), {"layer_scalar"}),
        FAILED,
    ),
    "a constant tensor that never matched": (
        Evidence(NEW, NEW, None, BF16, checksums(constant=("layer_scalar",)), {"norm.weight"}),
        PROVED,
    ),
    "a tensor that was never found": (
        Evidence(NEW, NEW, None, BF16, checksums(unchecked=("embed_in.weight",)), {"norm.weight"}),
        UNVERIFIED,
    ),
    "checksums of nothing": (
        Evidence(NEW, NEW, None, BF16, TensorEvidence(kind="checksums", compared=0)),
        UNVERIFIED,
    ),
    # broken scores
    "server scored NaN": (Evidence([math.nan, *NEW[1:]], NEW, None, FLOAT32), FAILED),
    "trainer scored NaN": (Evidence(NEW, [math.nan, *NEW[1:]], None, BF16, values()), FAILED),
    "server scored minus infinity": (Evidence([-math.inf, *NEW[1:]], NEW, None, BF16), FAILED),
    "lengths differ": (Evidence(NEW[:2], NEW, None, FLOAT32), FAILED),
    "no scores": (Evidence([], [], None, FLOAT32), FAILED),
}


@pytest.mark.parametrize("case", CASES)
def test_verdict(case: str) -> None:
    evidence, wanted = CASES[case]
    assert judge(evidence).state == wanted, judge(evidence)


def test_verdict_measures_and_names() -> None:
    verdict = judge(Evidence(shifted(NEW, 0.5), NEW, None, FLOAT32, values(differing=("a", "b"))))
    assert verdict.max_abs_diff == pytest.approx(0.5)
    assert verdict.mean_abs_diff == pytest.approx(0.25)
    assert verdict.differing == ("a", "b")


@pytest.mark.parametrize(
    ("trainer", "server", "limit", "exact"),
    [
        ("float32", "float32", 1e-3, True),
        ("float32", "bfloat16", 1e-1, False),
        ("bfloat16", "float32", 1e-1, False),
        ("float16", "float32", 3e-2, False),
        ("float16", "bfloat16", 1e-1, False),
        ("float32", None, 1e-1, False),  # an unknown dtype is not taken for float32
    ],
)
def test_noise_is_that_of_the_coarser_dtype(trainer, server, limit, exact) -> None:
    noise = noise_for(trainer, server)
    assert (noise.limit, noise.exact) == (limit, exact)


def test_canary_tokens_are_fixed_and_allowed() -> None:
    ids = canary_token_ids(20, length=64, exclude={0, 3})
    assert ids == canary_token_ids(20, length=64, exclude={0, 3})
    assert len(ids) == 64
    assert set(ids) <= set(range(20)) - {0, 3}
    assert ids != canary_token_ids(20, length=64, seed=1, exclude={0, 3})


def test_the_reason_names_what_could_not_be_compared() -> None:
    some = judge(Evidence(NEW, NEW, None, BF16, checksums(differing=("w13",), unchecked=("embed_in.weight",))))
    assert "the server holds w13, embed_in.weight in a way that could not be compared" in some.reason
    assert "no tensors could be compared" in judge(Evidence(NEW, NEW, None, BF16)).reason
