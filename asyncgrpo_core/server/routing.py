"""Which of several servers a request goes to. A pure state machine: no I/O, no clock.

    in use --k failures in a row, or taken out--> out --a probe answers--> in use
    fresh  --weights are not the newest-->        stale --a later sync was proved--> fresh

Only a server that is in use and fresh is chosen. A request goes to the server that holds the rollout's earlier turns,
else to the one that holds its group's prompt, else to the least loaded one; each only while it has room.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field

OUT_AFTER = 3  # failures in a row
PROBE_AFTER_S = 1.0  # doubles with every failed probe ...
PROBE_MAX_S = 30.0  # ... up to this


@dataclass
class ServerState:
    """One server. `failures` counts failed requests and health checks since the last request that succeeded."""

    cap: int
    in_flight: int = 0
    failures: int = 0
    retry_at: float | None = None  # out of use: when to probe it
    probe_after_s: float = PROBE_AFTER_S
    stale: bool = False

    @property
    def healthy(self) -> bool:
        return self.retry_at is None

    @property
    def usable(self) -> bool:
        return self.healthy and not self.stale


@dataclass
class _Home:
    """Where a group's requests go: its own server, and those of rollouts that went elsewhere."""

    server: int
    members: dict[Hashable, int] = field(default_factory=dict)


class ServerRouting:
    """State per server, and the affinities of the groups that are running.

    Args:
        count: number of servers.
        cap: most requests in flight per server until `set_cap` says otherwise.
        max_groups: affinities kept; the one used longest ago is forgotten beyond that.
    """

    def __init__(self, count: int, cap: int, *, max_groups: int = 4096) -> None:
        self.servers = [ServerState(cap) for _ in range(count)]
        self._homes: OrderedDict[int, _Home] = OrderedDict()
        self._max_groups = max_groups

    @property
    def num_affinities(self) -> int:
        return len(self._homes)

    def usable(self) -> list[int]:
        return [index for index, server in enumerate(self.servers) if server.usable]

    # the choice

    def choose(self, group: int | None = None, member: Hashable = None, avoid: Collection[int] = ()) -> int | None:
        """The server for a request of a group's rollout `member`; None when no server may be used.

        Args:
            avoid: servers where this request has just failed; chosen only when no other is left.
        """
        allowed = [index for index in self.usable() if index not in avoid] or self.usable()
        if not allowed:
            return None
        home = self._homes.get(group) if group is not None else None
        if home is not None:
            for index in (home.members.get(member), home.server):
                if index in allowed and self._has_room(index):
                    return index
        # Without room anywhere the rollout still holds its place at the gate: the caps hold new rollouts back, not
        # the turns of those that run.
        return min(allowed, key=lambda index: (not self._has_room(index), self._load(index), index))

    def _has_room(self, index: int) -> bool:
        server = self.servers[index]
        return server.in_flight < server.cap

    def _load(self, index: int) -> float:
        server = self.servers[index]
        return server.in_flight / server.cap

    def server_of(self, group: int | None, member: Hashable = None) -> int | None:
        """The server of a rollout's latest request; None when it made none or is forgotten."""
        home = self._homes.get(group) if group is not None else None
        return None if home is None else home.members.get(member)

    def forget(self, group: int) -> None:
        """The group has ended."""
        self._homes.pop(group, None)

    # what happens to requests

    def started(self, index: int, group: int | None = None, member: Hashable = None) -> None:
        self.servers[index].in_flight += 1
        if group is None:
            return
        home = self._homes.get(group)
        if home is None:
            home = self._homes[group] = _Home(index)
            if len(self._homes) > self._max_groups:
                self._homes.popitem(last=False)
        elif not self.servers[home.server].usable:
            home.server = index  # the prompt is cached there now
        self._homes.move_to_end(group)
        home.members[member] = index

    def finished(self, index: int) -> None:
        """A request was answered."""
        server = self.servers[index]
        server.in_flight -= 1
        server.failures = 0
        server.probe_after_s = PROBE_AFTER_S

    def gave_up(self, index: int) -> None:
        """A request ended and says nothing about the server (cancelled, refused for its content)."""
        self.servers[index].in_flight -= 1

    def failed(self, index: int, now: float) -> bool:
        """A request failed in a way that may be the server's fault. True when that takes the server out of use."""
        self.servers[index].in_flight -= 1
        return self.missed(index, now)

    # health

    def missed(self, index: int, now: float) -> bool:
        """A health check failed. True when that takes the server out of use."""
        server = self.servers[index]
        server.failures += 1
        if server.healthy and server.failures >= OUT_AFTER:
            self.take_out(index, now)
            return True
        return False

    def take_out(self, index: int, now: float) -> None:
        """Out of use until a probe succeeds; the first is due `probe_after_s` from `now`."""
        server = self.servers[index]
        server.retry_at = now + server.probe_after_s

    def probe_failed(self, index: int, now: float) -> None:
        server = self.servers[index]
        server.probe_after_s = min(2 * server.probe_after_s, PROBE_MAX_S)
        server.retry_at = now + server.probe_after_s

    def bring_back(self, index: int) -> None:
        """A probe succeeded. Until a request succeeds too, the next time out of use lasts longer."""
        server = self.servers[index]
        server.retry_at = None
        server.failures = 0
        server.probe_after_s = min(2 * server.probe_after_s, PROBE_MAX_S)

    # what others know

    def set_cap(self, index: int, cap: int) -> None:
        self.servers[index].cap = max(1, cap)

    def set_stale(self, index: int, stale: bool) -> None:
        self.servers[index].stale = stale
