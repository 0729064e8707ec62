"""Harnesses that use OpenAI's own clients against the proxy, one rollout at a time."""

from __future__ import annotations

import httpx
import numpy as np
import openai
import pytest

from asyncgrpo_core.server.wire import parse_tokens_reply
from tests.unit.agent_parts import call_text, scripted
from tests.unit.harness_parts import (
    ADD,
    AddingAgent,
    ClientLoop,
    SyncAgent,
    adding_script,
    generated,
    ready,
    rollout,
    texts,
    trained,
)


class StreamingAgent(AddingAgent):
    stream = True


@pytest.mark.parametrize("agent", [AddingAgent, StreamingAgent])
@pytest.mark.parametrize("turn_prompts", ["render", "append"])
async def test_tool_calls_over_several_turns_stay_one_sample(tmp_path, agent, turn_prompts) -> None:
    """F158, F184, F187: what went over the wire as messages is trained as the tokens that were sampled."""
    async with (
        scripted(adding_script, version="3") as server,
        ready(server, tmp_path, agent, turn_prompts=turn_prompts) as loop,
    ):
        done = await rollout(loop)
    assert len(done.rollout.turns) == 3 == len(server.requests) and done.reconciled.forks == 0
    (sequence,) = done.reconciled.sequences
    assert trained(done) == generated(done) and set(sequence.versions.tolist()) == {3}
    assert [turn.finish_reason for turn in done.rollout.turns] == ["stop"] * 3
    assert sum(map(len, (t.output_ids for t in done.rollout.turns))) == sequence.num_trained == len(sequence.top)
    roles = [message["role"] for message in done.rollout.completion]
    assert roles == ["assistant", "tool", "assistant", "tool", "assistant"]
    assert done.rollout.completion[1]["name"] == "add"
    assert done.rollout.reward == 7.0 and (done.rollout.tool_call_count, done.rollout.tool_failure_count) == (2, 0)
    assert done.context.calls_per_message == [1, 1]


async def test_the_turns_are_the_servers_own_tokens_and_log_probabilities(tmp_path) -> None:
    """F184: the recorded turn equals the reply that the server sends for the same request."""
    async with scripted(adding_script) as server, ready(server, tmp_path, AddingAgent) as loop:
        done = await rollout(loop)
        for (route, body), turn in zip(list(server.requests), done.rollout.turns, strict=True):
            async with httpx.AsyncClient() as api:
                reply = await api.post(server.base_url + route, json=body)
            again = parse_tokens_reply(reply.content, body["token_ids"], loop.sampling)
            assert (turn.prompt_ids, turn.output_ids) == (again.prompt_ids, again.output_ids)
            assert turn.output_log_probs == again.output_log_probs
            np.testing.assert_array_equal(turn.output_sampler_logprobs.ids, again.output_sampler_logprobs.ids)
    seeds = [body["sampling_params"]["seed"] for _, body in server.requests]
    assert len(set(seeds[:3])) == 3, "every turn has its own seed, as in the run's own loop"


async def test_a_blocking_client_runs_in_a_thread(tmp_path) -> None:
    """A sync run_harness sees its row and its tools; tools are off, so the reply is plain text."""
    async with scripted(lambda rng, _prompt: f"{rng.random()}") as server, ready(server, tmp_path, SyncAgent) as loop:
        done = await rollout(loop)
    text = texts(done)[0].removesuffix("<|im_end|>")
    assert done.rollout.completion == [{"role": "assistant", "content": text}]
    assert done.rollout.reward == len(text) > 0


class Asker(ClientLoop):
    """Sends the requests of a test (`fields`) one after another and keeps what it got."""

    fields: list = []  # noqa: RUF012
    got: list = []  # noqa: RUF012

    async def run_harness(self, base_url, api_key, prompt, row):
        self.got.clear()
        api = self.api(base_url, api_key)
        for fields in self.fields:
            try:
                raw = await api.chat.completions.with_raw_response.create(
                    **{"model": "x", "messages": prompt, **fields}
                )
                self.got.append((raw.headers.get("x-asyncgrpo-ignored"), raw.parse()))
            except openai.APIStatusError as error:
                self.got.append((error.status_code, error.body))
        self.models = [card.id async for card in api.models.list()]


async def ask(tmp_path, script, *fields: dict, **settings):
    Asker.fields = list(fields)
    async with scripted(script) as server, ready(server, tmp_path, Asker, **settings) as loop:
        done = await rollout(loop)
        assert loop.models == ["policy"]
    return done, list(Asker.got), server


async def test_malformed_calls_stay_in_the_content_and_are_counted(tmp_path) -> None:
    """F187: a call that cannot be read is one failed call, beside a good one in the same reply."""
    bad = '<tool_call>\n{"name": "add", \n</tool_call>'
    done, got, _ = await ask(tmp_path, lambda *_: f"{bad}\n{call_text('add', a=1, b=2)}", {"tools": [ADD]})
    message = got[0][1].choices[0].message
    assert bad in message.content and [c.function.name for c in message.tool_calls] == ["add"]
    assert got[0][1].choices[0].finish_reason == "tool_calls"
    assert (done.rollout.tool_call_count, done.rollout.tool_failure_count) == (2, 1)
    assert [call.kind for call in done.context.calls] == ["malformed"]


