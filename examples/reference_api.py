"""A script written against the reference's API: only the import of the trainer differs.

    asyncgrpo serve examples/quickstart.yaml --set server.port=8000     # in one terminal
    python examples/reference_api.py                                    # in another

Trains the shipped start policy on two-number additions for 30 steps and prints the first and last reward.
"""

import random

from datasets import Dataset

from asyncgrpo_core import AsyncGRPOConfig, AsyncGRPOTrainer
from asyncgrpo_core.quickstart import POLICY_DIR


def exact_reward(completions, answer, **kwargs):
    """1.0 when the completion is the answer and nothing else."""
    return [1.0 if c[0]["content"] == a else 0.0 for c, a in zip(completions, answer, strict=True)]


def make_dataset(n: int) -> Dataset:
    numbers = random.Random(0)
    pairs = [(numbers.randrange(100), numbers.randrange(100)) for _ in range(n)]
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": f"What is {a} plus {b}?"}], "answer": str(a + b)} for a, b in pairs]
    )


if __name__ == "__main__":  # the rollout worker is a spawned process that re-imports this script
    trainer = AsyncGRPOTrainer(
        model=str(POLICY_DIR),
        reward_funcs=exact_reward,
        args=AsyncGRPOConfig(
            output_dir="runs/reference-api",
            max_steps=30,
            learning_rate=2e-4,
            max_completion_length=8,
            token_budget=340,  # forwarded tokens, and trained tokens: about 96 samples in a row
            save_strategy="no",
        ),
        train_dataset=make_dataset(4096),
    )
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    print(f"reward over the first 5 steps {sum(rewards[:5]) / 5:.3f}, over the last 5 {sum(rewards[-5:]) / 5:.3f}")
