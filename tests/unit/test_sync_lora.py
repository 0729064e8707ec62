"""Adapter versions at recording servers: order, windows, folders, probes, proofs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from asyncgrpo_core.errors import ConfigError, ServerError, WeightSyncError
from asyncgrpo_core.server.freshness import LEFT_OUT
from asyncgrpo_core.sync import lora
from asyncgrpo_core.sync.backend import TensorEvidence
from asyncgrpo_core.sync.canary import PROVED, UNVERIFIED, Evidence, judge, noise_for
from asyncgrpo_core.sync.fleet import FleetPublisher, SyncServer
from asyncgrpo_core.sync.lora import AdapterVersions
from asyncgrpo_core.sync.lora_store import AdapterStore
from asyncgrpo_core.sync.publisher import make_publisher
from asyncgrpo_core.sync.reports import DeliveryError
from tests.unit.adapter_fakes import AdaptedPolicy, AdapterServer, Uses, base_table
from tests.unit.sync_fakes import CANARY


class Run:
    """One attempt of a run: a policy, its servers, a publisher; `sync()` does what the pipeline does."""

    def __init__(
        self,
        output_dir: Path,
        servers: list[AdapterServer] | None = None,
        *,
        max_staleness: int = 1,
        max_loras: int | None = None,
        dtype: str = "float32",
        first_version: int = 0,
    ) -> None:
        self.policy, self.uses = AdaptedPolicy(), Uses()
        self.servers = servers or [AdapterServer()]
        self.store = AdapterStore(output_dir, self.policy.save)
        self.versions = AdapterVersions(self.store, max_staleness=max_staleness, max_loras=max_loras)
        self.dtype, self.version = dtype, first_version

        def maker(server: AdapterServer):
            return lambda on_failed: self.publisher_of(server, on_failed)

        self.fleet = FleetPublisher([SyncServer(f"http://s{i}", s, maker(s)) for i, s in enumerate(self.servers)])
        self.versions.start(self.servers)
        self.first = self.fleet.publish(first_version, verify=True)
        self.versions.uses = self.uses

    def publisher_of(self, server: AdapterServer, on_failed=None):
        capabilities = SimpleNamespace(
            dtype=self.dtype, routes=frozenset(), data_parallel_size=server.engines, worker_extension=None
        )
        return make_publisher(
            control=server,
            capabilities=capabilities,
            backend=None,
            parameters=lambda: iter(()),
            score=self.policy.score,
            canary_ids=CANARY,
            trainer_dtype=self.dtype,
            on_failed=on_failed,
            adapters=(self.versions, self.policy),
        )

    def sync(self, size: float = 0.5):
        self.policy.step(size)
        report = self.fleet.publish(self.version + 1)
        self.version += 1
        self.versions.retire(self.version)
        return report

    @property
    def folders(self) -> list[int]:
        return sorted(int(path.name.partition("-")[0]) for path in self.store.directory.iterdir())


def test_f139_only_the_adapter_is_sent_and_nothing_is_paused(tmp_path):
    run = Run(tmp_path)
    report = run.sync()
    assert report.verified is True and report.max_abs_logp_diff < 1e-9
    assert report.pause_s < 0.05 and report.num_bytes == sum(p.stat().st_size for p in run.store.write(1).iterdir())
    assert {kind for kind, _ in run.servers[0].calls} == {"load", "unload", "score"}
    assert run.fleet.stats()["backend"] == "lora"


def test_f143_the_next_version_is_loaded_and_proved_before_the_oldest_is_unloaded(tmp_path):
    run = Run(tmp_path, max_staleness=1)
    run.sync()
    assert run.servers[0].versions == [0, 1]
    run.servers[0].calls.clear()
    run.sync()
    assert [kind for kind, _ in run.servers[0].calls] == ["load", "score", "unload"]
    assert run.servers[0].order == ["load 2", "unload 0"]
    assert run.servers[0].versions == [1, 2]


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_f143_max_staleness_plus_one_versions_are_registered(tmp_path, max_staleness):
    run = Run(tmp_path, max_staleness=max_staleness)
    most = 0
    for _ in range(10):
        run.sync()
        assert run.servers[0].versions == list(range(max(run.version - max_staleness, 0), run.version + 1))
        most = max(most, len(run.servers[0].versions))
    assert most == max_staleness + 1


def test_f144_files_after_ten_syncs(tmp_path):
    """Registered versions have their folder, the one unloaded last keeps it for one more sync, the rest is gone."""
    run = Run(tmp_path, max_staleness=2)
    for _ in range(10):
        run.sync()
    assert run.folders == [7, 8, 9, 10]
    assert run.servers[0].versions == [8, 9, 10]
    assert run.store.directory == (tmp_path / ".vllm_lora").resolve()
    assert list(tmp_path.rglob("*.partial")) == []


def test_a_version_that_a_rollout_names_stays_while_there_is_room(tmp_path):
    run = Run(tmp_path, max_staleness=1, max_loras=5)
    run.sync()
    run.uses.held = {1}
    for _ in range(3):
        run.sync()
        assert 1 in run.servers[0].versions and 0 not in run.servers[0].versions
        run.servers[0].read_again(run.store.name(1))
    assert run.servers[0].versions == [1, 3, 4]
    run.uses.held.clear()
    run.sync()
    assert run.servers[0].versions == [4, 5]
    assert 1 in run.folders, "its last request may still be on its way out of the engine"
    run.sync()
    assert 1 not in run.folders


def test_a_version_that_outlives_the_room_is_taken_from_its_rollouts(tmp_path):
    """With --max-loras = max_staleness + 2 a rollout holds its version for one sync beyond the window."""
    run = Run(tmp_path, max_staleness=1, max_loras=3)
    run.sync()
    run.uses.held, run.uses.obedient = {0}, False
    run.sync()
    assert run.servers[0].versions == [0, 1, 2] and run.uses.revoked_before == 1
    run.uses.held.clear()  # the worker ends the rollout
    run.sync()
    assert run.servers[0].versions == [2, 3]
    assert "unload 0" in run.servers[0].order[: run.servers[0].order.index("load 3")], "room is made before the load"


def test_a_worker_that_does_not_let_go_costs_a_bounded_wait(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(lora, "_REVOKE_WAIT_S", 0.1)
    run = Run(tmp_path, max_staleness=0)
    run.uses.held, run.uses.obedient = {0}, False
    for _ in range(3):
        run.sync()
    assert run.servers[0].versions == [3]
    assert "Rollouts of policy version 0 have not ended" in caplog.text
    assert 0 in run.folders, "an engine may read it again as long as a request names it"
    run.uses.held.clear()
    run.sync()
    assert 0 not in run.folders


def test_every_server_gets_every_version(tmp_path):
    run = Run(tmp_path, [AdapterServer(), AdapterServer()])
    for _ in range(3):
        run.sync()
    assert [server.versions for server in run.servers] == [[2, 3], [2, 3]]
    assert run.servers[0].names == run.servers[1].names


def test_f143_a_fleet_loads_at_every_server_before_anything_is_unloaded(tmp_path):
    """With the least --max-loras: the first server holds the new version when room is made for it at the second."""
    run = Run(tmp_path, [AdapterServer(), AdapterServer()], max_staleness=1, max_loras=3)
    run.sync()
    run.uses.held = {0}
    everything: list[str] = []
    for index, server in enumerate(run.servers):
        server.calls = _Tee(everything, index)
    run.sync()
    assert everything == ["0 load 2", "1 load 2"]
    assert run.servers[1].versions == [0, 1, 2] and run.uses.held == set()
    run.sync()
    assert [call for call in everything[2:] if "load 0" in call or "load 3" in call] == [
        "0 unload 0", "1 unload 0", "0 load 3", "1 load 3"
    ]  # fmt: skip


class _Tee(list):
    """Calls of one server, also written into a list of all."""

    def __init__(self, everything: list[str], index: int) -> None:
        super().__init__()
        self._everything, self._index = everything, index

    def append(self, call: tuple[str, str]) -> None:
        super().append(call)
        if call[0] != "score":
            self._everything.append(f"{self._index} {call[0]} {call[1].rpartition('-v')[2]}")


def test_a_server_that_is_left_out_is_not_waited_for(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("asyncgrpo_core.sync.fleet._HANGING_SHARE", 0.0)
    run = Run(tmp_path, [AdapterServer(), AdapterServer()], max_staleness=0)
    run.servers[1].healthy = False
    run.sync()
    caplog.clear()
    run.sync()
    assert "could not be unloaded" not in caplog.text, "nobody asks it"
    assert run.servers[0].versions == [2]


def test_a_server_that_comes_back_gets_the_versions_that_rollouts_may_name(tmp_path, monkeypatch):
    monkeypatch.setattr("asyncgrpo_core.sync.fleet._HANGING_SHARE", 0.0)
    run = Run(tmp_path, [AdapterServer(), AdapterServer()], max_staleness=2)
    run.sync()
    run.servers[1].healthy = False
    run.sync()
    assert run.fleet.versions == [2, LEFT_OUT]
    run.servers[1].restart()
    run.sync()
    assert run.fleet.versions == [3, 3]
    assert run.servers[1].versions == [1, 2, 3]


def test_a_later_attempt_unloads_and_removes_what_an_earlier_one_left(tmp_path):
    first = Run(tmp_path)
    first.sync()
    server, old = first.servers[0], set(first.servers[0].names)
    server.names["somebody-elses"] = "/adapters/other"
    second = Run(tmp_path, [server], first_version=1)
    assert second.first.verified is True and second.first.version == 1
    assert old.isdisjoint(server.names) and "somebody-elses" in server.names
    assert {path.name.rpartition("-")[2] for path in second.store.directory.iterdir()} == {second.store.stem[-8:]}
    assert second.store.name(1) not in old


def test_closing_leaves_the_newest_version_at_the_server(tmp_path):
    run = Run(tmp_path)
    for _ in range(3):
        run.sync()
    run.fleet.close()
    assert run.servers[0].versions == [3]
    run.servers[0].read_again(run.store.name(3))


def test_every_engine_is_asked_and_one_that_is_wrong_is_found(tmp_path):
    """Data parallelism: the load reaches all engines or fails; each of them has to score the canary."""
    run = Run(tmp_path, [AdapterServer(engines=3)])
    run.servers[0].engines_asked.clear()
    run.sync()
    assert run.servers[0].engines_asked == [0, 1, 2]
    run.servers[0].swap = {2}
    with pytest.raises(DeliveryError, match="reached the server wrong"):
        run.sync()


def test_one_engine_is_not_asked_for_by_number(tmp_path):
    run = Run(tmp_path)
    run.sync()
    assert set(run.servers[0].engines_asked) == {None}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_probe_finds_a_server_that_ignores_adapters(tmp_path, dtype):
    """The first version changes nothing, so its own canary would look right."""
    server = AdapterServer(engines=2)
    server.deaf = {1}
    with pytest.raises(DeliveryError, match=r"does not apply adapters .*\(data-parallel replica 1\)"):
        Run(tmp_path, [server], dtype=dtype)
    assert server.versions == []


def test_the_probe_tells_a_wrong_base_model(tmp_path):
    with pytest.raises(DeliveryError, match="base model is not the one") as caught:
        Run(tmp_path, [AdapterServer(base=base_table(seed=5))])
    assert "--load-format auto" in caught.value.fix


def test_the_probe_leaves_nothing(tmp_path):
    run = Run(tmp_path)
    assert run.servers[0].versions == [0] and len(run.servers[0].names) == 1
    assert run.folders == [0]
    assert torch.equal(run.policy.delta, torch.zeros(8, 8))


def test_an_adapter_without_effect_is_refused(tmp_path):
    class Numb(AdaptedPolicy):
        def set_probe(self, share: float) -> None:
            super().set_probe(0.0)

    run = object.__new__(Run)
    run.__dict__.update(policy=Numb(), servers=[AdapterServer()], dtype="float32")
    run.store = AdapterStore(tmp_path, run.policy.save)
    run.versions = AdapterVersions(run.store, max_staleness=1)
    with pytest.raises(WeightSyncError, match="does not change the policy's log-probabilities") as caught:
        run.publisher_of(run.servers[0]).publish(0)
    assert isinstance(caught.value.__cause__, ConfigError)
    assert torch.equal(run.policy.delta, torch.zeros(8, 8))


def test_bf16_steps_below_the_rounding_count_as_proved_by_probe_and_load(tmp_path):
    run = Run(tmp_path, dtype="bfloat16")
    for _ in range(5):
        assert run.sync(size=1e-4).verified is True
    assert run.fleet.stats()["unverified"] == 0


def test_bf16_versions_that_are_far_off_fail(tmp_path):
    run = Run(tmp_path, dtype="bfloat16")
    run.sync()
    run.servers[0].swap = {0}
    with pytest.raises(DeliveryError, match="above the noise"):
        run.sync(size=2.0)


def test_f32_nearer_to_the_old_version_is_not_proved_by_a_load():
    loaded = TensorEvidence(kind="adapter", compared=1)
    stale = Evidence([-1.0, -2.0], [-1.0004, -2.0004], [-1.0, -2.0], noise_for("float32", "float32"), loaded)
    assert judge(stale).state == UNVERIFIED
    rounded = Evidence([-1.0, -2.0], [-1.01, -2.01], [-1.0, -2.0], noise_for("bfloat16", "bfloat16"), loaded)
    assert judge(rounded).state == PROVED


@pytest.mark.parametrize("listed", [None, "/elsewhere"])
def test_a_server_that_lists_something_else_is_refused(tmp_path, listed):
    """Several HTTP processes at one address: the one that is asked need not be the one that loaded it."""
    run = Run(tmp_path)
    server, real = run.servers[0], run.servers[0].adapters

    def adapters():
        names = {name: folder for name, folder in real().items() if name != run.store.name(1)}
        return names if listed is None else {**names, run.store.name(1): listed}

    server.adapters = adapters
    with pytest.raises(WeightSyncError, match="lists it as .*--api-server-count 1"):
        run.sync()


def test_a_refused_load_names_the_phase_and_leaves_older_versions(tmp_path):
    run = Run(tmp_path)
    run.servers[0].fail = {"load"}
    with pytest.raises(WeightSyncError, match=r"version 1 \(lora\) failed in phase 'transfer'.*answered 500"):
        run.sync()
    assert run.servers[0].versions == [0]


def test_an_unload_that_fails_stops_nothing(tmp_path, caplog):
    run = Run(tmp_path, max_staleness=0)
    run.servers[0].fail = {"unload"}
    run.sync()
    assert "could not be unloaded" in caplog.text and run.version == 1


def test_a_folder_is_there_whole_or_not_at_all(tmp_path):
    def save(folder: Path) -> Path:
        (folder / "adapter_model.safetensors").write_text("half")
        raise OSError(28, "No space left on device")

    store = AdapterStore(tmp_path, save)
    with pytest.raises(WeightSyncError, match="No space left"):
        store.write(3)
    assert list(store.directory.iterdir()) == []


def test_a_folder_of_its_own_for_every_attempt(tmp_path):
    """A server must never read an older file under a path that it has read before."""
    policy = AdaptedPolicy()
    one, two = AdapterStore(tmp_path, policy.save), AdapterStore(tmp_path, policy.save)
    assert one.write(4) != two.write(4) and one.name(4) != two.name(4)
    assert one.owns(str(two.write(4))) and not one.owns("/somewhere/else") and not one.owns("")
    written = one.write(4)
    policy.step()
    assert one.write(4) == written, "written once for all servers of a sync"


def test_an_inner_folder_is_found_after_the_rename(tmp_path):
    """PEFT puts an adapter with a name of its own into a folder of that name."""

    def save(folder: Path) -> Path:
        inner = folder / "mine"
        inner.mkdir()
        return AdaptedPolicy().save(inner)

    place = AdapterStore(tmp_path, save).write(0)
    assert place.name == "mine" and (place / "adapter_model.safetensors").is_file()


def test_leftovers_of_a_server_that_is_away_are_an_error_at_the_start(tmp_path):
    server = AdapterServer()
    server.healthy = False
    with pytest.raises(ServerError):
        Run(tmp_path, [server])
