"""The reference's two losses, score centering (default) and the clipped surrogate. Pure functions of flat tensors.

At one trained position: p_v the trainer's probability of token v, q_v the sampler's, y the sampled token, A the
advantage, r_v = p_v / q_v, and the masked importance weight w_v = r_v inside [clip_min, clip_max], else 0.

    clipped    l = - min(r_y A, clamp(r_y, 1 - epsilon, 1 + epsilon_high) A)      where r_y is in range, else 0
    centering  l = - A [ w_y log p_y - sum_{v in H} c_v log p_v ]                 w and c carry no gradient

H are the sampler's top tokens. c_v depends on what is assumed of the tokens outside H (`score_centering_tail`):

    head    nothing: the expectation runs over H only,   c_v = q_v w_v
    model   q = rho p there, rho = (1 - sum_H q) / (1 - sum_H p); because sum_v p_v grad log p_v = 0 the tail folds
            into the head,                               c_v = q_v w_v - alpha p_v,   alpha = rho w(1 / rho)

Under top-k, top-p and min-p both p and q are normalised over the token's candidate set, and "outside H" means the rest
of the set. Where the sampler reported the whole set (with num_sampler_logprobs >= top_k) nothing is left outside: the
expectation is exact and both choices are c_v = q_v w_v.

`loss_type` chooses another loss in their place: offpolicy/.

Score centering: Marek and Ryabinin, arXiv 2609.20807. `model` is the default because on-policy (p = q) it vanishes,
while `head` leaves a spurious gradient.

The loss is the sum over trained tokens, masked ones included, divided by `normalizer`: the number of trained tokens
of the micro-batch over all ranks. Ranks' losses therefore *add up* to the micro-batch's loss; under a wrapper that
averages gradients over ranks (DDP, FSDP) multiply by the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from asyncgrpo_core.errors import ConfigError
from asyncgrpo_core.models.forward import PolicyOutput
from asyncgrpo_core.training.loss_sums import LossSums
from asyncgrpo_core.training.offpolicy import LOSS_TYPES, OFF_POLICY_LOSSES, REFERENCE_LOSS, TokenLoss, TrainedTokens
from asyncgrpo_core.training.offpolicy.normalisation import dr_grpo_normalizer, num_trained_samples
from asyncgrpo_core.training.offpolicy.tokens import clipped_surrogate, masked_exp

# Both tail masses are floored here before they are divided (loss.md): a head that covers everything has no tail.
TAIL_FLOOR = 1e-6


@dataclass(frozen=True)
class LossSettings:
    """What the loss reads from the config; names are the config's.

    Raises:
        ConfigError: bounds that exclude each other, a negative epsilon, or an unknown tail.
    """

    score_centering: bool = True
    score_centering_tail: Literal["model", "head"] = "model"
    epsilon: float = 0.2
    epsilon_high: float | None = None  # None means epsilon
    clip_min: float = 0.5  # vllm_importance_sampling_clip_min
    clip_max: float = 5.0  # vllm_importance_sampling_clip_max
    loss_type: str = REFERENCE_LOSS
    importance_ratio_cap: float | None = 2.0  # None means no cap
    loss_normalization: Literal["tokens", "constant"] = "tokens"
    budget: int = 2048  # max_completion_length; read by loss_normalization="constant"

    def __post_init__(self) -> None:
        self._check_loss_type()
        if self.score_centering_tail not in ("model", "head"):
            raise ConfigError(
                f"score_centering_tail={self.score_centering_tail!r} is unknown.", "Set it to 'model' or 'head'."
            )
        if not 0 <= self.clip_min < self.clip_max:
            raise ConfigError(
                f"vllm_importance_sampling_clip_min={self.clip_min} and "
                f"vllm_importance_sampling_clip_max={self.clip_max} leave no ratio to train on.",
                "They need 0 <= min < max (defaults 0.5 and 5.0).",
            )
        for name, value in (("epsilon", self.epsilon), ("epsilon_high", self.epsilon_upper)):
            if value < 0:
                raise ConfigError(f"{name}={value} is negative.", f"Set {name} to 0 or more (default 0.2).")

    def _check_loss_type(self) -> None:
        if self.loss_type not in LOSS_TYPES:
            raise ConfigError(
                f"loss_type={self.loss_type!r} is unknown.",
                f"Use one of {', '.join(map(repr, LOSS_TYPES))}.",
            )
        if self.loss_type != REFERENCE_LOSS and self.score_centering:
            raise ConfigError(
                f"loss_type={self.loss_type!r} takes the place of score centering, which is on.",
                "Set score_centering=False beside it.",
            )
        if self.importance_ratio_cap is not None and not self.importance_ratio_cap > 0:
            raise ConfigError(
                f"importance_ratio_cap={self.importance_ratio_cap} leaves no weight.",
                "Set it above 0 (default 2.0), or to None for no cap.",
            )

    @property
    def epsilon_upper(self) -> float:
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @classmethod
    def from_config(cls, config: object) -> LossSettings:
        """From an AsyncGRPOConfig."""
        return cls(
            score_centering=config.score_centering,  # type: ignore[attr-defined]
            score_centering_tail=config.score_centering_tail,  # type: ignore[attr-defined]
            epsilon=config.epsilon,  # type: ignore[attr-defined]
            epsilon_high=config.epsilon_high,  # type: ignore[attr-defined]
            clip_min=config.vllm_importance_sampling_clip_min,  # type: ignore[attr-defined]
            clip_max=config.vllm_importance_sampling_clip_max,  # type: ignore[attr-defined]
            loss_type=config.loss_type,  # type: ignore[attr-defined]
            importance_ratio_cap=config.importance_ratio_cap,  # type: ignore[attr-defined]
            loss_normalization=config.loss_normalization,  # type: ignore[attr-defined]
            budget=config.max_completion_length,  # type: ignore[attr-defined]
        )

    def normalizer(self, row: Mapping[str, Tensor]) -> float:
        """What the sum over the tokens of `row` is divided by: trained tokens, or Dr. GRPO's constant.

        Both of the whole micro-batch when the row says (`num_trained`, `num_trained_samples`: over all ranks), else of
        the row alone.
        """
        if self.loss_normalization == "tokens":
            return float(row["num_trained"] if "num_trained" in row else len(row["target_ids"]))
        samples = row["num_trained_samples"] if "num_trained" in row else num_trained_samples(row["sample_index"])
        return dr_grpo_normalizer(int(samples), self.budget)

    def in_range(self, ratio: Tensor) -> Tensor:
        return (ratio >= self.clip_min) & (ratio <= self.clip_max)

    def weight(self, ratio: Tensor) -> Tensor:
        """The masked importance weight of a ratio."""
        return torch.where(self.in_range(ratio), ratio, torch.zeros_like(ratio))


def async_grpo_loss(
    policy: PolicyOutput, batch: Mapping[str, Tensor], settings: LossSettings, normalizer: float | Tensor
) -> tuple[Tensor, LossSums]:
    """The loss of one row and the sums behind its metrics.

    Args:
        policy: of the N trained tokens of the row.
        batch: the row (`packing.PackedRow`): sampler_logprobs, advantages, sample_index, top_ids, top_logprobs
            and, where sampling was restricted, candidate_offsets.
        settings: which loss.
        normalizer: trained tokens of the micro-batch over all ranks, above 0.

    Returns:
        (loss, sums): a scalar with gradient, and detached per-row sums that ranks and micro-batches can add.

    Raises:
        ValueError: normalizer <= 0, or score centering without top log-probabilities.
    """
    if not float(normalizer) > 0:
        raise ValueError(f"normalizer must be the number of trained tokens of the micro-batch, got {normalizer}")
    logp = policy.logprobs
    tokens = TrainedTokens(
        logp, batch["sampler_logprobs"].to(logp.dtype), batch["advantages"].to(logp.dtype), batch["sample_index"]
    )
    sampler_mass = None
    if settings.loss_type != REFERENCE_LOSS:
        outcome = OFF_POLICY_LOSSES[settings.loss_type](tokens, settings)
    elif settings.score_centering:
        outcome, sampler_mass = _score_centering(tokens, policy.top_logprobs, batch, settings)
    else:
        outcome = _clipped(tokens, settings)
    sums = _measure(tokens, outcome, policy.entropy, sampler_mass, settings)
    return outcome.per_token.sum() / normalizer, sums


def _clipped(tokens: TrainedTokens, settings: LossSettings) -> TokenLoss:
    ratio = tokens.log_ratio.detach().exp()
    kept = settings.in_range(ratio)
    surrogate = clipped_surrogate(
        masked_exp(tokens.log_ratio, kept), tokens.advantages, settings.epsilon, settings.epsilon_upper
    )
    return TokenLoss(torch.where(kept, surrogate, torch.zeros_like(surrogate)), kept, ratio)


def _score_centering(
    tokens: TrainedTokens, top_p: Tensor | None, batch: Mapping[str, Tensor], settings: LossSettings
) -> tuple[TokenLoss, Tensor]:
    if top_p is None:
        raise ValueError("score centering needs the sampler's top tokens: pack rows with num_sampler_logprobs > 0")
    valid = batch["top_ids"] >= 0
    top_q = batch["top_logprobs"].to(tokens.logprobs.dtype)
    with_tail: bool | Tensor = settings.score_centering_tail == "model"
    if with_tail and "candidate_offsets" in batch:
        with_tail = valid.sum(dim=-1) != batch["candidate_offsets"].diff()  # False where H is the whole set
    coefficient = centering_coefficients(top_p.detach(), top_q, valid, settings.weight, with_tail=with_tail)
    per_token = _centered(tokens, top_p, valid, coefficient, settings)
    ratio = tokens.log_ratio.detach().exp()
    sampler_mass = torch.where(valid, top_q, -torch.inf).exp().sum(dim=-1)
    return TokenLoss(per_token, settings.in_range(ratio), ratio), sampler_mass


def _centered(
    tokens: TrainedTokens, top_p: Tensor, valid: Tensor, coefficient: Tensor, settings: LossSettings
) -> Tensor:
    weight = settings.weight(tokens.log_ratio.detach().exp())
    # `where`, because a padded entry's log-probability is -inf and 0 * -inf is not 0.
    centre = (coefficient * torch.where(valid, top_p, torch.zeros_like(top_p))).sum(dim=-1)
    return -tokens.advantages * (weight * tokens.logprobs - centre)


@torch.no_grad()
def centering_coefficients(
    top_p: Tensor, top_q: Tensor, valid: Tensor, weight: Callable[[Tensor], Tensor], *, with_tail: bool | Tensor
) -> Tensor:
    """c_v of the module docstring for every token of the head.

    Args:
        top_p, top_q: log-probabilities [N, k] of trainer and sampler.
        valid: bool [N, k], False at padding (its coefficient is 0).
        weight: f(r), elementwise; `LossSettings.weight` in training.
        with_tail: True for `model`, False for `head`; bool [N] to say it for each token.
    """
    p = torch.where(valid, top_p, -torch.inf).exp()
    q = torch.where(valid, top_q, -torch.inf).exp()
    ratio = torch.where(valid, top_p - top_q, torch.zeros_like(top_p)).exp()
    coefficient = q * weight(ratio)
    if with_tail is not False:
        tail_p = (1 - p.sum(dim=-1, keepdim=True)).clamp_min(TAIL_FLOOR)
        tail_q = (1 - q.sum(dim=-1, keepdim=True)).clamp_min(TAIL_FLOOR)
        rho = tail_q / tail_p
        alpha = rho * weight(1 / rho)
        if isinstance(with_tail, Tensor):
            alpha = torch.where(with_tail[:, None], alpha, torch.zeros_like(alpha))
        coefficient = coefficient - alpha * p
    return torch.where(valid, coefficient, torch.zeros_like(coefficient))


@torch.no_grad()
def _measure(
    tokens: TrainedTokens, outcome: TokenLoss, entropy: Tensor, sampler_mass: Tensor | None, settings: LossSettings
) -> LossSums:
    """The reference's sampling/*, clip_ratio/* and entropy of this row, as sums.

    Ratios are taken before masking. clip_ratio/* count tokens outside the trust region; with score centering and the
    losses that only weigh or mask nothing is clipped, and they count by the same rule.
    """
    log_ratio = tokens.log_ratio
    ratio, difference = log_ratio.exp(), log_ratio.abs()
    low = (outcome.trust_ratio < 1 - settings.epsilon) & (tokens.advantages < 0)
    high = (outcome.trust_ratio > 1 + settings.epsilon_upper) & (tokens.advantages > 0)
    sums = LossSums()
    sums.add_mean("sampling/sampling_logp_difference/mean", difference)
    sums.add_max("sampling/sampling_logp_difference/max", difference)
    sums.add_min("sampling/importance_sampling_ratio/min", ratio)
    sums.add_mean("sampling/importance_sampling_ratio/mean", ratio)
    sums.add_max("sampling/importance_sampling_ratio/max", ratio)
    sums.add_mean("sampling/masked_mean", ~outcome.kept)
    if sampler_mass is not None:
        sums.add_mean("sampling/sampler_mass", sampler_mass)
    if outcome.truncated is not None:
        sums.add_mean("sampling/truncated_mean", outcome.truncated)
    if outcome.sequence_log_ratio is not None:
        sums.add_min("sampling/sequence_log_ratio/min", outcome.sequence_log_ratio)
        sums.add_mean("sampling/sequence_log_ratio/mean", outcome.sequence_log_ratio)
        sums.add_max("sampling/sequence_log_ratio/max", outcome.sequence_log_ratio)
    sums.add_mean("entropy", entropy)
    sums.add_mean("clip_ratio/region_mean", low | high)
    sums.add_mean("clip_ratio/low_mean", low)
    # Neutral in the reduction where there is no sample.
    sums.add_min("clip_ratio/low_min", _fraction_per_sample(low, tokens.sample_index, torch.inf))
    sums.add_mean("clip_ratio/high_mean", high)
    sums.add_max("clip_ratio/high_max", _fraction_per_sample(high, tokens.sample_index, -torch.inf))
    return sums


def _fraction_per_sample(flag: Tensor, sample_index: Tensor, no_sample: float) -> Tensor:
    """[N]: once for each sample the share of its trained tokens that are flagged, and `no_sample` elsewhere.

    How many samples those are is on the device, and nothing here waits for it.
    """
    place = torch.searchsorted(sample_index.sort().values, sample_index)  # below N, the same for a sample's tokens
    count = torch.zeros(len(flag), dtype=torch.float32, device=flag.device)
    count.index_add_(0, place, torch.ones_like(count))
    flagged = torch.zeros_like(count).index_add_(0, place, flag.float())
    return torch.where(count > 0, flagged / count, no_sample)
