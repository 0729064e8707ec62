"""Several servers in the config, at the start of training, and between trainer and worker."""

from __future__ import annotations

import json
from dataclasses import replace
from multiprocessing import get_context
from types import SimpleNamespace
from typing import ClassVar

import pytest

from asyncgrpo_core.errors import ConfigError, ServerError, ServerMismatchError
from asyncgrpo_core.launch import doctor
from asyncgrpo_core.launch.run_folder import Attempt, read_attempt, write_attempt
from asyncgrpo_core.launch.serve import serve
from asyncgrpo_core.launch.vllm_server import ServerSlot
from asyncgrpo_core.metrics import MetricWindow
from asyncgrpo_core.rollout.sampling import sampling_settings
from asyncgrpo_core.rollout.worker import RolloutWorker
from asyncgrpo_core.rollout.worker_process import SharedValues
from asyncgrpo_core.server.capabilities import ServerCapabilities
from asyncgrpo_core.server.freshness import LEFT_OUT
from asyncgrpo_core.sync.reports import SyncReport
from asyncgrpo_core.training import servers as module
from asyncgrpo_core.training.config import AsyncGRPOConfig
from asyncgrpo_core.training.pipeline import Pipeline
from asyncgrpo_core.training.run_context import PolicyLink
from asyncgrpo_core.training.servers import Servers, differences, meet_servers
from tests.unit.fakes import ThreadedFakeVLLM
from tests.unit.rollout_run import config_of
from tests.unit.test_launch_config import parse, refused

URLS = ["http://a:1", "http://b:2"]
POLICY = PolicyLink(lambda: [], lambda ids: [], [1, 2], "float32", "cpu")


def capabilities(**changes) -> ServerCapabilities:
    values = {
        "version": "0.32.0",
        "routes": frozenset({"/pause"}),
        "served_models": ["policy"],
        "max_model_len": 512,
        "max_logprobs": 20,
        "dtype": "float32",
        "logprobs_mode": "processed_logprobs",
        "dev_mode": True,
        "weight_transfer_backend": "shm",
        "token_in_token_out": True,
        "device_type": "cpu",
        "chunked_prefill_possible": False,
        "model_path": "/models/policy",
        "says_settings": True,
    }
    return ServerCapabilities(**{**values, **changes})


def servers(tmp_path, *caps: ServerCapabilities, **settings) -> Servers:
    args = AsyncGRPOConfig(output_dir=str(tmp_path), vllm_server_base_url=URLS[: len(caps)], use_cpu=True, **settings)
    return Servers(args, "policy", POLICY, [SimpleNamespace(base_url=u) for u in args.server_urls], list(caps))


# the config


@pytest.mark.parametrize("key", ["server.url", "training.vllm_server_base_url"])
def test_a_list_of_servers_reaches_both_places(key):
    cfg = parse([f"{key}=[http://a:1, http://b:2]"])
    assert cfg.server.urls == URLS and cfg.server.url == URLS and cfg.training.vllm_server_base_url == URLS


def test_one_server_is_a_list_of_one_and_none_is_started_here():
    assert parse(["server.url=http://a:1/"]).server.urls == ["http://a:1"]
    assert parse(["server.url=[http://a:1/]"]).server.url == "http://a:1"
    assert parse().server.urls == []


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        ("[http://a:1, b:2]", ["b:2", "http://"]),
        ("[http://a:1, http://a:1/]", ["none twice"]),
        ("[]", ["at least one"]),
    ],
)
def test_every_url_is_checked(value, parts):
    message = refused([f"server.url={value}"])
    for part in ["server.url", *parts]:
        assert part in message


def test_the_list_survives_the_attempts_file(tmp_path):
    write_attempt(tmp_path, Attempt(1, None, None, URLS, "policy"))
    assert read_attempt(tmp_path).server_url == URLS
    assert json.loads((tmp_path / "attempt.json").read_text())["server_url"] == URLS


def test_the_launcher_waits_for_every_server():
    with ThreadedFakeVLLM() as one:
        slot = ServerSlot(None, [one.base_url, "http://127.0.0.1:1"])
        assert not slot.is_ours and slot.url == f"{one.base_url}, http://127.0.0.1:1"
        with pytest.raises(ServerError, match=r"http://127\.0\.0\.1:1"):
            slot.start(None, 0.3, lambda _line: None)
        with ThreadedFakeVLLM() as two:
            ServerSlot(None, [one.base_url, two.base_url]).start(None, 5.0, lambda _line: None)


