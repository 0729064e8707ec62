"""examples/harness.py: its loop, with the shipped tokenizer and a stand-in for the policy."""

from __future__ import annotations

import random
import re

from transformers import AutoTokenizer

from asyncgrpo_core.quickstart import POLICY_DIR
from examples.harness import AskingLoop, make_dataset
from tests.unit.fakes import FakeVLLM
from tests.unit.harness_parts import generated, ready, rollout, trained


async def test_the_harness_asks_twice_at_most_and_scores_by_the_try(tmp_path) -> None:
    """F158, F164, F187: the policy is right at the first, the second or no try, by the row."""
    tokenizer = AutoTokenizer.from_pretrained(POLICY_DIR)
    rows = list(make_dataset(3))
    answers = [str(row["answer"]) for row in rows]
    tries = [1, 2, 3]  # of which row 2 never gets to see the last

    def sample(_rng: random.Random, prompt_ids: list[int]) -> list[int]:
        text = tokenizer.decode(prompt_ids)
        a, b = re.findall(r"What is (\d+) plus (\d+)", text)[0]
        row = answers.index(str(int(a) + int(b)))
        right = text.count("What is") == tries[row]
        return [*tokenizer(answers[row] if right else "7", add_special_tokens=False)["input_ids"], eos]

    eos = tokenizer.eos_token_id
    settings = {"tokenizer": tokenizer, "rows": rows, "max_completion_length": 8, "reward_funcs": []}
    async with (
        FakeVLLM(sample=sample, vocab=len(tokenizer), eos_id=eos, max_model_len=128) as server,
        ready(server, tmp_path, AskingLoop, **settings) as loop,
    ):
        done = [await rollout(loop, row=row) for row in range(3)]
    assert [one.rollout.reward for one in done] == [1.0, 0.5, 0.0]
    assert [len(one.rollout.turns) for one in done] == [1, 2, 2]
    for one in done:
        assert trained(one) == generated(one) and len(one.reconciled.sequences) == 1
    assert [m["role"] for m in done[1].rollout.completion] == ["assistant", "user", "assistant"]
