"""Weight sync on a real vLLM CPU server: what arrives, what is reported, what running requests live through."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from asyncgrpo_core.errors import WeightSyncError
from asyncgrpo_core.server.capabilities import WORKER_EXTENSION
from asyncgrpo_core.sync.canary import canary_token_ids
from asyncgrpo_core.sync.fingerprint import fingerprint
from asyncgrpo_core.sync.publisher import Publisher, make_publisher
from tests.integration.sync_policy import TrainedPolicy

pytestmark = pytest.mark.integration

LIMIT = 1e-3
HTTP = httpx.Client(limits=httpx.Limits(max_connections=64))  # one for all: making one costs 50 ms of CPU


@pytest.fixture(scope="module")
def original(vllm_server) -> Iterator[None]:
    """Give the shared server its first weights back when this module is done."""
    yield
    publisher = make(vllm_server, TrainedPolicy(vllm_server.model_path))
    publisher.publish(0)
    publisher.close()


@pytest.fixture
def policy(vllm_server, original) -> TrainedPolicy:
    return TrainedPolicy(vllm_server.model_path)


@pytest.fixture
def publisher(vllm_server, policy: TrainedPolicy) -> Iterator[Publisher]:
    made = make(vllm_server, policy)
    yield made
    made.close()
    assert not vllm_server.control.is_paused()
    assert list(Path("/dev/shm").glob(f"{made.backend._stem}*")) == []


def make(server, policy: TrainedPolicy, **options: Any) -> Publisher:
    return make_publisher(
        control=server.control,
        capabilities=server.control.capabilities(),
        backend=None,
        parameters=policy.parameters,
        score=policy.score,
        canary_ids=canary_token_ids(policy.vocab_size),
        **options,
    )


def generate(server, prompt: list[int], num_tokens: int, salt: str = "0") -> dict[str, Any]:
    """One token-in/token-out request of exactly `num_tokens`; the first choice of the reply."""
    body = {
        "model": server.served_model_name,
        "token_ids": prompt,
        "cache_salt": salt,
        "sampling_params": {"max_tokens": num_tokens, "temperature": 1.0, "logprobs": 0, "ignore_eos": True},
    }
    reply = HTTP.post(f"{server.base_url}/inference/v1/generate", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]


def test_changed_weights_arrive(vllm_server, policy, publisher, record_property) -> None:
    """Every sync is proved, and a prompt that the proof does not use agrees as well."""
    publisher.publish(0)
    other_prompt = canary_token_ids(policy.vocab_size, length=100, seed=5)
    before = vllm_server.control.prompt_logprobs(other_prompt)
    seconds = []
    for version in (1, 2, 3):
        policy.change()
        report = publisher.publish(version)
        assert report.verified is True
        assert report.max_abs_logp_diff is not None and report.max_abs_logp_diff <= LIMIT
        seconds.append(report.total_s)
        after = vllm_server.control.prompt_logprobs(other_prompt)
        differences = [abs(a - b) for a, b in zip(after, policy.score(other_prompt), strict=True)]
        assert max(differences) <= LIMIT
    assert max(abs(a - b) for a, b in zip(before, after, strict=True)) > 0.5  # the change could be seen
    stats = publisher.stats()
    assert (stats["count"], stats["verified"], stats["unverified"]) == (3, 3, 0)
    record_property("max_abs_logp_diff", stats["max_abs_logp_diff"])
    print(f"max |logp diff| {stats['max_abs_logp_diff']:.2e}, {min(seconds):.3f} to {max(seconds):.3f} s per sync")


def test_the_workers_digest_their_weights_in_place(vllm_server, policy, publisher) -> None:
    """By the keys of vLLM's digests, changed by a sync where those change, and equal to the trainer's of a tensor."""
    control, capabilities = vllm_server.control, vllm_server.control.capabilities()
    assert (capabilities.worker_extension, capabilities.data_parallel_size) == (WORKER_EXTENSION, 1)
    found = []
    for version in range(2):
        publisher.publish(version)
        found.append((control.weight_fingerprints(), control.weight_checker()["checksums"]))
        assert control.weight_fingerprints() == found[-1][0]
        policy.change()
    (before, before_sha256), (after, after_sha256) = found
    assert before.keys() == before_sha256.keys()
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {name for name in after if after_sha256[name] != before_sha256[name]} != set()
    norm = "model.layers.0.input_layernorm.weight"
    policy_then = TrainedPolicy(vllm_server.model_path)
    assert before[f"dp0:pp0:pcp0:tp0:{norm}"] == fingerprint(policy_then.model.get_parameter(norm))


def test_version_is_reported_by_later_generations(vllm_server, publisher) -> None:
    publisher.publish(41)
    publisher.publish(42)
    choice = generate(vllm_server, [3, 4, 5], 8)
    assert choice["weight_versions"] == [{"version": "42", "start": 0, "end": 8}]


@pytest.mark.parametrize("kv_after_sync", ["recompute", "keep"])
def test_running_requests_live_through_a_sync(vllm_server, policy, kv_after_sync: str) -> None:
    """They finish at full length; under `recompute` their later tokens are the new policy's own, under `keep` not."""
    publisher = make(vllm_server, policy, kv_after_sync=kv_after_sync)
    publisher.publish(50)
    prompts = [canary_token_ids(policy.vocab_size, length=40, seed=100 + i) for i in range(8)]
    stop = threading.Event()
    with ThreadPoolExecutor(len(prompts)) as pool:
        # Each its own length, so that they do not all end at the same moment.
        lengths = [130 + 45 * i for i in range(len(prompts))]
        running = [
            pool.submit(generate_until, stop, vllm_server, prompt, length, "50")
            for prompt, length in zip(prompts, lengths, strict=True)
        ]
        policy.change()
        prepare = publisher.backend.prepare

        def prepare_and_wait(version: int, *, compare: bool) -> Any:
            """The last step before the pause: a slow machine's requests may all have ended while it prepared."""
            transfer = prepare(version, compare=compare)
            wait_until_running(vllm_server, 6)
            return transfer

        publisher.backend.prepare = prepare_and_wait
        try:
            report = publisher.publish(51)
        finally:
            stop.set()
        done = [
            (prompt, length, choice)
            for prompt, length, future in zip(prompts, lengths, running, strict=True)
            for choice in future.result(timeout=120)
        ]
    publisher.close()
    assert report.verified is True
    crossed = 0
    worst = 0.0
    for prompt, length, choice in done:
        assert len(choice["token_ids"]) == length and choice["finish_reason"] == "length"
        spans = {span["version"]: (span["start"], span["end"]) for span in choice["weight_versions"]}
        assert set(spans) <= {"50", "51"}
        if set(spans) != {"50", "51"}:
            continue
        crossed += 1
        start, end = spans["51"]
        sampled = [token["logprob"] for token in choice["logprobs"]["content"]]
        trained = policy.score(prompt + choice["token_ids"])[len(prompt) - 1 :]
        worst = max(worst, *(abs(sampled[t] - trained[t]) for t in range(start, end)))
    assert crossed >= 2, "the sync missed the running requests"
    print(f"{kv_after_sync}: {crossed} requests crossed, worst later |logp diff| {worst:.2e}")
    if kv_after_sync == "recompute":
        assert worst <= LIMIT
    else:
        assert worst > 10 * LIMIT