def test_doctor_asks_every_server(monkeypatch):
    def ask(cfg, url, exam):
        if url == URLS[1]:
            raise ServerError(f"{url} is away")

    monkeypatch.setattr(doctor, "_check_running_server", ask)
    exam = doctor.Examination()
    doctor._check_server(exam, parse(["server.url=[http://a:1, http://b:2]"]), None)
    assert [(f.level, f.text) for f in exam.findings] == [
        ("ok", "http://a:1 fits this config"),
        ("fail", "http://b:2 is away"),
    ]


def test_serve_starts_nothing_beside_servers_that_run():
    with pytest.raises(ConfigError, match="http://a:1.*http://b:2.*no server to start"):
        serve(parse(["server.url=[http://a:1, http://b:2]"]))


# what holds for all


@pytest.mark.parametrize("backend", ["ipc", "nccl"])
@pytest.mark.parametrize("said", [True, False])
def test_what_the_server_was_started_for_says_whether_the_gpu_is_shared(tmp_path, backend, said):
    """The config need not name the backend; "ipc" means one GPU for both, wherever it is said."""
    settings = {"weight_sync_backend": backend} if said else {}
    made = servers(tmp_path, capabilities(weight_transfer_backend=backend, device_type="cuda"), **settings)
    made.policy = replace(POLICY, device="cuda")
    (server,) = made.sync_servers()
    assert server.make_publisher(lambda: None).backend.name == backend


def test_the_smallest_bounds_hold(tmp_path):
    """F102: the default token_budget is the shortest max_model_len."""
    made = servers(tmp_path, capabilities(max_model_len=512, max_logprobs=-1), capabilities(max_model_len=300))
    assert made.token_budget() == 300
    assert made.worker_settings() == {
        "use_token_route": True,
        "max_model_len": 300,
        "max_logprobs": 20,
        "candidate_sets": False,
        "send_seed": True,
    }
    seedless = capabilities(chunked_prefill_possible=True, token_in_token_out=False, max_model_len=None)
    settings = servers(tmp_path, seedless, capabilities()).worker_settings()
    assert (settings["send_seed"], settings["use_token_route"], settings["max_model_len"]) == (False, False, 512)
    with pytest.raises(Exception, match="http://a:1 does not report max_model_len"):
        servers(tmp_path, capabilities(max_model_len=None)).token_budget()


@pytest.mark.parametrize(
    ("sampling", "second", "expected"),
    [
        ({"top_k": 4}, {}, True),
        ({"top_k": 4, "min_p": 0.1}, {"return_sampling_mask": False}, False),
        ({"top_k": 4, "top_p": 0.9}, {"token_in_token_out": False}, False),
        ({}, {}, False),
    ],
)
def test_f135_replies_must_carry_candidate_sets_where_all_servers_return_them(tmp_path, sampling, second, expected):
    able = {"return_sampling_mask": True}
    made = servers(tmp_path, capabilities(**able), capabilities(**(able | second)), **sampling)
    settings = made.worker_settings()
    assert settings["candidate_sets"] is expected
    assert sampling_settings(made.args, [2], candidate_sets=settings["candidate_sets"]).candidate_sets is expected


def test_differences_are_named_with_both_servers():
    """F106: servers of one run serve one model."""
    mine = capabilities()
    assert differences(URLS, [mine, mine]) == []
    longer, chatty, old = (
        replace(mine, max_model_len=600),
        replace(mine, max_logprobs=5),
        replace(mine, token_in_token_out=False),
    )
    for other, part in (
        (longer, "--max-model-len is 512"),
        (chatty, "--max-logprobs is 20"),
        (old, "--enable-scale-out"),
    ):
        (warning,) = differences(URLS, [mine, other])
        assert part in warning and all(url in warning for url in URLS)
    with pytest.raises(ServerMismatchError) as caught:
        differences(URLS, [mine, replace(mine, model_path="/models/other")])
    assert all(part in str(caught.value) for part in [*URLS, "/models/policy", "/models/other"])


class Control:
    """What `meet_servers` asks, by URL."""

    known: ClassVar[dict[str, ServerCapabilities]] = {}

    def __init__(self, url: str, timeout_s: float) -> None:
        self.base_url = url

    def wait_until_ready(self, timeout_s: float) -> None:
        if self.base_url not in self.known:
            raise ServerError(f"No healthy vLLM server answers at {self.base_url}")

    def capabilities(self) -> ServerCapabilities:
        return self.known[self.base_url]


