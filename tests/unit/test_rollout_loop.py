"""AsyncRolloutLoop end to end against the stand-in server, in this process."""

from __future__ import annotations

import asyncio
import inspect
import random
import time

import numpy as np
import pytest

from asyncgrpo_core.errors import DataError, RewardError, RolloutError
from asyncgrpo_core.rollout.context import request_seed
from asyncgrpo_core.rollout.loop import AsyncRolloutLoop
from asyncgrpo_core.server.generation import RequestRejectedError
from asyncgrpo_core.types import Rollout, Slot, TurnRecord
from tests.unit.fakes import EOS_ID, FakeTokenizer, FakeVLLM
from tests.unit.rollout_run import ROWS, loop_run


def index_reward(completions, **_):
    """Never equal within a group."""
    return [float(i) for i in range(len(completions))]


async def test_groups_of_num_generations_reach_the_buffer_scored(tmp_path) -> None:
    """F016, F023: four rollouts per group, advantages from their rewards, tokens as the server sent them."""
    async with FakeVLLM(version="3") as server:
        run = loop_run(server, tmp_path)
        await run.until(lambda: len(run.ended()) >= 6)
    prompt = FakeTokenizer().apply_chat_template(
        ROWS[0]["prompt"], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    record = next(r for r in run.ended() if r.slot == Slot(0, 0, 0))
    assert record.outcome == "scored" and len(record.samples) == 4
    rewards = np.array([s.reward for s in record.samples])
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
    np.testing.assert_allclose([s.advantage for s in record.samples], expected)
    for sample in record.samples:
        sequence = sample.sequence
        assert sequence.token_ids[: len(prompt)].tolist() == prompt and sequence.token_ids[-1] == EOS_ID
        assert sequence.loss_mask.sum() == sequence.num_tokens - len(prompt) == len(sequence.top)
        assert set(sequence.versions.tolist()) == {3} and sequence.top.ids.shape[1] == 4
        assert sample.group_reward_std == pytest.approx(rewards.std())


def first_epoch_has_ended(run) -> bool:
    return {r.slot.row for r in run.ended() if r.slot.epoch == 0} == set(range(len(ROWS)))


async def test_every_request_has_its_own_seed_and_the_runs_repeat(tmp_path) -> None:
    """F119."""
    async with FakeVLLM() as server:
        run = loop_run(server, tmp_path)
        await run.until(lambda: first_epoch_has_ended(run))
        seeds = [body["sampling_params"]["seed"] for _, body in server.requests]
        again = loop_run(server, tmp_path / "again")
        await again.until(lambda: first_epoch_has_ended(again))
    assert len(set(seeds)) == len(seeds)

    def outputs(one) -> dict:
        return {
            (r.slot, i): tuple(s.sequence.token_ids)
            for r in one.ended()
            if r.slot.epoch == 0
            for i, s in enumerate(r.samples)
        }

    assert outputs(run) and outputs(run) == outputs(again)


def test_seeds_depend_on_each_part_of_their_origin() -> None:
    """F119."""
    base = (42, Slot(0, 5, 1), 0, 0, 0)
    others = [
        (43, Slot(0, 5, 1), 0, 0, 0),
        (42, Slot(1, 5, 1), 0, 0, 0),
        (42, Slot(0, 6, 1), 0, 0, 0),
        (42, Slot(0, 5, 1), 1, 0, 0),
        (42, Slot(0, 5, 1), 0, 1, 0),
        (42, Slot(0, 5, 1), 0, 0, 1),
    ]
    seeds = {request_seed(*args) for args in [base, *others]}
    assert len(seeds) == 7 and request_seed(*base) == request_seed(*base)
    assert all(0 <= seed < 2**63 for seed in seeds)


async def test_requests_carry_sampling_settings_and_the_version_as_salt(tmp_path) -> None:
    async with FakeVLLM() as server:
        run = loop_run(server, tmp_path, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1)
        run.version.value = 7
        await run.until(lambda: len(run.ended()) >= 1)
        body = server.requests[0][1]
    params = body["sampling_params"]
    expected = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.0, "max_tokens": 16}
    assert {name: params[name] for name in expected} == expected
    assert body["cache_salt"].endswith("-7")
    assert run.ended()[0].model_version == 7


