"""Order, timing, proof and failure of a publish, against a server in memory."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from asyncgrpo_core.errors import ConfigError, ServerError, ServerMismatchError, WeightSyncError
from asyncgrpo_core.server.capabilities import WORKER_EXTENSION
from asyncgrpo_core.sync.canary import Noise
from asyncgrpo_core.sync.fingerprint import fingerprint
from asyncgrpo_core.sync.publisher import Publisher, make_publisher
from tests.unit.sync_fakes import CANARY, FakeServer, Policy

LOOSE = Noise(margin=0.03, limit=0.1)  # bf16


def capabilities(**changes) -> SimpleNamespace:
    reported = {
        "weight_transfer_backend": "shm",
        "device_type": "cpu",
        "dtype": "float32",
        "routes": frozenset({"/weight_checker"}),
        "worker_extension": WORKER_EXTENSION,
        "data_parallel_size": 1,
        "raw": {"/server_info": {"vllm_config": {}}},
    }
    return SimpleNamespace(**{**reported, **changes})


def publisher(server: FakeServer, policy: Policy, tmp_path: Path, **options) -> Publisher:
    settings = {"capabilities": capabilities(), "backend": None, "directory": tmp_path, **options}
    return make_publisher(
        control=server, parameters=policy.parameters, score=policy.score, canary_ids=CANARY, **settings
    )


def without_init(server: FakeServer) -> list[str]:
    return [name for name in server.names if name != "init_weight_transfer"]


@pytest.mark.parametrize(("kv_after_sync", "clears"), [("recompute", True), ("keep", False)])
def test_order_of_one_sync(tmp_path: Path, kv_after_sync: str, clears: bool) -> None:
    server, policy = FakeServer(), Policy()
    server_calls_at_barrier: list[str] = []
    sync = publisher(
        server,
        policy,
        tmp_path,
        kv_after_sync=kv_after_sync,
        barrier=lambda: server_calls_at_barrier.extend(server.names),
    )
    report = sync.publish(7)
    assert without_init(server) == [
        "pause",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
        "resume",
        "prompt_logprobs",
    ]
    assert server_calls_at_barrier[-1] == "pause"
    assert ("pause", "keep", clears) in server.calls
    assert ("finish_weight_update", "7") in server.calls
    assert report.verified is True and report.version == 7
    assert report.max_abs_logp_diff == 0.0
    assert torch.equal(server.weights["w"], policy.weights["w"])


def test_no_file_is_left_behind(tmp_path: Path) -> None:
    server = FakeServer()
    sync = publisher(server, Policy(), tmp_path)
    sync.publish(0)
    server.fail = {"update_weights"}
    with pytest.raises(WeightSyncError):
        sync.publish(1)
    assert list(tmp_path.iterdir()) == []


def test_phases_are_timed_and_add_up(tmp_path: Path) -> None:
    """F091: weight_sync_s = pause + barrier + transfer, measured on a server with delays."""
    import time

    server = FakeServer(delay_s={"pause": 0.05, "update_weights": 0.10, "prompt_logprobs": 0.03})
    report = publisher(server, Policy(), tmp_path, barrier=lambda: time.sleep(0.02)).publish(0)
    assert report.pause_s >= 0.05
    assert report.barrier_s >= 0.02
    assert report.transfer_s >= 0.10
    assert report.verify_s >= 0.03
    assert report.total_s == pytest.approx(report.pause_s + report.barrier_s + report.transfer_s)


def test_deaf_server_is_found_at_the_first_sync_and_named(tmp_path: Path) -> None:
    server = FakeServer()
    server.deaf = True
    with pytest.raises(WeightSyncError, match=r"version 0 .*all 2 parameters \(w, bias\)"):
        publisher(server, Policy(), tmp_path).publish(0)
    assert not server.paused


def test_canary_alone_finds_a_deaf_server(tmp_path: Path) -> None:
    """Even when the plugin's report says that everything is well."""
    server = FakeServer()
    sync = publisher(server, Policy(), tmp_path)
    server.deaf = True
    server.reports = False
    from asyncgrpo_core.sync.shm_files import report_path, write_report

    def lie(version: str) -> None:
        path = report_path(Path(server._update["path"]))
        report = {"checked": 2, "differing": {}, "unchecked": {}, "missing": [], "load_s": 0, "compare_s": 0}
        write_report(path, int(version), report)

    server.finish_weight_update = lie  # type: ignore[method-assign]
    with pytest.raises(WeightSyncError, match="all 2 tensors are equal, so the two models compute differently"):
        sync.publish(0)


def test_later_stale_sync_is_found(tmp_path: Path) -> None:
    server, policy = FakeServer(), Policy()
    sync = publisher(server, policy, tmp_path)
    sync.publish(0)
    policy.step()
    server.deaf = True
    with pytest.raises(WeightSyncError, match="version 1"):
        sync.publish(1)


