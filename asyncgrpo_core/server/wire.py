"""Request and reply bodies of the two generation routes (vLLM 0.26 to 0.33).

Replies carry about 600 bytes of JSON per token when log-probabilities are on, so decoding them is most of the
rollout worker's CPU time: typed decoding (msgspec) is 4 times as fast as `json.loads`, and everything after it is
flat numpy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
import numpy as np

from asyncgrpo_core.errors import ServerError
from asyncgrpo_core.types import CandidateSets, TopLogprobs, TurnRecord

# vLLM's default of --max-logprobs; the extra log-probability below is only asked for when it surely fits.
_DEFAULT_MAX_LOGPROBS = 20
# JSON has no -inf: vLLM sends this number for a token of probability zero.
_MINUS_INF = -9999.0


@dataclass(frozen=True)
class SamplingSettings:
    """How every request of a run samples (reference, `generate_one_turn`).

    `num_logprobs` is the number of most likely tokens whose log-probabilities come back with every sampled token
    (0: only the sampled token's own). `top_k` 0 and `min_p` None are off. `repetition_penalty` stays 1.0: no config
    field of the reference sets it, a config subclass may carry a field of that name. `candidate_sets`: every server
    of the run returns the candidate set of each token, so that a reply without them is an error.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    num_logprobs: int = 0
    stop_token_ids: tuple[int, ...] = ()
    candidate_sets: bool = False


def requested_logprobs(num_logprobs: int, max_logprobs: int | None) -> int:
    """How many top log-probabilities to ask for so that the k most likely tokens come back.

    /inference/v1/generate lists the sampled token first and cuts the list at the requested length: a sampled token
    outside the k most likely would push the k-th out, and the set that score centering sums over would depend on the
    sampled token. One more is asked for when the server allows it (`max_logprobs`, None = unknown).
    """
    if num_logprobs == 0:
        return 0
    limit = _DEFAULT_MAX_LOGPROBS if max_logprobs is None else max_logprobs
    # -1 is vLLM's word for "the whole vocabulary"
    return num_logprobs + 1 if limit == -1 or num_logprobs < limit else num_logprobs


def _sampling(sampling: SamplingSettings, seed: int | None) -> dict:
    body = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": sampling.stop_token_ids,
    }
    if sampling.min_p is not None:
        body["min_p"] = sampling.min_p
    if seed is not None:
        body["seed"] = seed
    return body


def tokens_body(
    model: str,
    prompt_ids: list[int],
    sampling: SamplingSettings,
    seed: int | None,
    cache_salt: str | None,
    *,
    max_logprobs: int | None = None,
) -> bytes:
    """Body of POST /inference/v1/generate."""
    params = _sampling(sampling, seed)
    params["logprobs"] = requested_logprobs(sampling.num_logprobs, max_logprobs)
    params["detokenize"] = False  # we decode ourselves; saves the server's CPU
    body: dict = {"model": model, "token_ids": prompt_ids, "sampling_params": params}
    if cache_salt is not None:
        body["cache_salt"] = cache_salt
    return msgspec.json.encode(body)


def completions_body(
    model: str,
    prompt_ids: list[int],
    sampling: SamplingSettings,
    seed: int | None,
    cache_salt: str | None,
    *,
    max_logprobs: int | None = None,
) -> bytes:
    """Body of POST /v1/completions with the prompt and the reply as token ids."""
    del max_logprobs  # this route adds the sampled token to the k most likely, nothing is pushed out
    body = _sampling(sampling, seed)
    body |= {
        "model": model,
        "prompt": prompt_ids,
        "logprobs": sampling.num_logprobs,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "add_special_tokens": False,
        "skip_special_tokens": False,
    }
    if cache_salt is not None:
        body["cache_salt"] = cache_salt
    return msgspec.json.encode(body)


class _Top(msgspec.Struct, gc=False):
    token_id: int
    logprob: float


class _Token(msgspec.Struct, gc=False):
    logprob: float
    rank: int | None = None
    top_logprobs: list[_Top] = []


class _Sampled(msgspec.Struct, gc=False):
    """`_Token` when nothing but the sampled token's log-probability is wanted: the lists are passed over."""

    logprob: float


class _Span(msgspec.Struct, gc=False):
    version: str
    start: int
    end: int


_Entry = TypeVar("_Entry", _Token, _Sampled)


class _TokenLogprobs(msgspec.Struct, Generic[_Entry], gc=False):
    content: list[_Entry] | None = None