async def test_server_without_the_token_route_works_through_completions(tmp_path) -> None:
    async with FakeVLLM(token_route=False) as server:
        run = loop_run(server, tmp_path)
        run.version.value = 2
        await run.until(lambda: len(run.ended()) >= 2)
    assert {route for route, _ in server.requests} == {"/v1/completions"}
    sample = next(s for r in run.ended() for s in r.samples)
    assert set(sample.sequence.versions.tolist()) == {2}  # per request, not per token


async def test_no_top_logprobs_are_asked_for_without_score_centering(tmp_path) -> None:
    async with FakeVLLM() as server:
        run = loop_run(server, tmp_path, score_centering=False)
        await run.until(lambda: any(r.samples for r in run.ended()))
    assert server.requests[0][1]["sampling_params"]["logprobs"] == 0
    assert next(s for r in run.ended() for s in r.samples).sequence.top is None


async def test_chat_template_kwargs_reach_the_template(tmp_path) -> None:
    """F183."""
    async with FakeVLLM() as server:
        for number, kwargs in enumerate((None, {"enable_thinking": False})):
            run = loop_run(server, tmp_path / str(number), chat_template_kwargs=kwargs)
            await run.until(lambda run=run: len(run.ended()) >= 1)
    lengths = {len(body["token_ids"]) for _, body in server.requests}
    assert max(lengths) - min(lengths) == len("<think>")


async def test_equal_rewards_are_dropped_and_counted(tmp_path) -> None:
    """F025, F027, F028: no sample, an ended slot, and generation goes on to fill the steps from other groups."""

    def by_row(completions, answer, **_):
        return [float(i) if answer[0] % 2 else 1.0 for i in range(len(completions))]

    async with FakeVLLM() as server:
        run = loop_run(server, tmp_path, reward_funcs=[by_row])
        await run.until(lambda: len(run.ended()) >= 12)
    for record in run.ended():
        assert record.outcome == ("scored" if record.slot.row % 2 else "zero_std")
        assert bool(record.samples) == bool(record.slot.row % 2)
    got = run.metrics()
    assert got["reward_dropped"] == 1.0
    assert got["frac_reward_zero_std"] == np.mean([r.outcome == "zero_std" for r in run.ended()])


async def test_unscored_groups_are_no_reward(tmp_path) -> None:
    """F030."""
    async with FakeVLLM() as server:
        run = loop_run(server, tmp_path, reward_funcs=[lambda completions, **_: [None] * len(completions)])
        await run.until(lambda: len(run.ended()) >= 2)
    assert {r.outcome for r in run.ended()} == {"no_reward"} and run.ended()[0].reward is None
    assert run.metrics()["frac_reward_zero_std"] == 1.0 and "reward_dropped" not in run.metrics()


async def test_generation_stops_at_the_allowance_and_goes_on_when_it_rises(tmp_path) -> None:
    """F017, F107, F109. Prompts and replies of fixed length: a group has 4 x (15 + 3) tokens."""
    async with FakeVLLM(sample=lambda rng, _ids: [rng.randrange(3, 50), rng.randrange(3, 50), EOS_ID]) as server:
        group_tokens = 4 * (len("user:q0\n<think>") + 3)
        settings = {"reward_funcs": [index_reward], "allowance": 5 * group_tokens}
        run = loop_run(server, tmp_path, **settings)

        def produced() -> int:
            return sum(s.sequence.num_tokens for r in run.records for s in r.samples)

        await run.until(lambda: len(run.ended()) >= 5)
        at_rest = len(server.requests)
        assert at_rest == 5 * 4 and produced() <= 5 * group_tokens
        # the same loop object cannot run twice; a second one with a larger allowance generates more
        second = loop_run(server, tmp_path / "second", **settings)
        task = asyncio.create_task(second.until(lambda: len(second.ended()) >= 8))
        while len(server.requests) < at_rest + 20:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.1)
        assert len(server.requests) == at_rest + 20
        second.allowance.value += 3 * group_tokens
        await task
    assert len(server.requests) == at_rest + 32
    assert second.metrics()["rollout/backpressure_s"] >= 0.1


