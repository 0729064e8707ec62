"""Training on a harness: rollouts made by a program that talks to the policy through OpenAI's client.

    asyncgrpo serve examples/quickstart.yaml --set server.port=8000 --set server.max_model_len=128    # one terminal
    python examples/harness.py                                                                        # another

The harness is `ask_until_right`, an ordinary coroutine that knows nothing of the training: it asks for a sum and, when
the answer is wrong, says so and asks once more. Any agent framework takes its place, as long as its base URL can be
set; one that is a program of its own is run by `CommandHarnessLoop` (asyncgrpo_core/rollout/harness/command.py), and
one that is not async by a plain `def run_harness`. In a run's YAML, `loop: examples.harness:AskingLoop` does the same.

What the proxy does with a request: temperature, top_p and the like are the run's own (the reply's header
X-AsyncGRPO-Ignored names what was overruled), stop strings and max_tokens are followed; what the harness would rely on
and training cannot give (n > 1, logprobs, response_format) is refused with HTTP 400.
"""

import random

from datasets import Dataset
from openai import AsyncOpenAI

from asyncgrpo_core import AsyncGRPOConfig, AsyncGRPOTrainer
from asyncgrpo_core.quickstart import POLICY_DIR
from asyncgrpo_core.rollout.harness import HarnessRolloutLoop


async def ask_until_right(api: AsyncOpenAI, question: str, answer: str) -> float:
    """1.0 for the right answer at once, 0.5 at the second try, else 0."""
    messages = [{"role": "user", "content": question}]
    for reward in (1.0, 0.5):
        reply = await api.chat.completions.create(model="policy", messages=messages)
        text = reply.choices[0].message.content
        if text == answer:
            return reward
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"Wrong. {question}"}]
    return 0.0


class AskingLoop(HarnessRolloutLoop):
    """At module level, because the rollout worker imports it in a process of its own."""

    harness_tools = False  # the harness offers the policy no tools, so its tokenizer need not have a format for calls
    harness_timeout = 60.0

    async def setup(self):
        await super().setup()  # starts the proxy
        # one client for all rollouts: making one reads the system's certificates, 0.15 s of CPU time
        self.openai = AsyncOpenAI(base_url="http://127.0.0.1", api_key="set per rollout", max_retries=0)

    async def close(self):
        await super().close()
        await self.openai.close()

    async def run_harness(self, base_url, api_key, prompt, row):
        api = self.openai.with_options(base_url=base_url, api_key=api_key)
        return await ask_until_right(api, prompt[-1]["content"], row["answer"])


class AskingTrainer(AsyncGRPOTrainer):
    loop_cls = AskingLoop


def make_dataset(n: int) -> Dataset:
    numbers = random.Random(0)
    pairs = [(numbers.randrange(100), numbers.randrange(100)) for _ in range(n)]
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": f"What is {a} plus {b}?"}], "answer": str(a + b)} for a, b in pairs]
    )


if __name__ == "__main__":  # the rollout worker is a spawned process that re-imports this script
    trainer = AskingTrainer(
        model=str(POLICY_DIR),
        args=AsyncGRPOConfig(
            output_dir="runs/harness",
            max_steps=30,
            learning_rate=2e-4,
            max_completion_length=8,
            token_budget=2048,
            save_strategy="no",
        ),
        train_dataset=make_dataset(4096),
    )
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    print(f"reward over the first 5 steps {sum(rewards[:5]) / 5:.3f}, over the last 5 {sum(rewards[-5:]) / 5:.3f}")