@pytest.mark.parametrize(
    ("call", "phase", "resumed"),
    [
        ("init_weight_transfer", "connect", False),
        ("pause", "pause", True),
        ("start_weight_update", "transfer", True),
        ("update_weights", "transfer", True),
        ("finish_weight_update", "transfer", True),
        ("resume", "resume", False),
    ],
)
def test_failed_call_says_phase_and_the_servers_words(tmp_path: Path, call: str, phase: str, resumed: bool) -> None:
    server = FakeServer(fail={call})
    with pytest.raises(WeightSyncError) as error:
        publisher(server, Policy(), tmp_path).publish(5)
    text = str(error.value)
    assert f"phase '{phase}'" in text and "version 5" in text
    assert f"answered 500 to /{call}: engine says no" in text
    assert isinstance(error.value.__cause__, ServerError)
    assert ("The server was resumed." in text) is resumed
    if resumed:
        assert server.names[-1] == "resume"


def test_server_that_cannot_be_resumed_is_said(tmp_path: Path) -> None:
    server = FakeServer(fail={"update_weights", "resume"})
    with pytest.raises(WeightSyncError, match="could not be resumed either and may stay paused"):
        publisher(server, Policy(), tmp_path).publish(0)


def test_interrupt_during_a_sync_resumes_the_server(tmp_path: Path) -> None:
    server = FakeServer()

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        publisher(server, Policy(), tmp_path, barrier=interrupted).publish(0)
    assert server.names[-1] == "resume"


def test_sync_after_a_failed_one_is_still_the_first(tmp_path: Path) -> None:
    server = FakeServer(fail={"update_weights"})
    sync = publisher(server, Policy(), tmp_path, verify_sync_every=10)
    with pytest.raises(WeightSyncError):
        sync.publish(0)
    server.fail = set()
    assert sync.publish(0).verified is True
    assert sync.stats()["count"] == 0


def test_unscored_canary_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match="could not be proved"):
        publisher(FakeServer(fail={"prompt_logprobs"}), Policy(), tmp_path).publish(0)


def test_missing_report_is_an_error(tmp_path: Path) -> None:
    server = FakeServer()
    server.reports = False
    with pytest.raises(WeightSyncError, match="no delivery report"):
        publisher(server, Policy(), tmp_path).publish(0)


def test_verify_every_third_and_counts(tmp_path: Path) -> None:
    server, policy = FakeServer(), Policy()
    sync = publisher(server, policy, tmp_path, verify_sync_every=3)
    verified = []
    for version in range(8):
        verified.append(sync.publish(version).verified)
        policy.step(0.01)
    assert verified == [True, None, None, True, None, None, True, None]
    stats = sync.stats()
    assert (stats["backend"], stats["count"], stats["verified"], stats["unverified"]) == ("shm", 7, 2, 0)
    assert stats["mean_s"] > 0


def test_verify_argument_overrides_the_schedule(tmp_path: Path) -> None:
    sync = publisher(FakeServer(), Policy(), tmp_path, verify_sync_every=2)
    assert sync.publish(0, verify=False).verified is True  # the first is always proved
    assert sync.publish(1, verify=True).verified is True
    assert sync.publish(2, verify=False).verified is None


def test_stats_add_to_those_of_earlier_attempts(tmp_path: Path) -> None:
    sync = publisher(FakeServer(delay_s={"pause": 0.02}), Policy(), tmp_path)
    sync.publish(10)
    sync.publish(11)
    now = sync.stats()
    before = {"count": 3, "verified": 2, "unverified": 1, "max_abs_logp_diff": 5e-4, "mean_s": 1.0}
    total = sync.stats(before)
    assert (total["count"], total["verified"], total["unverified"]) == (4, 3, 1)
    assert total["max_abs_logp_diff"] == 5e-4
    assert total["mean_s"] == pytest.approx((3 * 1.0 + now["mean_s"]) / 4)


def test_three_unverified_in_a_row_stop_the_run(tmp_path: Path) -> None:
    """bf16, a policy that moves less than the noise, and tensors that cannot be compared."""
    server, policy = FakeServer(), Policy()
    sync = unprovable(server, policy, tmp_path)
    assert sync.publish(0).verified is True  # from the dummy weights: nearer to the new ones
    policy.step(0.001)
    assert sync.publish(1).verified is False
    assert sync.publish(2).verified is False
    with pytest.raises(WeightSyncError, match="3 weight syncs in a row"):
        sync.publish(3)
    assert sync.stats()["unverified"] == 3


def test_a_proof_in_between_resets_the_streak(tmp_path: Path) -> None:
    server, policy = FakeServer(), Policy()
    sync = unprovable(server, policy, tmp_path)
    sync.publish(0)
    verified = []
    for version in range(1, 7):
        policy.step(1.0 if version == 3 else 0.001)
        verified.append(sync.publish(version).verified)
        if verified[-2:] == [False, False] and len(verified) > 4:
            break
    assert verified[:5] == [False, False, True, False, False]