async def test_one_group_at_a_time_until_the_first_finishes(tmp_path) -> None:
    """F109."""
    async with FakeVLLM(delay_s=0.1) as server:
        run = loop_run(server, tmp_path)
        task = asyncio.create_task(run.until(lambda: len(run.ended()) >= 2))
        while not server.requests:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        assert len(server.requests) == 4
        await task
    assert server.max_in_flight > 4


async def test_no_more_requests_than_max_concurrent_rollouts(tmp_path) -> None:
    """F015."""
    async with FakeVLLM(delay_s=0.01) as server:
        run = loop_run(server, tmp_path, max_concurrent_rollouts=6)
        await run.until(lambda: len(run.ended()) >= 8)
    assert server.max_in_flight == 6


async def test_the_servers_cache_size_limits_rollouts_in_flight(tmp_path) -> None:
    """F065, F110: room for 2048 tokens at full length 512 is 4 requests."""
    metrics = (
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="128"} 1.0\n'
        'vllm:kv_cache_usage_perc{engine="0"} 0.1\nvllm:num_requests_running{engine="0"} 2.0\n'
    )
    async with FakeVLLM(delay_s=0.01, metrics=metrics, max_model_len=512) as server:
        run = loop_run(server, tmp_path)
        await run.until(lambda: "rollout/concurrency_cap" in run.metrics())
    assert server.max_in_flight == 4
    got = run.metrics()
    assert got["rollout/concurrency_cap"] == 4 and got["rollout/vllm_running_requests"] == 2.0


async def test_failed_groups_are_announced_and_generated_again_when_asked(tmp_path) -> None:
    async with FakeVLLM(fail=lambda n: 500 if n <= 30 else None) as server:
        run = loop_run(server, tmp_path)
        real = run.loop.connect

        async def connect():
            client = await real()
            client.max_retries, client.backoff_s = 1, 0.001
            return client

        run.loop.connect = connect
        asked: list[Slot] = []

        def condition() -> bool:
            for record in run.ended():
                if record.outcome == "failed" and record.slot not in asked:
                    asked.append(record.slot)
                    run.buffer.request_regeneration(record.slot, record.generation + 1)
            return bool(asked) and all(
                any(r.slot == s and r.generation == 1 and r.outcome == "scored" for r in run.ended()) for s in asked
            )

        await run.until(condition)
    failed = next(r for r in run.ended() if r.outcome == "failed")
    assert "fake failure 500" in failed.error and not failed.samples
    assert run.metrics()["rollout/vllm_retry_count"] > 0
    dispatched = [pair for r in run.records for pair in r.dispatched]
    for slot in asked:
        assert dispatched.index((slot, 0)) < dispatched.index((slot, 1))


async def test_every_group_is_announced_with_or_before_its_outcome(tmp_path) -> None:
    async with FakeVLLM() as server:
        run = loop_run(server, tmp_path)
        await run.until(lambda: len(run.ended()) >= 20)
    announced: set = set()
    for record in run.records:
        announced |= set(record.dispatched)
        if record.slot is not None:
            assert (record.slot, record.generation) in announced


async def test_a_refused_request_stops_the_run_with_the_servers_text(tmp_path) -> None:
    """F100."""
    async with FakeVLLM(fail=lambda _n: 400) as server:
        run = loop_run(server, tmp_path)
        with pytest.raises(RequestRejectedError, match="fake failure 400"):
            await run.until(lambda: False)
    error, _ = run.buffer.take_error()
    assert isinstance(error, RequestRejectedError) and run.failed.is_set()


async def test_a_turn_that_cannot_fit_is_refused_unless_top_k_may_cut_it(tmp_path) -> None:
    """F100, F101. The prompt has 15 tokens."""
    async with FakeVLLM(max_model_len=20) as server:
        with pytest.raises(RequestRejectedError, match="15 tokens.*=16.*max_model_len=20"):
            run = loop_run(server, tmp_path)
            await run.until(lambda: False)
        run = loop_run(server, tmp_path / "cut", top_k=8)
        await run.until(lambda: len(run.ended()) >= 1)
        assert server.requests[-1][1]["sampling_params"]["max_tokens"] == 5


