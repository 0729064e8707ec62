"""F133: candidate sets from the server's reply to a packed row, through the rollout loop and its buffer."""

from __future__ import annotations

import pytest

from asyncgrpo_core.errors import RolloutError
from asyncgrpo_core.packing import pack_row
from tests.unit.fakes import FakeVLLM
from tests.unit.rollout_run import loop_run
from tests.unit.test_rollout_loop import index_reward

RESTRICTED = {"top_k": 6, "top_p": 0.9, "run_settings": {"use_token_route": True, "candidate_sets": True}}


def with_sets(_number, body):
    """What --return-sampling-mask adds: here the reported tokens, as the sampler's set."""
    choice = body["choices"][0]
    choice["sampling_mask"] = [
        sorted({content["token_id"], *(entry["token_id"] for entry in content["top_logprobs"])})
        for content in choice["logprobs"]["content"]
    ]
    return body


async def test_f133_sets_reach_the_row_of_their_tokens(tmp_path) -> None:
    async with FakeVLLM(spoil=with_sets) as server:
        run = loop_run(server, tmp_path, reward_funcs=[index_reward], **RESTRICTED)
        await run.until(lambda: any(record.outcome == "scored" for record in run.ended()))
        params = server.requests[0][1]["sampling_params"]
        assert (params["top_k"], params["top_p"]) == (6, 0.9)
    samples = next(record for record in run.ended() if record.outcome == "scored").samples
    row = pack_row(samples, 4)
    ids, offsets = row["candidate_ids"].tolist(), row["candidate_offsets"].tolist()
    assert len(offsets) == len(row["target_ids"]) + 1
    for term, (y, top) in enumerate(zip(row["target_ids"].tolist(), row["top_ids"].tolist(), strict=True)):
        assert {y, *top} <= set(ids[offsets[term] : offsets[term + 1]])


async def test_f135_a_server_that_returned_sets_at_the_start_and_no_longer_does_ends_the_run(tmp_path) -> None:
    async with FakeVLLM() as server:
        run = loop_run(server, tmp_path, reward_funcs=[index_reward], **RESTRICTED)
        with pytest.raises(RolloutError, match="--return-sampling-mask --enable-scale-out"):
            await run.until(lambda: False)
    assert all(record.outcome in ("failed", "report") for record in run.records)


async def test_f137_of_a_server_that_cannot_return_sets_tokens_are_trained_over_the_whole_vocabulary(tmp_path) -> None:
    settings = RESTRICTED | {"run_settings": {"use_token_route": True, "candidate_sets": False}}
    async with FakeVLLM() as server:
        run = loop_run(server, tmp_path, reward_funcs=[index_reward], **settings)
        await run.until(lambda: len(run.ended()) > 0)
    samples = run.ended()[0].samples
    assert samples and all(sample.sequence.sampling_mask is None for sample in samples)
    assert "candidate_ids" not in pack_row(samples, 4)
