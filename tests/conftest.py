"""Fixtures shared by all tests: one real vLLM server for the whole pytest run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import asyncgrpo_core

if TYPE_CHECKING:  # a GPU machine without pydantic runs tests/gpu
    from asyncgrpo_core.server.control import VLLMControl
    from asyncgrpo_core.server.process import RunningServer

SERVED_MODEL_NAME = "policy"
MAX_MODEL_LEN = 512


@dataclass
class LiveServer:
    """A running vLLM CPU server. Tests share it: leave it resumed, and expect any weights in it.

    Attributes:
        base_url: e.g. "http://127.0.0.1:41234".
        control: a control client for it.
        model_path: folder with the config, tokenizer and weights it was started with (float32).
        served_model_name: the name requests use.
        run_dir: its run folder (logs/server-0.log).
    """

    base_url: str
    control: VLLMControl
    model_path: str
    served_model_name: str
    run_dir: Path
    running: RunningServer


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's policy, or a tiny random model of the same family while there is none."""
    embedded = Path(asyncgrpo_core.__file__).parent / "quickstart" / "policy"
    if (embedded / "config.json").exists():
        return embedded
    from tests.tiny_model import write_model

    return write_model(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="session")
def vllm_server(tmp_path_factory: pytest.TempPathFactory, policy_folder: Path) -> Iterator[LiveServer]:
    """ONE real vLLM for the whole run: CPU, float32, shm weight transfer, dev mode, token route, 64 sequences."""
    from asyncgrpo_core.server.command import ServerNeeds, server_command
    from asyncgrpo_core.server.control import VLLMControl
    from asyncgrpo_core.server.process import free_port, start_server
    from asyncgrpo_core.server.settings import ServerConfig

    run_dir = tmp_path_factory.mktemp("vllm-run")
    needs = ServerNeeds(
        model_path=str(policy_folder),
        served_model_name=SERVED_MODEL_NAME,
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        num_sampler_logprobs=8,
        max_concurrent_rollouts=64,
        device="cpu",
        backend="shm",
        cpu_count=os.cpu_count() or 1,
        port=free_port(),
    )
    running = start_server(server_command(ServerConfig(load_format="auto"), needs), run_dir=run_dir)
    try:
        with VLLMControl(running.base_url, timeout_s=120.0) as control:
            yield LiveServer(running.base_url, control, str(policy_folder), SERVED_MODEL_NAME, run_dir, running)
    finally:
        running.stop()
