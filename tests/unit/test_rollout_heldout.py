"""evaluate_heldout against the stand-in server."""

from __future__ import annotations

import pytest

from asyncgrpo_core.errors import DataError, RewardError
from asyncgrpo_core.rollout.heldout import evaluate_heldout
from asyncgrpo_core.server.generation import SamplingSettings
from tests.unit.fakes import FakeTokenizer, ThreadedFakeVLLM
from tests.unit.rollout_run import ROWS

SAMPLING = SamplingSettings(max_tokens=16, temperature=0.9, stop_token_ids=(2,))


def by_answer(completions, answer, **_):
    return [None if a == 0 else float(a) for a in answer]


def evaluate(server, rows=ROWS, reward=by_answer, **more):
    return evaluate_heldout(
        base_url=server.base_url,
        model_name="policy",
        tokenizer=FakeTokenizer(),
        rows=rows,
        reward_funcs=[reward],
        sampling=SAMPLING,
        seed=1,
        **more,
    )


def test_mean_over_the_scored_prompts_and_one_record_each() -> None:
    with ThreadedFakeVLLM() as server:
        result = evaluate(server)
    assert result.n == 5 and result.mean_reward == pytest.approx((1 + 2 + 3 + 4 + 5) / 5)
    assert [r["row"] for r in result.records] == list(range(6))
    first, last = result.records[0], result.records[-1]
    assert first["reward"] is None and last["reward"] == 5.0 and last["rewards"] == {"by_answer": 5.0}
    assert last["prompt"] == ROWS[-1]["prompt"] and last["answer"] == 5 and last["completion"]
    body = server.fake.requests[0][1]
    assert body["sampling_params"]["temperature"] == 0.9


def test_one_seed_samples_alike_and_prompts_have_their_own() -> None:
    with ThreadedFakeVLLM() as server:
        once, again = evaluate(server), evaluate(server)
        other = evaluate(server, rows=ROWS, cache_salt="x")
    seeds = [body["sampling_params"]["seed"] for _, body in server.fake.requests[:6]]
    assert len(set(seeds)) == 6
    assert once.records == again.records == other.records
    assert server.fake.requests[-1][1]["cache_salt"] == "x"


def test_no_more_in_flight_than_asked_and_more_rows_than_a_scoring_chunk() -> None:
    rows = [{"prompt": [{"role": "user", "content": f"q{i}"}], "answer": 1} for i in range(150)]
    with ThreadedFakeVLLM(delay_s=0.002) as server:
        result = evaluate(server, rows=rows, max_in_flight=5)
    assert server.fake.max_in_flight == 5 and result.n == 150 and result.records[149]["row"] == 149


def test_errors_are_the_rollout_sides() -> None:
    with ThreadedFakeVLLM() as server:
        with pytest.raises(RewardError, match="1 rewards for 6"):
            evaluate(server, reward=lambda completions, **_: [0.0])
        with pytest.raises(DataError, match="row 0"):
            evaluate(server, rows=[{"prompt": "text", "answer": 1}])
