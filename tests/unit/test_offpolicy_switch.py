"""`loss_type` from a run's config to the gradient of a model, DAPO's parts, and what is refused."""

import typing
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from asyncgrpo_core import AsyncGRPOConfig
from asyncgrpo_core.errors import ConfigError
from asyncgrpo_core.launch.training_section import TrainingSection
from asyncgrpo_core.models.forward import PolicyOutput, install_packed_forward
from asyncgrpo_core.packing import pack_row
from asyncgrpo_core.rewards import get_soft_overlong_punishment
from asyncgrpo_core.rollout.advantages import standardised_advantages
from asyncgrpo_core.rollout.loop import AsyncRolloutLoop
from asyncgrpo_core.training.loss import LossSettings, async_grpo_loss
from asyncgrpo_core.training.offpolicy import LOSS_TYPES
from tests.unit.policy_cases import assert_same_gradients, gradients, some_samples, tiny_policy

BOUNDS = {"vllm_importance_sampling_clip_min": 0.3, "vllm_importance_sampling_clip_max": 1.7}


def settings_of(tmp_path, **kwargs):
    return LossSettings.from_config(AsyncGRPOConfig(output_dir=str(tmp_path), **kwargs))


def model_gradient(settings, parts=1):
    samples = some_samples(seed=5, count=6)
    model = install_packed_forward(tiny_policy())
    total = sum(s.sequence.num_trained for s in samples)
    for part in np.array_split(np.arange(len(samples)), parts):
        row = pack_row([samples[i] for i in part], 4 if settings.score_centering else 0)
        loss, _ = async_grpo_loss(model(**row, temperature=1.0), row, settings, total)
        loss.backward()
    return gradients(model)


def test_the_defaults_are_the_reference_s_losses(tmp_path):
    assert settings_of(tmp_path) == LossSettings()
    assert settings_of(tmp_path, score_centering=False) == LossSettings(score_centering=False)


def test_every_loss_type_gives_its_own_gradient_and_the_same_one_sample_by_sample(tmp_path):
    found = {}
    for name in LOSS_TYPES:
        settings = settings_of(tmp_path, loss_type=name, score_centering=False, **BOUNDS)
        found[name] = model_gradient(settings)
        assert_same_gradients(found[name], model_gradient(settings, parts=6), 1e-6)
    for a in LOSS_TYPES:
        for b in LOSS_TYPES:
            difference = max(float((found[a][n] - found[b][n]).abs().max()) for n in found[a])
            assert (difference == 0) == (a == b), (a, b)


def test_the_section_of_a_run_s_config_knows_the_same_loss_types():
    assert typing.get_args(TrainingSection.model_fields["loss_type"].annotation) == LOSS_TYPES


@pytest.mark.parametrize("make", [TrainingSection, LossSettings, lambda **kw: AsyncGRPOConfig(output_dir="x", **kw)])
def test_a_loss_type_beside_score_centering_is_refused(make):
    """score_centering is on by default, and silently training another loss than either name says is worse."""
    with pytest.raises((ConfigError, ValidationError), match="score_centering"):
        make(loss_type="gspo")
    assert make(loss_type="gspo", score_centering=False).loss_type == "gspo"


def test_unknown_names_and_caps_are_refused():
    with pytest.raises(ConfigError, match="'ppo'"):
        LossSettings(loss_type="ppo", score_centering=False)
    for cap in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="importance_ratio_cap"):
            LossSettings(importance_ratio_cap=cap)


def test_an_empty_row_takes_part_with_a_loss_of_zero():
    for name in LOSS_TYPES[1:]:
        model = install_packed_forward(tiny_policy())
        row = pack_row([], 0)
        settings = LossSettings(score_centering=False, loss_type=name)
        loss, sums = async_grpo_loss(model(**row, temperature=1.0), row, settings, 5)
        loss.backward()
        assert loss.item() == 0 and sums.events() == [] and not any(g.any() for g in gradients(model).values())


# -- DAPO, arXiv 2503.14476


@pytest.mark.parametrize("loss_type", ["async_grpo", "gspo"])
@pytest.mark.parametrize(
    ("ratio", "advantage", "flows"),
    [(1.25, 1.0, True), (1.31, 1.0, False), (0.75, -1.0, False), (0.85, -1.0, True), (0.75, 1.0, True)],
)
def test_f036_clip_higher_moves_the_upper_bound_alone(loss_type, ratio, advantage, flows):
    """Equation 10, epsilon 0.2 and epsilon_high 0.28: a better token may grow to 1.28, a worse one shrink to 0.8."""
    logp = torch.tensor([0.1 * ratio], dtype=torch.float64).log().requires_grad_()
    batch = {
        "sampler_logprobs": torch.tensor([0.1], dtype=torch.float64).log(),
        "advantages": torch.tensor([advantage], dtype=torch.float64),
        "sample_index": torch.tensor([0]),
    }
    settings = LossSettings(score_centering=False, loss_type=loss_type, epsilon=0.2, epsilon_high=0.28)
    loss, _ = async_grpo_loss(PolicyOutput(logp, torch.zeros(1), None), batch, settings, 1)
    assert torch.autograd.grad(loss, logp)[0].item() == pytest.approx(-ratio * advantage if flows else 0.0)


def test_overlong_shaping_lowers_the_advantage_of_long_answers_only():
    """Equation 13 with a limit of 100 and a cache of 20: 0 to 80 tokens free, 90 costs a half, 100 and more cost 1."""
    punish = get_soft_overlong_punishment(100, 20)
    ids = [[7] * n for n in (40, 80, 90, 100, 130)]
    punished = punish(completion_ids=ids)
    assert punished == [0.0, 0.0, -0.5, -1.0, -1.0]
    correct = np.array([1.0, 0.0, 1.0, 1.0, 1.0])  # the sum is the reward of the rollout
    advantages = standardised_advantages(correct + np.array(punished))
    values = [1.0, 0.0, 0.5, 0.0, 0.0]
    mean = sum(values) / 5
    std = (sum((v - mean) ** 2 for v in values) / 5) ** 0.5
    np.testing.assert_allclose(advantages, [(v - mean) / (std + 1e-8) for v in values], rtol=1e-12)
    assert advantages[2] < advantages[0] and advantages[3] == advantages[1]


# -- Dr. GRPO, arXiv 2503.20783


def test_the_constant_divisor_is_samples_times_max_completion_length(tmp_path):
    row = pack_row(some_samples(seed=5, count=6), 0)
    constant = settings_of(tmp_path, loss_normalization="constant", max_completion_length=50)
    assert constant.normalizer(row) == 300.0
    assert settings_of(tmp_path).normalizer(row) == len(row["target_ids"])


def test_the_loop_leaves_the_std_out_when_told():
    group = SimpleNamespace(rewards=np.array([0.0, 4.0]))
    for wanted, advantages in ((True, [-1.0, 1.0]), (False, [-2.0, 2.0])):
        loop = SimpleNamespace(config=SimpleNamespace(advantage_std=wanted))
        np.testing.assert_allclose(AsyncRolloutLoop.compute_advantages(loop, group), advantages, rtol=1e-7)