async def test_without_tools_in_the_request_nothing_is_a_call(tmp_path) -> None:
    text = "x " + call_text("add", a=1, b=2)
    done, got, _ = await ask(tmp_path, lambda *_: text, {}, {"tools": [ADD], "tool_choice": "none"})
    for _ignored, reply in got:
        assert reply.choices[0].message.content == text and reply.choices[0].message.tool_calls is None
        assert reply.choices[0].finish_reason == "stop"
    assert done.rollout.tool_call_count == 0


async def test_a_reply_cut_off_by_the_runs_limit_calls_nothing(tmp_path) -> None:
    text = call_text("add", a=1, b=2) + " and then on and on " * 20
    done, got, _ = await ask(
        tmp_path, lambda *_: text, {"tools": [ADD], "max_tokens": 10_000}, max_completion_length=99
    )
    choice = got[0][1].choices[0]
    assert (
        choice.finish_reason == "length" and choice.message.tool_calls is None and choice.message.content == text[:99]
    )
    assert got[0][1].usage.completion_tokens == 99 == len(done.rollout.turns[0].output_ids)
    assert got[0][1].usage.prompt_tokens == len(done.rollout.turns[0].prompt_ids)


async def test_stop_strings_and_max_tokens_cut_the_recorded_turn(tmp_path) -> None:
    """What the harness does not see is not trained on; what it sees has the server's own log-probabilities."""
    fields = {"stop": ["Observation:"]}, {"max_tokens": 4}, {}
    done, got, _ = await ask(tmp_path, lambda *_: "Thought. Observation: made up", *fields)
    stopped, short, whole = (reply.choices[0] for _, reply in got)
    assert (stopped.message.content, stopped.finish_reason) == ("Thought. ", "stop")
    assert (short.message.content, short.finish_reason) == ("Thou", "length")
    assert texts(done) == ["Thought. Observation:", "Thou", "Thought. Observation: made up<|im_end|>"]
    assert whole.finish_reason == "stop" and trained(done) == generated(done)


async def test_overruled_settings_are_named_and_the_servers_requests_are_the_runs(tmp_path) -> None:
    done, got, server = await ask(tmp_path, lambda *_: "y", {"temperature": 0.1, "seed": 5}, {"temperature": 1.0})
    assert [ignored for ignored, _ in got] == ["temperature, seed", None]
    assert {body["sampling_params"]["temperature"] for _, body in server.requests} == {1.0}
    assert all(body["sampling_params"]["seed"] != 5 for _, body in server.requests)
    assert len(done.rollout.turns) == 2


async def test_what_is_refused_makes_no_turn(tmp_path) -> None:
    fields = {"n": 2}, {"messages": [{"role": "x", "content": "y"}]}, {"messages": []}, {}
    done, got, server = await ask(tmp_path, lambda *_: "y", *fields)
    assert [status for status, _ in got[:3]] == [400] * 3 and "n=2" in got[0][1]["message"]
    assert len(done.rollout.turns) == len(server.requests) == 1


class Intruder(ClientLoop):
    """Tries other rollouts' keys, other paths, too much, and no JSON; then asks properly."""

    seen: list = []  # noqa: RUF012

    async def run_harness(self, base_url, api_key, prompt, row):
        seen = self.seen
        seen.append((base_url, api_key))
        headers = {"Authorization": f"Bearer {api_key}"}
        body = {"messages": prompt}
        async with httpx.AsyncClient() as http:
            url = f"{base_url}/chat/completions"
            other = base_url.replace(base_url.split("/")[-2], "0" * 32)

            async def ask(url: str, key: str | bytes | None = api_key, **what) -> int:
                headers = (
                    {}
                    if key is None
                    else {"Authorization": b"Bearer " + (key if isinstance(key, bytes) else key.encode())}
                )
                what = what or {"json": body}
                return (await http.post(url, headers=headers, **what)).status_code

            self.statuses = [
                await ask(url, None),
                await ask(url, "sk-rollout-ü"),
                await ask(url, b"\xff\xfe"),
                (await http.get(f"{base_url}/models")).status_code,
                await ask(f"{other}/chat/completions"),
                await ask(f"{base_url}/responses"),
                (await http.get(url, headers=headers)).status_code,
                await ask(url, content=b"{"),
                await ask(url, content=b"[" * 100_000),
                await ask(url, content=b" " * (33 << 20)),
            ]
            for old_url, old_key in seen[:-1]:
                self.statuses += [await ask(f"{old_url}/chat/completions", old_key), await ask(url, old_key)]
            assert "error" in (await http.post(f"{base_url}/responses", json=body, headers=headers)).json()
            (await http.post(url, json=body, headers=headers)).raise_for_status()


async def test_each_rollout_has_its_own_url_and_key_for_as_long_as_it_runs(tmp_path) -> None:
    Intruder.seen.clear()
    async with scripted(lambda *_: "y") as server, ready(server, tmp_path, Intruder) as loop:
        first = await rollout(loop)
        assert loop.statuses == [401, 401, 401, 401, 404, 404, 405, 400, 400, 413]
        await rollout(loop, 1)
        assert loop.statuses[10:] == [410, 401], "an ended rollout, and its key on another's URL"
    assert len(first.rollout.turns) == 1 and len(server.requests) == 2