async def test_bad_rewards_stop_the_run(tmp_path) -> None:
    """F149."""
    async with FakeVLLM() as server:
        run = loop_run(server, tmp_path, reward_funcs=[lambda completions, **_: [1.0]])
        with pytest.raises(RewardError, match="1 rewards for 4 completions"):
            await run.until(lambda: False)
    error, _ = run.buffer.take_error()
    assert isinstance(error, RewardError)


async def test_bad_prompts_stop_the_run(tmp_path) -> None:
    """F002."""
    async with FakeVLLM() as server:
        run = loop_run(server, tmp_path, rows=[{"prompt": "What is 2+2?"}])
        with pytest.raises(DataError, match="row 0"):
            await run.until(lambda: False)
        run = loop_run(server, tmp_path, rows=[{"question": "q"}])
        with pytest.raises(DataError, match='no "prompt"'):
            await run.until(lambda: False)


async def test_resume_state_and_heartbeat(tmp_path) -> None:
    async with FakeVLLM() as server:
        run = loop_run(server, tmp_path, resume_state={"epoch": 1, "position": 4, "skip": [[1, 5], [2, 0]]})
        await run.until(lambda: len(run.ended()) >= 3)
    assert {(1, 4), (2, 1), (2, 2)} <= {(r.slot.epoch, r.slot.position) for r in run.ended()}
    assert min((r.slot.epoch, r.slot.position) for r in run.ended()) == (1, 4)
    assert abs(run.heartbeat.value - time.monotonic()) < 10


async def test_shared_counters(tmp_path) -> None:
    async with FakeVLLM(delay_s=0.02) as server:
        run = loop_run(server, tmp_path)
        task = asyncio.create_task(run.until(lambda: len(run.ended()) >= 4))
        seen = 0
        while not task.done():
            seen = max(seen, run.loop.in_flight_value.value)
            await asyncio.sleep(0.001)
        await task
    trained = sum(s.sequence.num_trained for r in run.ended() for s in r.samples)
    assert seen >= 4 and run.loop.generated_tokens_value.value >= trained > 0
    assert run.loop.in_flight_value.value == 0


# hooks


class Recording(AsyncRolloutLoop):
    async def setup(self) -> None:
        self.calls = ["setup"]
        self.filtered: list = []
        self.seen_groups: list = []

    async def close(self) -> None:
        self.calls.append("close")

    def filter_prompt(self, row_index, row, epoch) -> bool:
        self.filtered.append((row_index, row["answer"], epoch))
        return row_index % 2 == 1

    def compute_advantages(self, group):
        self.seen_groups.append((group.row_index, group.rewards.copy(), group.model_version))
        return np.arange(len(group.rewards), dtype=float)


async def test_hooks_are_called_as_the_reference_says(tmp_path) -> None:
    """F029, F156, F161, F162."""

    def constant_for_row_one(completions, answer, **_):
        return [1.0 if answer[0] == 1 else float(i) for i in range(len(completions))]

    async with FakeVLLM() as server:
        run = loop_run(server, tmp_path, loop_cls=Recording, reward_funcs=[constant_for_row_one])
        await run.until(lambda: len(run.ended()) >= 4)
    loop = run.loop
    assert loop.calls == ["setup", "close"]
    assert loop.filtered[:7] == [(i, i, 0) for i in range(6)] + [(0, 0, 1)]
    filtered = [r.slot for r in run.records if r.outcome == "filtered"]
    assert filtered[:3] == [Slot(0, 0, 0), Slot(0, 2, 2), Slot(0, 4, 4)]
    assert {r.slot.row for r in run.ended()} <= {1, 3, 5}
    assert any(row == 1 for row, _, _ in loop.seen_groups)  # also for the group that is then dropped
    by_row = {r.slot.row: r for r in run.ended()}
    assert by_row[1].outcome == "zero_std" and not by_row[1].samples
    assert [s.advantage for s in by_row[3].samples] == [0.0, 1.0, 2.0, 3.0]


