"""Request bodies and reply decoding of the two generation routes."""

from __future__ import annotations

import json

import numpy as np
import pytest

from asyncgrpo_core.errors import ServerError
from asyncgrpo_core.server.wire import (
    SamplingSettings,
    completions_body,
    parse_completions_reply,
    parse_tokens_reply,
    requested_logprobs,
    tokens_body,
)

SAMPLING = SamplingSettings(max_tokens=7, temperature=0.5, num_logprobs=2, stop_token_ids=(2,))


def entry(token_id: int, logprob: float, rank: int | None = None, **more) -> dict:
    return {"token_id": token_id, "logprob": logprob, "rank": rank, **more}


def tokens_reply(content: list[dict], **choice) -> bytes:
    base = {"index": 0, "finish_reason": "stop", "token_ids": [c["token_id"] for c in content]}
    return json.dumps({"choices": [{**base, "logprobs": {"content": content}, **choice}]}).encode()


def test_token_route_body_asks_for_one_logprob_more_than_the_head() -> None:
    body = json.loads(tokens_body("policy", [5, 6], SAMPLING, 11, "salt-3"))
    assert body["token_ids"] == [5, 6] and body["model"] == "policy" and body["cache_salt"] == "salt-3"
    params = body["sampling_params"]
    assert (params["seed"], params["max_tokens"], params["temperature"]) == (11, 7, 0.5)
    assert params["logprobs"] == 3 and params["stop_token_ids"] == [2]
    assert "min_p" not in params


def test_completions_body_has_token_ids_in_and_out() -> None:
    body = json.loads(completions_body("policy", [5, 6], SAMPLING, 11, None))
    assert body["prompt"] == [5, 6] and body["logprobs"] == 2 and body["return_token_ids"] is True
    assert body["return_tokens_as_token_ids"] is True and "cache_salt" not in body


@pytest.mark.parametrize(
    ("k", "limit", "expected"),
    [(8, None, 9), (20, None, 20), (8, 8, 8), (8, 9, 9), (25, 30, 26), (8, -1, 9), (0, None, 0)],
)
def test_requested_logprobs_never_exceeds_what_the_server_allows(k, limit, expected) -> None:
    assert requested_logprobs(k, limit) == expected


def test_top_k_is_the_most_likely_tokens_whatever_was_sampled() -> None:
    """F199. The same distribution three times, with the sampled token of rank 1, 3 and 40: the same head each time."""
    ranked = [(10, -0.5), (11, -1.0), (12, -1.5)]
    contents = []
    for sampled, logprob, rank in ((10, -0.5, 1), (12, -1.5, 3), (99, -7.0, 40)):
        others = [entry(t, lp, r + 1) for r, (t, lp) in enumerate(ranked) if t != sampled]
        tops = [entry(sampled, logprob, rank), *others][:3]  # vLLM cuts at the requested length
        contents.append(entry(sampled, logprob, rank, top_logprobs=tops))
    turn = parse_tokens_reply(tokens_reply(contents), [1], SAMPLING)
    assert turn.output_ids == [10, 12, 99]
    np.testing.assert_allclose(turn.output_log_probs, [-0.5, -1.5, -7.0])
    top = turn.output_sampler_logprobs
    assert [set(row) for row in top.ids.tolist()] == [{10, 11}] * 3
    for ids, logprobs in zip(top.ids.tolist(), top.logprobs.tolist(), strict=True):
        assert dict(zip(ids, logprobs, strict=True)) == {10: -0.5, 11: -1.0}


def test_head_without_room_for_one_more_drops_the_outsider() -> None:
    """--max-logprobs equal to k: the list holds the sampled token and k - 1 others; the outsider is padding."""
    inside = entry(10, -0.5, 1, top_logprobs=[entry(10, -0.5, 1), entry(11, -1.0, 2)])
    outside = entry(99, -7.0, 40, top_logprobs=[entry(99, -7.0, 40), entry(10, -0.5, 1)])
    top = parse_tokens_reply(tokens_reply([inside, outside]), [1], SAMPLING).output_sampler_logprobs
    assert top.ids.tolist() == [[10, 11], [10, -1]]
    assert top.logprobs[1, 1] == -np.inf


def test_probability_zero_becomes_padding() -> None:
    tops = [entry(10, 0.0, 1), entry(11, -9999.0, 2), entry(12, -9999.0, 3)]
    turn = parse_tokens_reply(tokens_reply([entry(10, 0.0, 1, top_logprobs=tops)]), [1], SAMPLING)
    assert turn.output_sampler_logprobs.ids.tolist() == [[10, -1]]


def test_policy_versions_per_token_across_an_update() -> None:
    content = [entry(i, -1.0, 1, top_logprobs=[entry(i, -1.0, 1)]) for i in (4, 5, 6)]
    spans = [{"version": "7", "start": 0, "end": 1}, {"version": "8", "start": 1, "end": 3}]
    turn = parse_tokens_reply(tokens_reply(content, weight_versions=spans), [1], SAMPLING)
    assert turn.output_versions == [7, 8, 8]


def test_versions_are_unknown_before_the_first_sync() -> None:
    content = [entry(4, -1.0, 1, top_logprobs=[])]
    spans = [{"version": "default", "start": 0, "end": 1}]
    assert parse_tokens_reply(tokens_reply(content, weight_versions=spans), [1], SAMPLING).output_versions is None


def test_candidate_sets_are_kept() -> None:
    content = [entry(4, -1.0, 1, top_logprobs=[])]
    turn = parse_tokens_reply(tokens_reply(content, sampling_mask=[[4, 9]]), [1], SAMPLING)
    assert turn.output_sampling_mask == [[4, 9]]


def test_completions_reply_gives_the_same_head() -> None:
    tops = [
        {"token_id:10": -0.5, "token_id:11": -1.0},
        {"token_id:99": -7.0, "token_id:10": -0.5, "token_id:11": -1.0},
    ]
    logprobs = {"token_logprobs": [-0.5, -7.0], "top_logprobs": tops}
    choice = {"index": 0, "text": "", "token_ids": [10, 99], "logprobs": logprobs, "finish_reason": "length"}
    turn = parse_completions_reply(json.dumps({"choices": [choice]}).encode(), [1], SAMPLING)
    assert turn.output_ids == [10, 99] and turn.finish_reason == "length"
    assert [set(row) for row in turn.output_sampler_logprobs.ids.tolist()] == [{10, 11}] * 2


def test_reply_without_token_ids_is_an_error() -> None:
    choice = {"index": 0, "text": "x", "logprobs": {"token_logprobs": [-0.5], "top_logprobs": None}}
    with pytest.raises(ServerError, match="0 tokens with 1 log-probabilities"):
        parse_completions_reply(json.dumps({"choices": [choice]}).encode(), [1], SAMPLING)


def test_reply_that_is_not_json_is_an_error_that_shows_it() -> None:
    with pytest.raises(ServerError, match="<html>"):
        parse_tokens_reply(b"<html>proxy</html>", [1], SAMPLING)
