"""A harness in the spawned rollout process, as a run has it."""

from __future__ import annotations

import random
import time

from asyncgrpo_core.rollout.buffer import SampleBuffer
from asyncgrpo_core.rollout.worker import RolloutWorker
from tests.unit.agent_parts import agent_tokenizer
from tests.unit.fakes import ThreadedFakeVLLM
from tests.unit.harness_parts import AddingAgent, adding_script, no_reward
from tests.unit.rollout_run import ROWS, config_of


class Agent(AddingAgent):
    """The reward is how long the answers are, so that it differs within a group."""

    async def run_harness(self, base_url, api_key, prompt, row):
        result = await super().run_harness(base_url, api_key, prompt, row)
        result.reward = float(sum(len(m["content"] or "") for m in self.dialogues[-1]))
        return result


def test_a_run_with_a_harness(tmp_path) -> None:
    """F158, F187: tool turns, tokens and metrics reach the trainer's side."""
    tokenizer = agent_tokenizer()

    def sample(rng: random.Random, prompt_ids: list[int]) -> list[int]:
        reply = adding_script(rng, tokenizer.decode(prompt_ids)) + "!" * rng.randrange(20)
        return [*tokenizer(reply, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]

    engine = {"sample": sample, "vocab": len(tokenizer), "eos_id": tokenizer.eos_token_id, "max_model_len": 4096}
    with ThreadedFakeVLLM(**engine) as server:
        buffer = SampleBuffer(tmp_path / "buffer")
        worker = RolloutWorker(
            config=config_of(server, num_generations=2, max_completion_length=256, max_concurrent_rollouts=4),
            model_name="policy",
            dataset=ROWS,
            reward_funcs=[no_reward],
            processing_class=tokenizer,
            eos_token_ids=[tokenizer.eos_token_id],
            buffer=buffer,
            initial_allowance=10_000,
            log_path=tmp_path / "rollout.log",
            loop_cls=Agent,
        )
        try:
            worker.start()
            worker.wait_ready(60.0)
            records: list = []
            deadline = time.monotonic() + 60.0
            while not any(record.samples for record in records):
                worker.check()
                assert time.monotonic() < deadline, "no sample in time"
                records += buffer.take()
                time.sleep(0.05)
        finally:
            worker.stop(timeout_s=5.0)
    record = next(record for record in records if record.samples)
    assert len(record.samples) == 2, "one sample per rollout: no turn forked"
    for item in record.samples:
        text = tokenizer.decode(item.sequence.token_ids)
        assert text.count("<tool_response>") == 2 and item.sequence.num_trained == len(item.sequence.top)
        assert tokenizer.decode(item.sequence.token_ids[item.sequence.loss_mask]).count("<tool_call>") == 2
    assert {"tools/call_frequency", "tools/parallel_calls_mean"} <= {name for name, *_ in record.metrics}
