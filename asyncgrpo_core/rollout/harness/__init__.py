"""Custom generators: agent frameworks that talk to the policy through an OpenAI-compatible proxy.

    harness --HTTP--> proxy.py --> session.py --> loop.chat, loop.generate_one_turn --> vLLM server
                                       |
                                       +--> turns (token ids, log-probabilities) --> Rollout

loop.py       HarnessRolloutLoop: `generate_one` runs a harness in this process
command.py    CommandHarnessLoop: the harness is a command
process.py    one command in a process group of its own
proxy.py      the web server, one base URL and API key per rollout
session.py    what one rollout asked and got
request.py    what may be asked: the JSON of chat/completions
reply.py      what is answered
memory.py     replies that the harness sends back slightly changed, recognised
cut.py        stop strings and max_tokens
"""

from asyncgrpo_core.rollout.harness.command import CommandHarnessLoop
from asyncgrpo_core.rollout.harness.loop import HarnessFailedError, HarnessResult, HarnessRolloutLoop
from asyncgrpo_core.rollout.harness.proxy import OpenAIProxy

__all__ = ["CommandHarnessLoop", "HarnessFailedError", "HarnessResult", "HarnessRolloutLoop", "OpenAIProxy"]
