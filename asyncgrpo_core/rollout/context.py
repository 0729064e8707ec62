"""What a rollout knows about itself while its hooks run, and the seed of each of its requests.

The hooks' signatures are the reference's and carry neither slot nor turn, so both travel in a context variable that
every task started inside the rollout inherits.
"""

from __future__ import annotations

import hashlib
import struct
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from asyncgrpo_core.types import Slot


@dataclass
class FirstPrompt:
    """A group's prompt and its token ids, rendered once for all its rollouts."""

    messages: list[dict[str, Any]]
    ids: list[int] | None = None


@dataclass
class RolloutContext:
    """Origin of one rollout. `index` is its place in the group, `turn` the number of requests it has made."""

    slot: Slot
    generation: int
    index: int
    first_prompt: FirstPrompt
    turn: int = 0

    def next_turn(self) -> int:
        turn = self.turn
        self.turn += 1
        return turn


current_rollout: ContextVar[RolloutContext] = ContextVar("current_rollout")


def request_seed(run_seed: int, slot: Slot, generation: int, rollout: int, turn: int) -> int:
    """The seed of one sampling request: the same in every run with the same config, different for every request.

    63 bits of BLAKE2b over (run seed, epoch, row, generation, rollout, turn); two rollouts of a group must never
    share a seed, or they come back as copies of each other. The position is left out: it follows from the row.
    """
    key = struct.pack("<6q", run_seed, slot.epoch, slot.row, generation, rollout, turn)
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1
