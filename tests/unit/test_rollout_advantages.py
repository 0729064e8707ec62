"""Advantages and group outcomes against hand computation."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from asyncgrpo_core.rollout.advantages import centred_advantages, group_outcome, group_std, standardised_advantages

NAN = float("nan")


def test_standardised_with_the_population_std() -> None:
    """F023: rewards 0, 0, 0, 1: mean 1/4, population std sqrt(3)/4."""
    got = standardised_advantages(np.array([0.0, 0.0, 0.0, 1.0]))
    std = math.sqrt(3) / 4
    np.testing.assert_allclose(got, [-0.25 / (std + 1e-8)] * 3 + [0.75 / (std + 1e-8)], rtol=1e-12)


def test_unscored_rollouts_get_zero_and_are_left_out() -> None:
    """F024."""
    values = [1.5, -2.0, 0.25]
    got = standardised_advantages(np.array([1.5, NAN, -2.0, 0.25]))
    mean, std = statistics.mean(values), statistics.pstdev(values)
    expected = [(v - mean) / (std + 1e-8) for v in values]
    np.testing.assert_allclose(got, [expected[0], 0.0, expected[1], expected[2]], rtol=1e-12)


def test_nothing_scored_is_all_zero() -> None:
    np.testing.assert_array_equal(standardised_advantages(np.full(3, NAN)), np.zeros(3))


@pytest.mark.parametrize(
    ("rewards", "outcome"),
    [
        ([0.0, 1.0], "scored"),
        ([1.0, 1.0, 1.0], "zero_std"),  # F025
        ([0.1 + 0.2, 0.3], "zero_std"),  # equal within 1e-9
        ([0.0, 2e-9], "scored"),
        ([1.0, NAN, NAN], "zero_std"),  # F026: fewer than two scorable
        ([1.0, NAN, 1.0], "zero_std"),
        ([1.0, NAN, 0.0], "scored"),
        ([NAN, NAN], "no_reward"),  # F030
    ],
)
def test_outcomes(rewards, outcome) -> None:
    assert group_outcome(np.array(rewards)) == outcome


def test_group_std_ignores_unscored() -> None:
    assert group_std(np.array([1.0, NAN, 3.0])) == 1.0
    assert group_std(np.array([NAN])) == 0.0


def test_without_std_only_the_mean_is_taken_away() -> None:
    """Dr. GRPO, arXiv 2503.20783: the spread of the rewards stays in the advantage; unscored rollouts get 0."""
    np.testing.assert_allclose(centred_advantages(np.array([1.0, NAN, -2.0, 4.0])), [0.0, 0.0, -3.0, 3.0], rtol=1e-12)
    np.testing.assert_array_equal(centred_advantages(np.full(3, NAN)), np.zeros(3))
    wide = np.array([0.0, 2.0, 1.0])
    np.testing.assert_allclose(centred_advantages(10 * wide), 10 * centred_advantages(wide), rtol=1e-12)
    np.testing.assert_allclose(standardised_advantages(10 * wide), standardised_advantages(wide), rtol=1e-6)
