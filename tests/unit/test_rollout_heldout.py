"""evaluate_heldout against the stand-in server."""

from __future__ import annotations

import pytest

from asyncgrpo_core.errors import DataError, RewardError
from asyncgrpo_core.rollout.heldout import evaluate_heldout
from tests.unit.agent_parts import CounterEnv, add, agent_tokenizer, call_text, scripted
from tests.unit.fakes import EOS_ID, FakeTokenizer, ThreadedFakeVLLM
from tests.unit.rollout_run import ROWS, config_of


def by_answer(completions, answer, **_):
    return [None if a == 0 else float(a) for a in answer]


def evaluate(server, rows=ROWS, reward=by_answer, *, max_in_flight=64, config=None, seed=1, **more):
    settings = {"processing_class": FakeTokenizer(), "eos_token_ids": [EOS_ID], **more}
    return evaluate_heldout(
        config=config_of(server, temperature=0.9, **(config or {})),
        model_name="policy",
        rows=rows,
        reward_funcs=[reward] if reward else [],
        seed=seed,
        max_in_flight=max_in_flight,
        **settings,
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
    assert body["sampling_params"]["temperature"] == 0.9 and body["sampling_params"]["logprobs"] == 0


def test_one_seed_samples_alike_and_prompts_have_their_own() -> None:
    """And no two evaluations share keys and values in the server's cache: the policy has changed in between."""
    with ThreadedFakeVLLM() as server:
        once, again, other = evaluate(server), evaluate(server), evaluate(server, seed=2)
    seeds = [body["sampling_params"]["seed"] for _, body in server.fake.requests[:6]]
    assert len(set(seeds)) == 6
    assert once.records == again.records != other.records
    assert len({body["cache_salt"] for _, body in server.fake.requests}) == 3


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


def agent_settings() -> dict:
    tokenizer = agent_tokenizer()
    return {"processing_class": tokenizer, "eos_token_ids": [tokenizer.eos_token_id]}


def threaded(script) -> ThreadedFakeVLLM:
    fake = scripted(script)
    return ThreadedFakeVLLM(sample=fake.sample, vocab=fake.vocab, eos_id=fake.eos_id, max_model_len=4096)


def test_tools_are_called_as_in_training() -> None:
    def script(rng, prompt):
        return "5" if "<tool_response>" in prompt else call_text("add", a=2, b=3)

    def right(completions, answer, **_):
        return [float(c[-1]["content"] == a) for c, a in zip(completions, answer, strict=True)]

    rows = [{"prompt": [{"role": "user", "content": "2+3?"}], "answer": answer} for answer in ("5", "6")]
    with threaded(script) as server:
        result = evaluate(server, rows, right, tools=[add], config={"max_completion_length": 200}, **agent_settings())
    assert [r["reward"] for r in result.records] == [1.0, 0.0] and result.records[0]["tool_calls"] == 1
    assert [m["role"] for m in result.records[0]["messages"]] == ["assistant", "tool", "assistant"]
    assert result.records[0]["completion"] == "5"


class Sometimes(CounterEnv):
    def reset(self, target, **kwargs):
        if target == 9:
            raise OSError("gone")
        return super().reset(target, **kwargs)


def test_environments_score_and_a_failing_one_costs_its_row_only() -> None:
    def script(rng, prompt):
        return "done" if "<tool_response>" in prompt else call_text("increment", step=2)

    rows = [{"prompt": [{"role": "user", "content": "Count."}], "target": target} for target in (2, 9, 3)]
    with threaded(script) as server:
        result = evaluate(
            server,
            rows,
            None,
            environment_factory=Sometimes,
            config={"max_completion_length": 200},
            **agent_settings(),
        )
    assert [r["reward"] for r in result.records] == [1.0, None, 0.0] and result.n == 2
    assert "OSError: gone" in result.records[1]["error"] and result.records[0]["rewards"] == {"Sometimes": 1.0}