class _TokensChoice(msgspec.Struct, Generic[_Entry]):
    token_ids: list[int] | None = None
    logprobs: _TokenLogprobs[_Entry] | None = None
    finish_reason: str | None = None
    sampling_mask: list[list[int]] | None = None
    weight_versions: list[_Span] | None = None


class _TokensReply(msgspec.Struct, Generic[_Entry]):
    choices: list[_TokensChoice[_Entry]]


class _CompletionLogprobs(msgspec.Struct, gc=False):
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class _CompletionChoice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _CompletionLogprobs | None = None
    finish_reason: str | None = None


class _CompletionReply(msgspec.Struct):
    choices: list[_CompletionChoice]


_tokens_decoder = msgspec.json.Decoder(_TokensReply[_Token])
_sampled_decoder = msgspec.json.Decoder(_TokensReply[_Sampled])
_completions_decoder = msgspec.json.Decoder(_CompletionReply)


def parse_tokens_reply(payload: bytes, prompt_ids: list[int], sampling: SamplingSettings) -> TurnRecord:
    """Reply of /inference/v1/generate -> TurnRecord. Raises ServerError when it lacks what was asked for."""
    k = sampling.num_logprobs
    choice = _first_choice(_tokens_decoder if k else _sampled_decoder, payload)
    output_ids = choice.token_ids or []
    content = (choice.logprobs.content if choice.logprobs else None) or []
    _check_counts(len(output_ids), len(content))
    top = _top_of_tokens(content, k) if k else None
    candidates = _candidate_sets(choice.sampling_mask, len(output_ids), sampling.candidate_sets)
    return TurnRecord(
        prompt_ids=prompt_ids,
        output_ids=output_ids,
        output_log_probs=[token.logprob for token in content],
        output_sampling_mask=candidates,
        output_sampler_logprobs=top,
        output_versions=_versions(choice.weight_versions, len(output_ids)),
        finish_reason=choice.finish_reason,
    )


def parse_completions_reply(payload: bytes, prompt_ids: list[int], sampling: SamplingSettings) -> TurnRecord:
    """Reply of /v1/completions -> TurnRecord. Raises ServerError when it lacks what was asked for.

    This route never returns candidate sets.
    """
    choice = _first_choice(_completions_decoder, payload)
    output_ids = choice.token_ids or []
    logprobs = choice.logprobs or _CompletionLogprobs()
    _check_counts(len(output_ids), len(logprobs.token_logprobs))
    log_probs = [_MINUS_INF if value is None else value for value in logprobs.token_logprobs]
    top = None
    if sampling.num_logprobs:
        top = _top_of_completion(output_ids, log_probs, logprobs.top_logprobs or [], sampling.num_logprobs)
    return TurnRecord(
        prompt_ids=prompt_ids,
        output_ids=output_ids,
        output_log_probs=log_probs,
        output_sampler_logprobs=top,
        finish_reason=choice.finish_reason,
    )


def _first_choice(decoder, payload: bytes):
    try:
        return decoder.decode(payload).choices[0]
    except (msgspec.MsgspecError, IndexError) as error:
        text = payload[:300].decode("utf-8", "replace")
        raise ServerError(
            f"The server's reply is not a generation reply ({error}): {text!r}.",
            "Use a vLLM server, version 0.26 to 0.33.",
        ) from error


def _check_counts(num_tokens: int, num_logprobs: int) -> None:
    if num_tokens != num_logprobs:
        raise ServerError(
            f"The server returned {num_tokens} tokens with {num_logprobs} log-probabilities.",
            "Use a vLLM server, version 0.26 to 0.33, that returns token ids and log-probabilities.",
        )


def _candidate_sets(rows: list[list[int]] | None, num_tokens: int, wanted: bool) -> CandidateSets | None:
    if rows is None and (num_tokens == 0 or not wanted):
        return None
    if rows is None or len(rows) != num_tokens:
        raise ServerError(
            f"The server returned {num_tokens} tokens with {'no' if rows is None else len(rows)} candidate sets "
            "(sampling_mask), over which the trainer has to normalise under top_k, top_p and min_p.",
            "Start the vLLM server (0.28 or later) with --return-sampling-mask --enable-scale-out.",
        )
    return CandidateSets.from_lists(rows)


def _check_top_counts(counts: list[int]) -> None:
    """A position may list fewer than k (a small vocabulary), never none."""
    if 0 in counts:
        raise ServerError(
            f"The server sent none of the most likely tokens at position {counts.index(0)} of a reply, which score "
            "centering needs.",
            "Raise the server's --max-logprobs, or set score_centering=False.",
        )


