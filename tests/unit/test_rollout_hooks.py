"""Custom loops: the reference's curriculum example, state that survives a resume, settings a config subclass adds."""

from __future__ import annotations

import numpy as np
import pytest

from asyncgrpo_core.errors import CheckpointError
from asyncgrpo_core.rollout.loop import AsyncRolloutLoop
from asyncgrpo_core.training.checkpoint import RolloutState, load_rollout_state, save_rollout_state
from tests.unit.fakes import FakeVLLM
from tests.unit.rollout_run import ROWS, loop_run


class CurriculumRolloutLoop(AsyncRolloutLoop):
    """Stops sampling prompts that the policy already solves (the reference's example in our words)."""

    def filter_prompt(self, row_index, row, epoch):
        return self.pass_rates.get(row_index, 0.0) < self.config.pass_rate_cap

    async def setup(self):
        self.pass_rates: dict[int, float] = {}

    def compute_advantages(self, group):
        scored = group.rewards[~np.isnan(group.rewards)]
        if len(scored):
            self.pass_rates[group.row_index] = float(np.mean(scored > 0))
        return super().compute_advantages(group)


def solved_from_row_three(completions, answer, **_):
    """Rows 3 to 5 are always right, the others half of the time."""
    return [1.0 if answer[0] >= 3 else float(i % 2) for i in range(len(completions))]


async def test_f163_f161_the_curriculum_example_passes_over_what_is_solved(tmp_path) -> None:
    """F156: a rejected prompt counts toward its epoch. compute_advantages sees the dropped groups too."""
    async with FakeVLLM() as server:
        run = loop_run(
            server,
            tmp_path,
            loop_cls=CurriculumRolloutLoop,
            reward_funcs=[solved_from_row_three],
            pass_rate_cap=0.9,
            max_concurrent_rollouts=4,
            score_queue_maxsize=1,
        )
        await run.until(lambda: any(r.slot is not None and r.slot.epoch == 3 for r in run.records))
    later = [r for r in run.records if r.slot is not None and r.slot.epoch in (1, 2)]
    filtered = {r.slot.row for r in later if r.outcome == "filtered"}
    assert filtered == {3, 4, 5}
    assert {r.slot.row for r in later if r.outcome == "scored"} == {0, 1, 2}
    first = [r for r in run.records if r.slot is not None and r.slot.epoch == 0]
    assert {r.slot.row for r in first if r.outcome == "zero_std"} <= {3, 4, 5}


class Remembering(AsyncRolloutLoop):
    """Counts groups, and hands the count over."""

    count = 0

    async def setup(self):
        self.count = 100  # what load_state_dict replaces

    def compute_advantages(self, group):
        self.count += 1
        return super().compute_advantages(group)

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


async def test_a_custom_loops_state_travels_with_the_records_and_comes_back(tmp_path) -> None:
    async with FakeVLLM() as server:
        run = loop_run(server, tmp_path, loop_cls=Remembering)
        await run.until(lambda: any(r.loop_state for r in run.records))
        states = [r.loop_state["count"] for r in run.records if r.loop_state is not None]
        assert states[0] == 101
        again = loop_run(
            server,
            tmp_path / "again",
            loop_cls=Remembering,
            resume_state={"epoch": 0, "position": 3, "skip": [], "loop_state": {"count": 7}},
        )
        await again.until(lambda: any(r.loop_state for r in again.records))
    assert next(r.loop_state for r in again.records if r.loop_state is not None) == {"count": 8}


async def test_a_plain_loop_sends_no_state(tmp_path) -> None:
    async with FakeVLLM() as server:
        run = loop_run(server, tmp_path)
        await run.until(lambda: len(run.ended()) >= 4)
    assert all(r.loop_state is None for r in run.records)


def state_with(loop_state) -> RolloutState:
    return RolloutState(global_step=1, policy_version=1, slots={}, counters={}, loop_state=loop_state)


def test_a_checkpoint_keeps_the_state_and_refuses_what_is_no_json(tmp_path) -> None:
    save_rollout_state(tmp_path, state_with({"rates": [0.5, None]}), [])
    assert load_rollout_state(tmp_path)[0].loop_state == {"rates": [0.5, None]}
    with pytest.raises(CheckpointError, match="state_dict.. of the rollout loop.*no JSON"):
        save_rollout_state(tmp_path, state_with({"rates": np.zeros(2)}), [])


async def test_f160_repetition_penalty_of_a_config_subclass_reaches_the_server(tmp_path) -> None:
    async with FakeVLLM() as server:
        plain = loop_run(server, tmp_path)
        await plain.until(lambda: len(plain.ended()) >= 1)
        assert server.requests[-1][1]["sampling_params"]["repetition_penalty"] == 1.0
        changed = loop_run(server, tmp_path / "changed", repetition_penalty=1.1)
        await changed.until(lambda: len(changed.ended()) >= 1)
        assert server.requests[-1][1]["sampling_params"]["repetition_penalty"] == 1.1


class Greedy(AsyncRolloutLoop):
    async def setup(self):
        self.events = ["setup"]

    async def close(self):
        self.events.append("close")

    async def generate_one_turn(self, prompt_ids):
        self.events.append("turn")
        return await super().generate_one_turn(prompt_ids)


async def test_f159_f162_hooks_run_on_the_loop_and_in_order(tmp_path) -> None:
    async with FakeVLLM() as server:
        run = loop_run(server, tmp_path, loop_cls=Greedy, rows=ROWS[:2])
        await run.until(lambda: len(run.ended()) >= 2)
        turns = run.loop.events.count("turn")
    assert run.loop.events[0] == "setup" and run.loop.events[-1] == "close"
    assert turns >= len(server.requests) > 0