def generate_until(stop: threading.Event, server, prompt: list[int], tokens: int, salt: str) -> list[dict]:
    """One request after the other until `stop` is set: however fast the server is, one is always under way."""
    choices = []
    while not stop.is_set():
        choices.append(generate(server, prompt, tokens, salt=salt))
    return choices


def wait_until_running(server, wanted: int, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        text = HTTP.get(f"{server.base_url}/metrics", timeout=10).text
        lines = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running")]
        if lines and float(lines[0].rsplit(" ", 1)[1]) >= wanted:
            return
        time.sleep(0.01)
    raise AssertionError(f"{wanted} requests were not running within {timeout_s} s")


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("lm_head", "what was sent: lm_head.weight (tied to model.embed_tokens.weight)."),
        ("all", "what was sent: all "),
    ],
)
def test_injected_fault_is_found_at_the_first_sync(vllm_server, policy, publisher, fault: str, named: str) -> None:
    policy.change()
    publisher.backend.fault = fault
    with pytest.raises(WeightSyncError) as error:
        publisher.publish(0)
    assert named in str(error.value)
    assert ("model.embed_tokens.weight" in str(error.value)) or fault == "lm_head"
    publisher.backend.fault = None
    assert publisher.publish(1).verified is True


@pytest.mark.parametrize("fault", ["lm_head", "all"])
def test_the_canary_alone_finds_the_fault(vllm_server, policy, publisher, fault: str) -> None:
    """The second line of defence: as if the plugin's own comparison had said nothing."""
    publisher.publish(0)
    policy.change()
    backend = publisher.backend
    backend.fault = fault
    read, backend._read_evidence = backend._read_evidence, lambda transfer: None
    with pytest.raises(WeightSyncError, match="above the noise"):
        publisher.publish(1)
    backend.fault, backend._read_evidence = None, read
    assert publisher.publish(2).verified is True