def _versions(spans: list[_Span] | None, num_tokens: int) -> list[int] | None:
    """The policy version of every output token, None where the label is not one of ours (before the first sync)."""
    if not spans or not all(span.version.isdigit() for span in spans):
        return None
    versions: list[int] = []
    for span in spans:
        versions += [int(span.version)] * (span.end - span.start)
    return versions if len(versions) == num_tokens else None


def _top_of_tokens(content: list[_Token], k: int) -> TopLogprobs:
    """The k most likely tokens at each position: [T, k] ids and log-probabilities.

    Every list has the sampled token first and the others by rank. Rows with k + 1 entries lose the sampled token
    when its rank is above k, else the last one; rows with k entries lose the sampled token when its rank is above k.
    """
    num_tokens = len(content)
    flat = [entry for token in content for entry in token.top_logprobs]
    rank_list = [token.rank for token in content]
    # no list is longer than the k + 1 that were asked for, so the total says whether all of them are full
    if len(flat) != num_tokens * (k + 1) or None in rank_list:
        return _top_of_ragged(content, k)
    ids = np.array([entry.token_id for entry in flat], dtype=np.int32).reshape(num_tokens, k + 1)
    logprobs = np.array([entry.logprob for entry in flat], dtype=np.float32).reshape(num_tokens, k + 1)
    ranks = np.array(rank_list, dtype=np.int32)
    keep = np.ones((num_tokens, k + 1), dtype=bool)
    keep[np.arange(num_tokens), np.where(ranks > k, 0, k)] = False
    return _masked(ids[keep].reshape(num_tokens, k), logprobs[keep].reshape(num_tokens, k))


def _top_of_ragged(content: list[_Token], k: int) -> TopLogprobs:
    _check_top_counts([len(token.top_logprobs) for token in content])
    ids = np.full((len(content), k), -1, dtype=np.int32)
    logprobs = np.full((len(content), k), -np.inf, dtype=np.float32)
    for row, token in enumerate(content):
        entries = token.top_logprobs
        if token.rank is None or token.rank > k:
            entries = entries[1:]
        entries = entries[:k]
        ids[row, : len(entries)] = [entry.token_id for entry in entries]
        logprobs[row, : len(entries)] = [entry.logprob for entry in entries]
    return _masked(ids, logprobs)


def _top_of_completion(
    output_ids: list[int], log_probs: list[float], rows: list[dict[str, float] | None], k: int
) -> TopLogprobs:
    """[T, k] from {"token_id:17": -0.3, ...}: the k most likely, plus the sampled token when it is not one of them."""
    _check_counts(len(output_ids), len(rows))
    entries = [row or {} for row in rows]
    counts = np.array([len(row) for row in entries], dtype=np.int64)
    _check_top_counts(counts.tolist())
    names = "".join(name for row in entries for name in row).split("token_id:")[1:]
    if len(names) != counts.sum():
        raise ServerError(
            "The server names its most likely tokens by text, not as token_id:NUMBER.",
            "Use a vLLM server, version 0.26 to 0.33.",
        )
    flat_ids = np.array(list(map(int, names)), dtype=np.int32)
    flat_logprobs = np.array([value for row in entries for value in row.values()], dtype=np.float32)
    row_of = np.repeat(np.arange(len(rows)), counts)
    kept = (counts[row_of] <= k) | (flat_ids != np.array(output_ids, dtype=np.int32)[row_of])
    flat_ids, flat_logprobs, row_of = flat_ids[kept], flat_logprobs[kept], row_of[kept]
    column = np.arange(len(row_of)) - np.searchsorted(row_of, row_of)
    inside = column < k
    ids = np.full((len(rows), k), -1, dtype=np.int32)
    logprobs = np.full((len(rows), k), -np.inf, dtype=np.float32)
    ids[row_of[inside], column[inside]] = flat_ids[inside]
    logprobs[row_of[inside], column[inside]] = flat_logprobs[inside]
    return _masked(ids, logprobs)


def _masked(ids: np.ndarray, logprobs: np.ndarray) -> TopLogprobs:
    """Entries of probability zero are padding: id -1, log-probability -inf."""
    zero = logprobs <= _MINUS_INF
    if zero.any():
        ids = np.where(zero, np.int32(-1), ids)
        logprobs = np.where(zero, np.float32(-np.inf), logprobs)
    return TopLogprobs(ids, logprobs)