def test_every_server_is_waited_for_and_checked(tmp_path, monkeypatch, caplog):
    """F106: another served name is refused, naming the server, what it serves and the flag."""
    monkeypatch.setattr(module, "VLLMControl", Control)
    args = AsyncGRPOConfig(output_dir=str(tmp_path), vllm_server_base_url=URLS, max_completion_length=64, use_cpu=True)
    monkeypatch.setattr(Control, "known", {URLS[0]: capabilities()})
    with pytest.raises(ServerError, match=URLS[1]):
        meet_servers(args, "policy", POLICY)
    monkeypatch.setattr(Control, "known", {URLS[0]: capabilities(), URLS[1]: capabilities(served_models=["other"])})
    with pytest.raises(ServerMismatchError, match=f"^{URLS[1]}: .*'other'.*'policy'.*--served-model-name policy"):
        meet_servers(args, "policy", POLICY)
    monkeypatch.setattr(Control, "known", {URLS[0]: capabilities(), URLS[1]: capabilities(dtype="bfloat16")})
    with pytest.raises(ServerMismatchError, match="rotary"):
        meet_servers(args, "policy", replace(POLICY, longest_sample=100))
    made = meet_servers(args, "policy", POLICY)
    assert [c.base_url for c in made.controls] == URLS
    assert f"{URLS[1]}: The vLLM server computes in bfloat16" in caplog.text


def test_each_server_gets_a_publisher_and_is_asked_again_when_it_is_met_again(tmp_path, monkeypatch):
    made = servers(tmp_path, capabilities(), capabilities(), max_completion_length=64)
    asked = []
    monkeypatch.setattr(module, "make_publisher", lambda **settings: settings)
    for control in made.controls:
        control.capabilities = lambda url=control.base_url: asked.append(url) or capabilities(max_logprobs=1)
    one, two = made.sync_servers()
    assert (one.url, two.url) == tuple(URLS)
    hook = object()
    settings = one.make_publisher(hook)
    assert settings["control"] is made.controls[0] and settings["on_failed"] is hook and asked == []
    with pytest.raises(ServerMismatchError, match="--max-logprobs"):
        one.make_publisher(hook)  # another process, with other flags
    assert asked == [URLS[0]]


def test_ipc_is_for_one_server(tmp_path):
    with pytest.raises(ConfigError, match="ipc.*names 2"):
        servers(tmp_path, capabilities(), capabilities(), weight_sync_backend="ipc").sync_servers()


# between trainer and worker


def test_the_worker_is_told_the_version_of_each_server():
    shared = SharedValues.create(get_context("spawn"), 4, 100, servers=2)
    assert list(shared.server_versions) == [4, 4]
    worker = object.__new__(RolloutWorker)
    worker._shared = shared
    worker.set_server_version(1, LEFT_OUT)
    worker.set_server_version(0, 5)
    assert list(shared.server_versions) == [5, LEFT_OUT] and shared.version.value == 4


@pytest.mark.parametrize(("urls", "count"), [("http://a:1", 1), (URLS, 2)])
def test_a_worker_has_one_version_per_server(tmp_path, urls, count):
    worker = RolloutWorker(
        config=config_of(vllm_server_base_url=urls),
        model_name="policy",
        dataset=[],
        reward_funcs=[],
        processing_class=None,
        eos_token_ids=[2],
        buffer=None,
        initial_allowance=1,
        initial_version=7,
    )
    assert list(worker._shared.server_versions) == [7] * count


def test_the_pipeline_passes_versions_on_and_counts_servers_left_out():
    told: list = []

    class Publisher:
        versions: ClassVar = [3, LEFT_OUT]
        left_out: ClassVar = ["http://b:2"]

        def publish(self, version):
            pipeline._server_has(0, version)
            return SyncReport(version, True, 0.0, 1, 2, 3, 6, 4)

    pipeline = object.__new__(Pipeline)
    pipeline.worker = pipeline.adapters = None
    pipeline._server_has(0, 2)  # before there is a worker: its own start takes the version
    pipeline.worker = SimpleNamespace(
        set_version=lambda v: told.append(v), set_server_version=lambda i, v: told.append((i, v))
    )
    pipeline.publisher, pipeline.policy_version, pipeline._unsynced_steps = Publisher(), 2, 1
    pipeline.window = MetricWindow()
    pipeline.sync()
    assert told == [(0, 3), 3]
    got = pipeline.window.reduce()
    assert got["sync/servers_left_out_count"] == 1
    parts = {"": 6, "_pause": 1, "_barrier": 2, "_transfer": 3}  # F091
    assert {name: value for name, value in got.items() if name.startswith("perf/")} == {
        f"perf/weight_sync{part}_s": seconds for part, seconds in parts.items()
    }
    Publisher.versions = [3]
    pipeline.sync()
    assert "sync/servers_left_out_count" not in pipeline.window.reduce()
