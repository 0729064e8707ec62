"""The rollout side against the real vLLM server."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from asyncgrpo_core.rollout.buffer import SampleBuffer
from asyncgrpo_core.rollout.heldout import evaluate_heldout
from asyncgrpo_core.rollout.worker import RolloutWorker
from asyncgrpo_core.server.generation import GenerationClient, RequestRejectedError, SamplingSettings
from asyncgrpo_core.server.load import parse_metrics
from tests.unit import worker_parts
from tests.unit.rollout_run import config_of

pytestmark = pytest.mark.integration

ROWS = [{"prompt": [{"role": "user", "content": f"What is {i} plus {i + 3}?"}], "answer": 2 * i + 3} for i in range(40)]


@pytest.fixture(scope="module")
def tokenizer(vllm_server):
    return AutoTokenizer.from_pretrained(vllm_server.model_path)


def prompt_ids(tokenizer, row: int = 0) -> list[int]:
    return list(
        tokenizer.apply_chat_template(ROWS[row]["prompt"], add_generation_prompt=True, tokenize=True, return_dict=False)
    )


def settings_of(tokenizer, **changes) -> SamplingSettings:
    values = {"max_tokens": 12, "num_logprobs": 8, "stop_token_ids": (tokenizer.eos_token_id,)}
    return SamplingSettings(**{**values, **changes})


async def test_both_routes_return_the_same_tokens_and_log_probabilities(vllm_server, tokenizer) -> None:
    """F119: and a seed repeats its reply."""
    turns = []
    for route in (True, False, True):
        async with GenerationClient(vllm_server.base_url, "policy", use_token_route=route) as client:
            turns.append(await client.generate(prompt_ids(tokenizer), settings_of(tokenizer), 1234, "test"))
    by_tokens, by_completion, again = turns
    assert by_tokens.output_ids == by_completion.output_ids == again.output_ids
    np.testing.assert_allclose(by_tokens.output_log_probs, by_completion.output_log_probs, atol=1e-4)
    for left, right in zip(
        by_tokens.output_sampler_logprobs.ids, by_completion.output_sampler_logprobs.ids, strict=True
    ):
        assert set(left.tolist()) == set(right.tolist())


async def test_the_head_is_the_k_most_likely_tokens_and_agrees_with_the_sampled_ones(vllm_server, tokenizer) -> None:
    """At a high temperature many sampled tokens are outside the head; the head must not depend on them."""
    async with GenerationClient(vllm_server.base_url, "policy", use_token_route=True) as client:
        hot = settings_of(tokenizer, temperature=2.0, num_logprobs=4)
        turns = [await client.generate(prompt_ids(tokenizer), hot, seed, None) for seed in range(16)]
    heads = {frozenset(turn.output_sampler_logprobs.ids[0].tolist()) for turn in turns}
    first_tokens = {turn.output_ids[0] for turn in turns}
    assert len(first_tokens) > 1 and len(heads) == 1 and len(next(iter(heads))) == 4
    for turn in turns:
        top = turn.output_sampler_logprobs
        assert top.ids.shape == (len(turn.output_ids), 4) and (np.exp(top.logprobs).sum(axis=1) <= 1 + 1e-5).all()
        for token, logprob, ids, logprobs in zip(
            turn.output_ids, turn.output_log_probs, top.ids, top.logprobs, strict=True
        ):
            inside = np.flatnonzero(ids == token)
            if len(inside):
                assert logprobs[inside[0]] == pytest.approx(logprob, abs=1e-6)
            else:
                assert logprob <= logprobs.min() + 1e-6


async def test_refusals_show_the_servers_text(vllm_server, tokenizer) -> None:
    async with GenerationClient(vllm_server.base_url, "nobody", use_token_route=True) as client:
        with pytest.raises(RequestRejectedError, match="nobody"):
            await client.generate(prompt_ids(tokenizer), settings_of(tokenizer), 1, None)
    async with GenerationClient(vllm_server.base_url, "policy", use_token_route=False) as client:
        with pytest.raises(RequestRejectedError, match="512"):
            await client.generate(prompt_ids(tokenizer), settings_of(tokenizer, max_tokens=5000), 1, None)


async def test_facts_and_load(vllm_server) -> None:
    async with GenerationClient(vllm_server.base_url, "policy", use_token_route=True) as client:
        facts = await client.facts()
        text = await client.metrics_text()
    assert facts.token_route and facts.max_model_len == 512 and facts.served_models == ("policy",)
    assert facts.max_logprobs == 20
    load = parse_metrics(text)
    assert load.kv_cache_usage is not None and load.running is not None and load.waiting is not None
    assert load.preemptions is not None and load.kv_cache_tokens > 10_000


def test_worker_produces_groups_within_its_allowance(vllm_server, tokenizer, tmp_path: Path) -> None:
    buffer = SampleBuffer(tmp_path / "buffer")
    config = config_of(
        None,
        vllm_server_base_url=vllm_server.base_url,
        num_generations=8,
        max_completion_length=12,
        num_sampler_logprobs=8,
        chat_template_kwargs={"enable_thinking": False},
    )
    worker = RolloutWorker(
        config=config,
        model_name="policy",
        dataset=ROWS,
        reward_funcs=[worker_parts.index_reward],
        processing_class=tokenizer,
        eos_token_ids=[tokenizer.eos_token_id],
        buffer=buffer,
        initial_allowance=4000,
        log_path=tmp_path / "rollout.log",
    )
    worker.start()
    try:
        worker.wait_ready(120.0)
        records: list = []
        deadline, last = time.monotonic() + 60, -1
        while time.monotonic() < deadline:  # until nothing new comes for two seconds
            worker.check()
            records += buffer.take()
            if worker.generated_tokens() == last and worker.in_flight() == 0 and last > 0:
                break
            last = worker.generated_tokens()
            time.sleep(2.0)
        records += buffer.take()
    finally:
        worker.stop()
    scored = [r for r in records if r.outcome == "scored"]
    tokens = sum(s.sequence.num_tokens for r in scored for s in r.samples)
    assert 3200 <= tokens <= 4800  # groups in progress count with the mean size of the finished ones
    for sample in (s for r in scored for s in r.samples):
        sequence = sample.sequence
        assert sequence.num_trained == len(sequence.top) and sequence.top.ids.shape[1] == 8
        assert (sequence.sampler_logprobs[sequence.loss_mask] <= 0).all()
    assert not any(r.outcome == "failed" for r in records)


def test_heldout(vllm_server, tokenizer) -> None:
    result = evaluate_heldout(
        config=config_of(vllm_server, max_completion_length=12),
        model_name="policy",
        processing_class=tokenizer,
        eos_token_ids=[tokenizer.eos_token_id],
        rows=ROWS,
        reward_funcs=[worker_parts.index_reward],
        seed=7,
    )
    assert result.n == 40 and result.mean_reward == pytest.approx(19.5)
    assert all(1 <= r["completion_tokens"] <= 12 for r in result.records)
