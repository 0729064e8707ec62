"""How a turn is sampled: the config's settings, and what a prompt's length leaves of them. Pure functions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asyncgrpo_core.server.generation import RequestRejectedError, SamplingSettings


class ConversationTooLongError(RequestRejectedError):
    """A turn's prompt plus max_completion_length does not fit the server's max_model_len."""


def sampling_settings(config: Any, eos_token_ids: list[int], *, candidate_sets: bool = False) -> SamplingSettings:
    """The config's sampling settings. Top log-probabilities are asked for only when score centering needs them.

    Args:
        candidate_sets: the servers return the set that each token was drawn from (top_k, top_p, min_p).
    """
    return SamplingSettings(
        max_tokens=config.max_completion_length,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        repetition_penalty=getattr(config, "repetition_penalty", 1.0),
        num_logprobs=config.num_sampler_logprobs if config.score_centering else 0,
        stop_token_ids=tuple(eos_token_ids),
        candidate_sets=candidate_sets,
    )


def fitted(sampling: SamplingSettings, prompt_len: int, max_model_len: int | None) -> SamplingSettings:
    """The sampling settings of a prompt of `prompt_len` tokens.

    /inference/v1/generate does not refuse a request that cannot finish, it cuts the reply short; so the check that
    /v1/completions makes is made here for both. Under top_k / top_p the turn may end at max_model_len (reference,
    'Configuring the vLLM server').

    Raises:
        ConversationTooLongError: the reply may not fit (under top_k / top_p: there is no room for any reply).
    """
    if max_model_len is None or prompt_len + sampling.max_tokens <= max_model_len:
        return sampling
    if (sampling.top_k > 0 or sampling.top_p < 1.0) and prompt_len < max_model_len:
        return replace(sampling, max_tokens=max_model_len - prompt_len)
    raise ConversationTooLongError(
        f"A prompt of {prompt_len} tokens plus max_completion_length={sampling.max_tokens} is longer than the "
        f"server's max_model_len={max_model_len}.",
        "Lower max_completion_length, shorten the prompt or restart the server with a larger --max-model-len.",
    )
