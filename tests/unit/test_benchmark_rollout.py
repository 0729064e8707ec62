"""The rollout benchmark's own parts: recorded replies, the stand-in server, windows and thirds."""

from __future__ import annotations

import asyncio
import json

import pytest

from asyncgrpo_core.server.generation import GenerationClient
from asyncgrpo_core.server.wire import SamplingSettings, completions_body, tokens_body
from benchmarks.replay_server import Connection, Replay, form_of
from benchmarks.rollout_parts import rows
from benchmarks.rollout_replies import DATA, RECORDED_TOKENS, ROUTES, recording, replies
from benchmarks.rollout_worker import Window, growth

TRL_BODY = json.dumps({"model": "policy", "prompt": [1], "n": 1, "return_token_ids": True, "logprobs": 0}).encode()


@pytest.mark.parametrize("form", ROUTES)
def test_replies_of_the_recorded_length_are_the_recorded_bytes(form) -> None:
    assert [reply.decode() for reply in replies(form, RECORDED_TOKENS)] == recording()["forms"][form]


def test_the_recording_is_small_and_has_no_special_token() -> None:
    """A special token inside a reply would slow TRL's parsing many times over."""
    assert DATA.stat().st_size < 300_000
    for body in recording()["forms"]["trl"]:
        assert not {0, 1, 2} & set(json.loads(body)["choices"][0]["token_ids"])


@pytest.mark.parametrize("form", ROUTES)
@pytest.mark.parametrize("num_tokens", [1, 100, 300])
def test_resized_replies_hold_as_much_of_everything(form, num_tokens) -> None:
    for body in replies(form, num_tokens, 5):
        reply = json.loads(body)
        (choice,) = reply["choices"]
        assert len(choice["token_ids"]) == num_tokens == reply["usage"]["completion_tokens"]
        logprobs = choice["logprobs"]
        if "content" in logprobs:
            assert [token["token_id"] for token in logprobs["content"]] == choice["token_ids"]
            assert choice["weight_versions"] == [{"version": "5", "start": 0, "end": num_tokens}]
        else:
            for name in ("token_logprobs", "tokens", "top_logprobs", "text_offset"):
                assert len(logprobs[name]) == num_tokens
            assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
            assert len(choice["text"]) == pytest.approx(num_tokens, rel=0.5, abs=2)


def test_form_follows_from_what_is_asked_for() -> None:
    sampled, head = SamplingSettings(max_tokens=4), SamplingSettings(max_tokens=4, num_logprobs=8)
    asked = {
        "trl": (b"/v1/completions", TRL_BODY),
        "completions-0": (b"/v1/completions", completions_body("policy", [1], sampled, 1, "a")),
        "completions-8": (b"/v1/completions", completions_body("policy", [1], head, 1, "a")),
        "tokens-0": (b"/inference/v1/generate", tokens_body("policy", [1], sampled, 1, "a")),
        "tokens-8": (b"/inference/v1/generate", tokens_body("policy", [1], head, 1, "a")),
    }
    assert {form: form_of(*request) for form, request in asked.items()} == {form: form for form in ROUTES}
    with pytest.raises(ValueError, match="logprobs=3"):
        form_of(b"/v1/completions", b'{"logprobs":3}')


@pytest.mark.parametrize("token_route", [True, False])
async def test_our_client_reads_the_stand_in(token_route) -> None:
    replay = Replay(40)
    server = await asyncio.get_running_loop().create_server(lambda: Connection(replay), "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    client = GenerationClient(url, "policy", use_token_route=token_route)
    try:
        facts = await client.facts()
        assert facts.token_route and facts.served_models == ("policy",)
        assert "kv_cache_usage" in (await client.metrics_text() or "")
        for num_logprobs in (0, 8):
            sampling = SamplingSettings(max_tokens=40, num_logprobs=num_logprobs)
            turns = await asyncio.gather(*(client.generate([1] * 300, sampling, seed, "a") for seed in range(20)))
            assert [len(turn.output_ids) for turn in turns] == [40] * 20
            assert turns[0].output_versions == ([1] * 40 if token_route else None)
            assert (turns[0].output_sampler_logprobs is not None) == (num_logprobs > 0)
    finally:
        await client.close()
        server.close()


def test_requests_that_arrive_in_pieces_and_together_are_each_answered() -> None:
    class Transport:
        written = b""

        def write(self, data: bytes) -> None:
            self.written += data

    request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(TRL_BODY) + TRL_BODY
    stream = request * 3
    transport, connection = Transport(), Connection(Replay(2))
    connection.connection_made(transport)  # type: ignore[arg-type]
    for start in range(0, len(stream), 37):
        connection.data_received(stream[start : start + 37])
    assert transport.written.count(b"HTTP/1.1 200 OK") == 3


def test_windows_thirds_and_parts_by_hand() -> None:
    assert Window(tokens=1000, cpu_s=2.0, wall_s=4.0, stand_in_cpu_s=0.1).rate == 500.0
    flat = growth([50.0] * 10 + [100.0] * 10 + [101.0] * 10)
    assert (flat["middle_third_mib"], flat["growth_mib"], flat["flat"]) == (100.0, 1.0, True)
    assert growth([100.0] * 20 + [105.0] * 10)["flat"] is False  # above 4 MiB and above 2 %
    assert growth([1000.0] * 20 + [1015.0] * 10)["flat"] is True  # 1.5 %
    spent = rows({"parts": {"a": 1.0, "b": 2.0}, "cpu_s": 4.0, "tokens": 2_000_000})
    assert spent == [("b", 1.0, 0.5), ("a", 0.5, 0.25), ("HTTP, event loop, rest", 0.5, 0.25)]
