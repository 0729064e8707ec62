"""Request bodies and reply decoding of the two generation routes."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncgrpo_core.errors import ServerError
from asyncgrpo_core.server.wire import (
    SamplingSettings,
    completions_body,
    parse_completions_reply,
    parse_tokens_reply,
    requested_logprobs,
    tokens_body,
)
from benchmarks.rollout_replies import recording

ONLY_SAMPLED = SamplingSettings(max_tokens=7)
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
    content = [entry(4, -1.0, 1, top_logprobs=[{"token_id": 4, "logprob": -1.0}])]
    spans = [{"version": "default", "start": 0, "end": 1}]
    assert parse_tokens_reply(tokens_reply(content, weight_versions=spans), [1], SAMPLING).output_versions is None


def test_f133_candidate_sets_are_kept() -> None:
    content = [entry(i, -1.0, 1, top_logprobs=[entry(i, -1.0, 1)]) for i in (4, 5)]
    for sampling in (SAMPLING, replace(SAMPLING, candidate_sets=True)):
        turn = parse_tokens_reply(tokens_reply(content, sampling_mask=[[4, 9], [2, 5, 6]]), [1], sampling)
        assert turn.output_sampling_mask.tolist() == [[4, 9], [2, 5, 6]]
    assert parse_tokens_reply(tokens_reply(content), [1], SAMPLING).output_sampling_mask is None


@pytest.mark.parametrize(("sets", "word"), [(None, "with no candidate sets"), ([[4]], "with 1 candidate sets")])
def test_f135_a_reply_without_the_candidate_sets_that_its_server_returns_is_refused(sets, word) -> None:
    content = [entry(i, -1.0, 1, top_logprobs=[entry(i, -1.0, 1)]) for i in (4, 5)]
    with pytest.raises(ServerError, match=word) as error:
        parse_tokens_reply(tokens_reply(content, sampling_mask=sets), [1], replace(SAMPLING, candidate_sets=True))
    assert "--return-sampling-mask --enable-scale-out" in str(error.value)


def test_a_reply_of_no_tokens_needs_no_candidate_sets() -> None:
    turn = parse_tokens_reply(tokens_reply([]), [1], replace(SAMPLING, candidate_sets=True))
    assert turn.output_ids == [] and turn.output_sampling_mask is None


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


def test_without_a_head_only_the_sampled_logprobs_are_read() -> None:
    """F199. What the server lists besides is passed over, however it looks."""
    content = [
        entry(4, -1.5, 1, top_logprobs=[entry(4, -1.5, 1)]),
        entry(9, -2.0, None, top_logprobs=[{"token": "x", "logprob": None}]),
    ]
    spans = [{"version": "3", "start": 0, "end": 2}]
    turn = parse_tokens_reply(tokens_reply(content, weight_versions=spans), [1], ONLY_SAMPLED)
    assert (turn.output_ids, turn.output_log_probs, turn.output_versions) == ([4, 9], [-1.5, -2.0], [3, 3])
    assert turn.output_sampler_logprobs is None


@pytest.mark.parametrize("bad", [None, "-1.0", [1.0]])
def test_a_logprob_that_is_no_number_is_an_error_with_and_without_a_head(bad) -> None:
    payload = tokens_reply([{**entry(4, -1.0, 1), "logprob": bad, "top_logprobs": []}])
    for sampling in (SAMPLING, ONLY_SAMPLED):
        with pytest.raises(ServerError, match="not a generation reply"):
            parse_tokens_reply(payload, [1], sampling)


def test_nan_in_a_reply_is_an_error() -> None:
    payload = tokens_reply([entry(4, float("nan"), 1, top_logprobs=[])])
    assert b"NaN" in payload
    with pytest.raises(ServerError):
        parse_tokens_reply(payload, [1], ONLY_SAMPLED)


def completion_oracle(output_ids: list[int], rows: list[dict[str, float]], k: int) -> list[dict[int, float]]:
    """Token by token: the k most likely without a sampled token that is not one of them."""
    out = []
    for sampled, row in zip(output_ids, rows, strict=True):
        pairs = {int(name.removeprefix("token_id:")): value for name, value in row.items()}
        if len(pairs) > k:
            pairs.pop(sampled)
        out.append(dict(list(pairs.items())[:k]))
    return out


@given(st.data(), st.integers(1, 5))
def test_completions_head_equals_a_token_by_token_reading(data, k) -> None:
    """F199. Rows of any length up to k, or k + 1 with the sampled token first, as the server builds them."""
    rows, output_ids = [], []
    for _ in range(data.draw(st.integers(0, 6))):
        size = data.draw(st.integers(1, k + 1))
        ids = data.draw(st.lists(st.integers(0, 200_000), min_size=size, max_size=size, unique=True))
        output_ids.append(ids[0])
        rows.append({f"token_id:{i}": -0.25 * (place + 1) for place, i in enumerate(ids)})
    logprobs = {"token_logprobs": [-1.0] * len(rows), "top_logprobs": rows}
    choice = {"index": 0, "text": "", "token_ids": output_ids, "logprobs": logprobs, "finish_reason": "stop"}
    settings = SamplingSettings(max_tokens=7, num_logprobs=k)
    top = parse_completions_reply(json.dumps({"choices": [choice]}).encode(), [1], settings).output_sampler_logprobs
    assert top.ids.shape == (len(rows), k)
    found = [
        {i: lp for i, lp in zip(ids, lps, strict=True) if i >= 0}
        for ids, lps in zip(top.ids.tolist(), top.logprobs.tolist(), strict=True)
    ]
    assert found == completion_oracle(output_ids, rows, k)


def test_completions_reply_that_names_tokens_by_text_is_an_error() -> None:
    logprobs = {"token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5, "b": -1.0}]}
    choice = {"index": 0, "text": "", "token_ids": [10], "logprobs": logprobs, "finish_reason": "stop"}
    with pytest.raises(ServerError, match="token_id:NUMBER"):
        parse_completions_reply(json.dumps({"choices": [choice]}).encode(), [1], SAMPLING)


@pytest.mark.parametrize("k", [0, 8])
def test_both_routes_of_a_real_server_give_the_same_turn(k) -> None:
    """F199. Replies recorded from vLLM, same seeds on both routes; json.loads is the oracle of the sampled tokens."""
    settings = SamplingSettings(max_tokens=128, num_logprobs=k)
    forms = recording()["forms"]
    for of_tokens, of_completions in zip(forms[f"tokens-{k}"], forms[f"completions-{k}"], strict=True):
        one = parse_tokens_reply(of_tokens.encode(), [1], settings)
        two = parse_completions_reply(of_completions.encode(), [1], settings)
        content = json.loads(of_tokens)["choices"][0]["logprobs"]["content"]
        assert one.output_ids == two.output_ids == [token["token_id"] for token in content]
        assert one.output_log_probs == two.output_log_probs == [token["logprob"] for token in content]
        if k:
            heads = [
                [dict(zip(ids, lps, strict=True)) for ids, lps in zip(t.ids.tolist(), t.logprobs.tolist(), strict=True)]
                for t in (one.output_sampler_logprobs, two.output_sampler_logprobs)
            ]
            assert heads[0] == heads[1] and len(heads[0]) == 128 and all(len(head) == k for head in heads[0])


def test_reply_without_token_ids_is_an_error() -> None:
    choice = {"index": 0, "text": "x", "logprobs": {"token_logprobs": [-0.5], "top_logprobs": None}}
    with pytest.raises(ServerError, match="0 tokens with 1 log-probabilities"):
        parse_completions_reply(json.dumps({"choices": [choice]}).encode(), [1], SAMPLING)


def test_reply_that_is_not_json_is_an_error_that_shows_it() -> None:
    with pytest.raises(ServerError, match="<html>"):
        parse_tokens_reply(b"<html>proxy</html>", [1], SAMPLING)


@pytest.mark.parametrize("route", ["tokens", "completions"])
def test_no_most_likely_token_at_a_position_is_refused(route) -> None:
    """Fewer than k is a small vocabulary; none means that the server was asked in vain."""
    if route == "tokens":
        content = [
            entry(4, -1.0, 1, top_logprobs=[{"token_id": 4, "logprob": -1.0}]),
            entry(5, -1.0, 1, top_logprobs=[]),
        ]
        with pytest.raises(ServerError, match="none of the most likely tokens at position 1"):
            parse_tokens_reply(tokens_reply(content), [1], SAMPLING)
    else:
        logprobs = {"token_logprobs": [-0.5, -7.0], "top_logprobs": [{"token_id:10": -0.5}, {}]}
        choice = {"index": 0, "text": "", "token_ids": [10, 99], "logprobs": logprobs, "finish_reason": "length"}
        with pytest.raises(ServerError, match="none of the most likely tokens at position 1"):
            parse_completions_reply(json.dumps({"choices": [choice]}).encode(), [1], SAMPLING)