def test_failed_update_leaves_a_server_that_goes_on(vllm_server, policy, publisher) -> None:
    """The file vanishes on its way: phase and the server's words in the error, old weights, not paused."""
    publisher.publish(0)
    prompt = canary_token_ids(policy.vocab_size, seed=9)
    before = vllm_server.control.prompt_logprobs(prompt)
    backend = publisher.backend
    prepare = backend.prepare

    def losing(version: int, *, compare: bool):
        transfer = prepare(version, compare=compare)
        transfer.payload.path.unlink()
        return transfer

    backend.prepare = losing
    with pytest.raises(WeightSyncError, match=r"phase 'transfer'.*no weight file .*The server was resumed"):
        publisher.publish(1)
    after = vllm_server.control.prompt_logprobs(prompt)
    assert max(abs(a - b) for a, b in zip(before, after, strict=True)) <= 1e-5
    backend.prepare = prepare
    policy.change()
    assert publisher.publish(1).verified is True


def test_tensor_with_a_wrong_shape_is_refused_and_repaired(vllm_server, policy, publisher) -> None:
    """Loading itself fails halfway: the server must not be left with half-made layers."""
    publisher.publish(0)
    names = [name for name, _ in policy.parameters()]
    good = publisher.backend._parameters

    def cut():
        for name, tensor in good():
            yield name, tensor[:-1] if name == names[-2] else tensor

    publisher.backend._parameters = cut
    with pytest.raises(WeightSyncError, match="phase 'transfer'"):
        publisher.publish(1)
    assert len(generate(vllm_server, [3, 4, 5], 4)["token_ids"]) == 4
    publisher.backend._parameters = good
    assert publisher.publish(1).verified is True


def test_round_trip_under_load(vllm_server, policy, record_property) -> None:
    """Every sync proved while 32 requests are always in flight; reports how long it takes."""
    publisher = make(vllm_server, policy)
    publisher.publish(0)
    stop = threading.Event()

    def keep_asking(i: int) -> int:
        done = 0
        while not stop.is_set():
            done += len(generate(vllm_server, [3 + i % 5, 4, 5], 40)["token_ids"])
        return done

    with ThreadPoolExecutor(32) as pool:
        clients = [pool.submit(keep_asking, i) for i in range(32)]
        wait_until_running(vllm_server, 16)
        reports = []
        for version in range(1, 6):
            policy.change(0.02)
            reports.append(publisher.publish(version))
        stop.set()
        tokens = sum(client.result(timeout=120) for client in clients)
    publisher.close()
    assert all(report.verified for report in reports) and tokens > 0
    record_property("mean_s", publisher.stats()["mean_s"])
    for report in reports:
        times = (report.pause_s, report.transfer_s, report.verify_s)
        print("under load: pause {:.3f}, transfer {:.3f}, proof {:.3f} s".format(*times))
