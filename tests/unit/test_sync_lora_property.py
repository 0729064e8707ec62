"""Whatever rollouts do: no named version is unloaded, no listed one loses its folder, --max-loras is never exceeded."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncgrpo_core.sync.lora import AdapterVersions, LoraBackend
from asyncgrpo_core.sync.lora_store import AdapterStore
from tests.unit.adapter_fakes import AdaptedPolicy, AdapterServer, Uses

# What happens between two syncs: rollouts under some of the listed versions start (only under the newest) or end.
STEPS = st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 9))), min_size=1, max_size=25)


@given(max_staleness=st.integers(0, 3), more=st.integers(0, 3), steps=STEPS)
@settings(max_examples=40, deadline=None)
def test_invariants_of_versions(max_staleness, more, steps):
    with tempfile.TemporaryDirectory() as folder:
        max_loras = max_staleness + 2 + more
        server, uses, policy = AdapterServer(), Uses(), AdaptedPolicy()
        versions = AdapterVersions(
            AdapterStore(Path(folder), policy.save), max_staleness=max_staleness, max_loras=max_loras
        )
        backend = LoraBackend(server, versions, probe=None)  # type: ignore[arg-type]
        versions.joined(backend)
        versions.uses = uses
        running: set[int] = set()
        for newest, (starts, ending) in enumerate(steps):
            before, revoked = set(server.versions), uses.revoked_before
            backend.deliver(backend.prepare(newest, compare=True))
            assert len(server.versions) <= max_loras
            versions.retire(newest)
            taken = {version for version in running if version < uses.revoked_before}
            gone = (before | {newest}) - set(server.versions)
            assert not gone & (running - taken), "a version that a rollout names"
            assert taken <= set(range(newest - max_staleness)), "only what is older than max_staleness is taken away"
            assert uses.revoked_before >= revoked
            running -= taken
            kept = set(range(max(newest - max_staleness, 0), newest + 1))
            assert kept <= set(server.versions)
            assert running <= set(server.versions)
            for version in server.versions:
                server.read_again(versions.store.name(version))
            ages = sorted(server.versions)
            running = {v for v in running if ages.index(v) not in ending} | ({newest} if starts else set())
            uses.held = set(running)
