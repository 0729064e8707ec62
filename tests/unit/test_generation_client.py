"""GenerationClient against the stand-in server: both routes, retries, refusals."""

from __future__ import annotations

import pytest

from asyncgrpo_core.errors import ServerError
from asyncgrpo_core.server.generation import GenerationClient, RequestRejectedError, SamplingSettings
from tests.unit.fakes import FakeVLLM

SAMPLING = SamplingSettings(max_tokens=16, num_logprobs=3)


def client_of(server: FakeVLLM, reasons: list[str] | None = None, **more) -> GenerationClient:
    on_retry = None if reasons is None else reasons.append
    settings = {"use_token_route": True, "backoff_s": 0.001, "timeout_s": 5.0, **more}
    return GenerationClient(server.base_url, "policy", on_retry=on_retry, **settings)


async def test_both_routes_give_the_same_turn() -> None:
    async with FakeVLLM(version="5") as server:
        async with client_of(server) as client:
            by_tokens = await client.generate([7, 8], SAMPLING, seed=1)
        async with client_of(server, use_token_route=False) as client:
            by_completion = await client.generate([7, 8], SAMPLING, seed=1)
    assert by_tokens.output_ids == by_completion.output_ids
    assert by_tokens.output_versions == [5] * len(by_tokens.output_ids) and by_completion.output_versions is None
    assert by_tokens.finish_reason == by_completion.finish_reason == "stop"
    assert [route for route, _ in server.requests] == ["/inference/v1/generate", "/v1/completions"]


async def test_transient_failures_are_retried_and_counted() -> None:
    """F071, F094."""
    statuses = {1: 503, 2: 429}
    reasons: list[str] = []
    async with FakeVLLM(fail=statuses.get) as server, client_of(server, reasons) as client:
        turn = await client.generate([7], SAMPLING, seed=1)
    assert turn.output_ids and len(server.requests) == 3
    assert [reason[:8] for reason in reasons] == ["HTTP 503", "HTTP 429"]


async def test_giving_up_names_route_status_and_text() -> None:
    async with FakeVLLM(fail=lambda _n: 500) as server, client_of(server, max_retries=2) as client:
        with pytest.raises(ServerError, match=r"inference/v1/generate failed 3 times.*500.*fake failure 500") as caught:
            await client.generate([7], SAMPLING, seed=1)
    assert not isinstance(caught.value, RequestRejectedError)


async def test_refusal_is_not_retried_and_shows_the_servers_text() -> None:
    reasons: list[str] = []
    async with FakeVLLM(fail=lambda _n: 400) as server, client_of(server, reasons) as client:
        with pytest.raises(RequestRejectedError, match="fake failure 400"):
            await client.generate([7], SAMPLING, seed=1)
    assert len(server.requests) == 1 and not reasons


async def test_slow_request_is_cut_off_and_retried() -> None:
    """F094: a generation request that times out is retried."""
    reasons: list[str] = []
    async with FakeVLLM(delay_s=5.0) as server, client_of(server, reasons, timeout_s=0.1, max_retries=1) as client:
        with pytest.raises(ServerError, match="Timeout"):
            await client.generate([7], SAMPLING, seed=1)
    assert len(reasons) == 1


async def test_unreachable_server_names_the_url() -> None:
    """F001."""
    client = GenerationClient("http://127.0.0.1:1", "policy", use_token_route=True, max_retries=1, backoff_s=0.001)
    async with client:
        with pytest.raises(ServerError, match=r"http://127\.0\.0\.1:1/inference"):
            await client.generate([7], SAMPLING, seed=1)


async def test_facts_say_whether_the_token_route_exists() -> None:
    async with FakeVLLM(token_route=False, max_model_len=99) as server, client_of(server) as client:
        facts = await client.facts()
    assert not facts.token_route and facts.max_model_len == 99 and facts.served_models == ("policy",)


async def test_metrics_absent_is_none() -> None:
    async with FakeVLLM() as server, client_of(server) as client:
        assert await client.metrics_text() is None