class RejectAll(AsyncRolloutLoop):
    def filter_prompt(self, row_index, row, epoch) -> bool:
        return False


async def test_rejecting_a_whole_epoch_raises(tmp_path) -> None:
    """F157."""
    async with FakeVLLM() as server:
        run = loop_run(server, tmp_path, loop_cls=RejectAll)
        with pytest.raises(RolloutError, match="rejected all 6 prompts"):
            await run.until(lambda: False)


class OwnRollouts(AsyncRolloutLoop):
    async def generate_one(self, prompt, tools, group_id=0) -> Rollout:
        turns = [await self.generate_one_turn([5, 6]), await self.generate_one_turn([9])]
        message = {"role": "assistant", "content": "x"}
        return Rollout([message], turns[1].output_ids, turns, reward=random.random())


async def test_own_generate_one_with_two_turns_and_a_reward(tmp_path) -> None:
    """F158, F159, F164: two requests per rollout, each with a seed of its own; Rollout.reward is summed in."""
    async with FakeVLLM() as server:
        run = loop_run(
            server, tmp_path, loop_cls=OwnRollouts, reward_funcs=[lambda completions, **_: [10.0] * len(completions)]
        )
        await run.until(lambda: len(run.ended()) >= 2)
    record = run.ended()[0]
    assert len(record.samples) == 8 and 10.0 < record.reward < 11.0
    seeds = [body["sampling_params"]["seed"] for _, body in server.requests]
    assert len(set(seeds)) == len(seeds)
    assert run.metrics()["rollout/fork_frac"] == 1.0 and run.metrics()["rollout/turns_mean"] == 2.0


class OwnTurn(AsyncRolloutLoop):
    async def generate_one_turn(self, prompt_ids) -> TurnRecord:
        token = random.randrange(3, 40)
        return TurnRecord(prompt_ids, [token], [-1.0], output_sampler_logprobs=[{token: -1.0, 1: -2.0}])


async def test_own_generate_one_turn_needs_no_server(tmp_path) -> None:
    """F159, F199."""
    async with FakeVLLM() as server:
        run = loop_run(
            server,
            tmp_path,
            loop_cls=OwnTurn,
            reward_funcs=[lambda completion_ids, **_: [float(ids[0]) for ids in completion_ids]],
        )
        await run.until(lambda: any(r.samples for r in run.ended()))
    assert server.requests == []


class BadAdvantages(AsyncRolloutLoop):
    def compute_advantages(self, group):
        return np.zeros(3)


class FailingSetup(AsyncRolloutLoop):
    closed = False

    async def setup(self) -> None:
        raise OSError("no database")

    async def close(self) -> None:
        type(self).closed = True


async def test_hooks_that_fail_stop_the_run_and_still_close(tmp_path) -> None:
    """F162."""
    async with FakeVLLM() as server:
        run = loop_run(server, tmp_path, loop_cls=FailingSetup)
        with pytest.raises(OSError, match="no database"):
            await run.until(lambda: False)
        assert FailingSetup.closed
        error, text = run.buffer.take_error()
        assert (isinstance(error, OSError) and "FailingSetup" in text) or "setup" in text
        run = loop_run(server, tmp_path / "b", loop_cls=BadAdvantages)
        with pytest.raises(RolloutError, match="compute_advantages returned.*group of 4"):
            await run.until(lambda: False)


# constructor


def test_constructor_is_the_references_with_keyword_extras() -> None:
    """F197."""
    parameters = inspect.signature(AsyncRolloutLoop).parameters
    positional = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == [
        "config", "model_name", "dataset", "reward_funcs", "processing_class", "eos_token_ids", "rollout_buffer",
        "model_version_value", "token_allowance", "heartbeat_value", "failed_event", "exception_info_queue",
        "metrics_queue", "tools", "environment_factory", "score_queue_maxsize", "lora_name", "dataset_start_index",
    ]  # fmt: skip
    assert parameters["score_queue_maxsize"].default == 16 and parameters["dataset_start_index"].default == 0
    assert all(p.kind is p.KEYWORD_ONLY for n, p in parameters.items() if n not in positional)
