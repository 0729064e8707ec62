"""Ready-made reward functions, with the names and signatures of `trl.rewards` where it has them.

    accuracy.py        accuracy_reward, reasoning_accuracy_reward          by math-verify, with a deadline
    formats.py         format_reward, think_format_reward                  by regular expression
    lengths.py         length_reward, get_soft_overlong_punishment         by number of tokens
    reasoning_gym.py   reasoning_gym_reward, reasoning_gym_rows            by the task's own scorer, with a deadline
    judge.py           JudgeReward                                         by a model behind an OpenAI-compatible server
    verifiers.py       verifier_settings, verifier_counts                  the killable processes that checks run in

Each takes `completions` in conversational form (a list of message lists) plus the dataset's columns as keyword
arguments and returns one float, or None where it does not apply, per completion. The text that is scored is the
content of the completion's last assistant message (see text.py). math-verify, reasoning-gym and aiohttp are imported
when a function that needs them is called.
"""

from __future__ import annotations

from asyncgrpo_core.rewards.accuracy import accuracy_reward, reasoning_accuracy_reward
from asyncgrpo_core.rewards.formats import format_reward, think_format_reward
from asyncgrpo_core.rewards.judge import JudgeReward
from asyncgrpo_core.rewards.lengths import get_soft_overlong_punishment, length_reward, soft_overlong_punishment
from asyncgrpo_core.rewards.reasoning_gym import reasoning_gym_reward, reasoning_gym_rows
from asyncgrpo_core.rewards.verifiers import verifier_counts, verifier_settings

__all__ = [
    "JudgeReward",
    "accuracy_reward",
    "format_reward",
    "get_soft_overlong_punishment",
    "length_reward",
    "reasoning_accuracy_reward",
    "reasoning_gym_reward",
    "reasoning_gym_rows",
    "soft_overlong_punishment",
    "think_format_reward",
    "verifier_counts",
    "verifier_settings",
]
