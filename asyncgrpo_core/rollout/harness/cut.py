"""A turn cut where its request asked for an end: at a stop string, after max_tokens.

The policy is sampled to its own end and the turn keeps the tokens up to the cut. That is the same distribution as if
the server had stopped there, so the log-probabilities of what is kept hold; what comes after the cut was never seen by
the harness and is not trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from asyncgrpo_core.types import TopLogprobs, TurnRecord


def cut_turn(
    turn: TurnRecord, stop: Sequence[str], max_tokens: int | None, decode: Callable[[list[int]], str]
) -> TurnRecord:
    """The turn up to the token that completes the first stop string, and at most `max_tokens` tokens of it.

    `finish_reason` becomes "stop" or "length" with the cut that applies.
    """
    if max_tokens is not None and len(turn.output_ids) > max_tokens:
        turn = _first_tokens(turn, max_tokens, "length")
    if stop and _holds(decode(turn.output_ids), stop):
        turn = _first_tokens(turn, _tokens_until(turn.output_ids, stop, decode), "stop")
    return turn


def before_stop(text: str, stop: Sequence[str]) -> str:
    """Text up to the first stop string: what the harness gets to see."""
    return text[: min((at for s in stop if (at := text.find(s)) >= 0), default=len(text))]


def _holds(text: str, stop: Sequence[str]) -> bool:
    return any(s in text for s in stop)


def _tokens_until(ids: list[int], stop: Sequence[str], decode: Callable[[list[int]], str]) -> int:
    """The smallest number of tokens whose text holds a stop string; all of them together do."""
    low, high = 1, len(ids)
    while low < high:
        middle = (low + high) // 2
        if _holds(decode(ids[:middle]), stop):
            high = middle
        else:
            low = middle + 1
    return low


def _first_tokens(turn: TurnRecord, n: int, finish_reason: str) -> TurnRecord:
    top = turn.output_sampler_logprobs
    if top is not None:
        top = TopLogprobs(top.ids[:n], top.logprobs[:n]) if isinstance(top, TopLogprobs) else top[:n]
    return replace(
        turn,
        output_ids=turn.output_ids[:n],
        output_log_probs=turn.output_log_probs[:n],
        output_mask=None if turn.output_mask is None else turn.output_mask[:n],
        output_sampling_mask=None if turn.output_sampling_mask is None else turn.output_sampling_mask[:n],
        output_sampler_logprobs=top,
        output_versions=None if turn.output_versions is None else turn.output_versions[:n],
        finish_reason=finish_reason,
    )
