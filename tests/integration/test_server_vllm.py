"""The control client and the checks against the real vLLM CPU server (whatever weights it holds right now)."""

from __future__ import annotations

import asyncio
import math
import re
import threading
import time
from pathlib import Path

import httpx
import pytest

from asyncgrpo_core.errors import ServerError
from asyncgrpo_core.guard import process_table as table
from asyncgrpo_core.guard.records import read_record, record_path
from asyncgrpo_core.server.checks import ServerWants, check_server

pytestmark = pytest.mark.integration

CANARY = list(range(3, 60))


@pytest.fixture(autouse=True)
def left_running(vllm_server):
    """Leave the shared server as the others expect it."""
    yield
    if vllm_server.control.is_paused():
        vllm_server.control.resume()


def complete(server, **body) -> dict:
    body = {"model": server.served_model_name, "max_tokens": 16, "temperature": 1.0, **body}
    response = httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def test_capabilities_say_what_the_command_asked_for(vllm_server):
    """F102: the reported max_model_len, and the settings that our own flags set."""
    cap = vllm_server.control.capabilities()
    assert (0, 26) <= cap.version_number <= (0, 33)
    assert cap.served_models == [vllm_server.served_model_name]
    assert (cap.max_model_len, cap.dtype, cap.device_type) == (512, "float32", "cpu")
    assert (cap.logprobs_mode, cap.max_logprobs, cap.weight_transfer_backend) == ("processed_logprobs", 20, "shm")
    assert cap.dev_mode and cap.token_in_token_out and cap.weight_versions
    assert cap.chunked_prefill_possible is False
    assert vllm_server.control.world_size() == 1


def test_checks_accept_our_own_server_and_warn_once_about_dtype(vllm_server):
    """F104: one warning for a trainer of another dtype."""
    cap = vllm_server.control.capabilities()
    wants = {
        "served_model_name": vllm_server.served_model_name,
        "num_sampler_logprobs": 8,
        "needed_len": 512,
        "weight_transfer_backend": "shm",
    }
    assert check_server(cap, ServerWants(dtype="float32", **wants)) == []
    assert len(check_server(cap, ServerWants(dtype="bfloat16", **wants))) == 1


def test_prompt_logprobs_equal_the_log_probabilities_at_sampling(vllm_server):
    """The canary's numbers are those of the sampler: two independent paths through the server."""
    choice = complete(vllm_server, prompt=CANARY[:8], logprobs=1, return_token_ids=True, seed=3, ignore_eos=True)
    sampled = choice["logprobs"]["token_logprobs"]
    scored = vllm_server.control.prompt_logprobs(CANARY[:8] + choice["token_ids"])
    assert len(scored) == 7 + 16
    assert scored[7:] == pytest.approx(sampled, abs=1e-4)


def test_prompt_logprobs_do_not_depend_on_sampling_settings(vllm_server):
    """Processed log-probabilities are scaled at sampling, but never those of prompt tokens."""
    expected = vllm_server.control.prompt_logprobs(CANARY)
    choice = complete(vllm_server, prompt=CANARY, prompt_logprobs=0, temperature=0.2, top_k=3, max_tokens=1)
    rows = choice["prompt_logprobs"][1:]
    assert [row[str(token)]["logprob"] for row, token in zip(rows, CANARY[1:], strict=True)] == pytest.approx(
        expected, abs=1e-5
    )
    assert all(math.isfinite(value) and value <= 0 for value in expected)


def prefix_cache_hits(server) -> float:
    text = httpx.get(f"{server.base_url}/metrics", timeout=30).text
    found = re.findall(r"^vllm:prefix_cache_hits_total\{[^}]*\} (\S+)$", text, re.M)
    assert found, "the metric has another name now"
    return sum(map(float, found))


def test_the_canary_never_reads_the_prefix_cache(vllm_server):
    prompt = [3 + i % 60 for i in range(300)]
    complete(vllm_server, prompt=prompt, max_tokens=1)
    before = prefix_cache_hits(vllm_server)
    complete(vllm_server, prompt=prompt, max_tokens=1)
    cached = prefix_cache_hits(vllm_server)
    assert cached > before, "the prompt has to be in the cache for this test to say anything"
    assert len(vllm_server.control.prompt_logprobs(prompt)) == 299
    assert prefix_cache_hits(vllm_server) == cached


def test_seeded_requests_beside_long_prompts_do_not_end_the_engine(vllm_server):
    """More tokens at once than vLLM's own batch holds: with a split prefill the CPU engine would die here."""

    async def one(client: httpx.AsyncClient, index: int) -> list[int]:
        body = {
            "model": vllm_server.served_model_name,
            "prompt": [3 + (index + j) % 60 for j in range(200)],
            "max_tokens": 8,
            "seed": index,
            "return_token_ids": True,
        }
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["token_ids"]

    async def all_of_them() -> list[list[int]]:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=vllm_server.base_url, timeout=300, limits=limits) as client:
            return await asyncio.gather(*(one(client, i) for i in range(128)))

    assert asyncio.run(all_of_them()) == asyncio.run(all_of_them())
    assert vllm_server.control.is_healthy()


def test_pause_freezes_and_resume_goes_on(vllm_server):
    control = vllm_server.control
    control.pause("keep")
    assert control.is_paused()
    with pytest.raises(ServerError, match=r"within 1 s"):
        control.prompt_logprobs(CANARY, timeout_s=1.0)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(control.prompt_logprobs(CANARY)))
    thread.start()
    time.sleep(0.3)
    assert answers == []
    control.resume()
    thread.join(60)
    assert len(answers[0]) == len(CANARY) - 1 and not control.is_paused()


def test_what_the_server_refuses_is_said_in_its_own_words(vllm_server):
    with pytest.raises(ServerError, match=r"answered 404 to POST /v1/completions: The model `other` does not exist"):
        vllm_server.control.prompt_logprobs(CANARY, model="other")
    with pytest.raises(ServerError, match=r"/collective_rpc: .*no attribute 'no_such_method'"):
        vllm_server.control.collective_rpc("no_such_method")
    assert vllm_server.control.is_healthy()


def test_an_update_left_open_does_not_block_the_next_one(vllm_server):
    """A trainer died between start and finish; the next one opens its own update."""
    control = vllm_server.control
    before = control.prompt_logprobs(CANARY)
    control.start_weight_update()
    control.start_weight_update()
    with pytest.raises(ServerError):  # and this ends the second one
        control.update_weights({"no": "such field"})
    assert control.prompt_logprobs(CANARY) == pytest.approx(before, abs=1e-4)


def test_engine_processes_stand_in_the_guards_record(vllm_server):
    """vLLM's processes write their titles over their environment, mark included: the list is what finds them."""
    record = read_record(record_path(vllm_server.run_dir.resolve(), "server-0"))
    titles = {p: Path(f"/proc/{p.pid}/cmdline").read_text() for p in table.descendants(record.child.pid)}
    engine = {p for p, title in titles.items() if title.startswith("VLLM::")}
    assert engine, f"no engine process below the server: {titles}"
    assert engine <= set(record.descendants)
