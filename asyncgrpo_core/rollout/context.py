"""What a rollout knows about itself while its hooks run, and the seed of each of its requests.

The hooks' signatures are the reference's and carry neither slot nor turn, so both travel in a context variable that
every task started inside the rollout inherits.
"""

from __future__ import annotations

import hashlib
import struct
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from asyncgrpo_core.types import Slot

if TYPE_CHECKING:
    from asyncgrpo_core.rollout.tools import CallOutcome


@dataclass
class FirstPrompt:
    """A group's prompt and its token ids, rendered once for all rollouts that start with the same messages and tools.

    `messages` and `tool_names` say what `ids` was rendered from; both None before the first rendering.
    """

    messages: list[dict[str, Any]] | None = None
    tool_names: list[str] | None = None
    ids: list[int] | None = None


@dataclass
class RolloutContext:
    """Origin and story of one rollout.

    Attributes:
        slot, generation, index: where it belongs; `index` is its place in the group.
        group_id: identifier of its group.
        first_prompt: shared by the group.
        row: the dataset row (empty when an environment owns the data).
        adapter_version: the adapter version that all its requests name; None where merged weights are served.
        turn: number of sampling requests it has made.
        calls: its tool calls so far.
        calls_per_message: number of calls of each assistant message that called tools.
        exhausted: cut off at max_tool_calling_iterations while still calling tools.
        context_full: ended because its next turn did not fit max_model_len (long_conversation="end").
    """

    slot: Slot
    generation: int
    index: int
    first_prompt: FirstPrompt
    group_id: int = -1
    row: dict[str, Any] = field(default_factory=dict)
    adapter_version: int | None = None
    turn: int = 0
    calls: list[CallOutcome] = field(default_factory=list)
    calls_per_message: list[int] = field(default_factory=list)
    exhausted: bool = False
    context_full: bool = False

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