def unprovable(server: FakeServer, policy: Policy, tmp_path: Path, **options) -> Publisher:
    """A publisher that has only the canary, in bf16."""
    sync = publisher(server, policy, tmp_path, noise=LOOSE, **options)
    backend = sync.backend

    def deliver(transfer):
        server.start_weight_update()
        server.update_weights({"path": str(transfer.payload.path), "version": transfer.version})
        server.finish_weight_update(str(transfer.version))

    backend.deliver = deliver  # type: ignore[method-assign]
    return sync


def sha256(tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


@pytest.mark.parametrize(
    ("changes", "asked"),
    [
        ({}, "weight_fingerprints"),
        ({"data_parallel_size": 2}, "weight_checker"),  # /collective_rpc asks one engine
        ({"worker_extension": ""}, "weight_checker"),
        ({"worker_extension": None, "data_parallel_size": None}, "weight_checker"),
    ],
)
def test_bf16_proof_by_checksums_when_the_policy_hardly_moves(changes, asked, tmp_path: Path) -> None:
    """And a tensor that matched once and does not match later stops the run, though the canary is close."""
    server, policy = FakeServer(), Policy()
    sync = unprovable(server, policy, tmp_path, capabilities=capabilities(**changes))
    sync._prover._checksum_dtype = torch.float32
    digest = fingerprint if asked == "weight_fingerprints" else sha256
    sync.backend.deliver = with_digests(sync.backend.deliver, server, digest)  # type: ignore[method-assign]
    assert sync.publish(0).verified is True
    policy.step(0.001)
    report = sync.publish(1)
    assert report.verified is True and "tensors are equal" in report.reason
    policy.step(0.001)
    server.deaf = True
    with pytest.raises(WeightSyncError, match="differ from what was sent: w"):
        sync.publish(2)
    assert {name for name in server.names if name.startswith("weight_")} == {asked}


def test_a_server_that_cannot_digest_in_place_is_asked_for_sha256_from_then_on(tmp_path: Path, caplog) -> None:
    server, policy = FakeServer(), Policy()
    sync = unprovable(server, policy, tmp_path)
    sync._prover._checksum_dtype = torch.float32
    server.fail = {"weight_fingerprints"}
    sync.backend.deliver = with_digests(sync.backend.deliver, server, sha256)  # type: ignore[method-assign]
    for version in range(3):
        policy.step(0.001)
        assert sync.publish(version).verified is True
    assert [name for name in server.names if name.startswith("weight_")] == [
        "weight_fingerprints",
        *["weight_checker"] * 3,
    ]
    assert len([record for record in caplog.records if "digest its weights in place" in record.getMessage()]) == 1


def test_a_server_that_does_not_answer_is_not_taken_for_one_that_cannot_digest(tmp_path: Path) -> None:
    server, policy = FakeServer(), Policy()
    sync = unprovable(server, policy, tmp_path)
    sync._prover._checksum_dtype = torch.float32
    sync.backend.deliver = with_digests(sync.backend.deliver, server, fingerprint)  # type: ignore[method-assign]
    server.gone = {"weight_fingerprints"}
    with pytest.raises(WeightSyncError, match="no connection to /weight_fingerprints"):
        sync.publish(0)
    server.gone = set()
    assert sync.publish(1).verified is True and "weight_checker" not in server.names


def with_digests(deliver, server: FakeServer, digest):
    def wrapped(transfer):
        deliver(transfer)
        server.checksums = {f"dp0:pp0:pcp0:tp0:{name}": digest(tensor) for name, tensor in server.weights.items()}

    return wrapped


def test_settings_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="verify_sync_every"):
        publisher(FakeServer(), Policy(), tmp_path, verify_sync_every=0)
    with pytest.raises(ConfigError, match="kv_after_sync"):
        publisher(FakeServer(), Policy(), tmp_path, kv_after_sync="maybe")
    with pytest.raises(ConfigError, match="canary"):
        make_publisher(
            control=FakeServer(),
            capabilities=capabilities(),
            backend="shm",
            parameters=Policy().parameters,
            score=Policy().score,
            canary_ids=[1],
            directory=tmp_path,
        )


def test_server_without_the_flag_is_refused(tmp_path: Path) -> None:
    """F095: the flag that exposes the sync routes is named."""
    with pytest.raises(ServerMismatchError, match="--weight-transfer-config"):
        publisher(FakeServer(), Policy(), tmp_path, capabilities=capabilities(weight_transfer_backend=None))


def test_server_that_says_nothing_is_tried(tmp_path: Path) -> None:
    silent = capabilities(weight_transfer_backend=None, raw={"/server_info": None})
    assert publisher(FakeServer(), Policy(), tmp_path, capabilities=silent).publish(0).verified is True
