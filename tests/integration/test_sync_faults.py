"""A server started with ASYNCGRPO_SYNC_FAULT: with dummy weights, the run must stop at its first sync."""

from __future__ import annotations

import os

import pytest

from asyncgrpo_core.errors import WeightSyncError
from asyncgrpo_core.server.command import ServerNeeds, server_command
from asyncgrpo_core.server.control import VLLMControl
from asyncgrpo_core.server.process import free_port, start_server
from asyncgrpo_core.server.settings import ServerConfig
from asyncgrpo_core.sync.canary import canary_token_ids
from asyncgrpo_core.sync.publisher import make_publisher
from tests.integration.sync_policy import TrainedPolicy

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.mark.parametrize(("fault", "named"), [("lm_head", "sent: lm_head.weight"), ("all", "sent: all ")])
def test_server_with_a_fault_in_its_environment(tmp_path, policy_folder, fault: str, named: str) -> None:
    needs = ServerNeeds(
        model_path=str(policy_folder),
        served_model_name="policy",
        dtype="float32",
        max_model_len=256,
        num_sampler_logprobs=8,
        max_concurrent_rollouts=8,
        device="cpu",
        backend="shm",
        cpu_count=os.cpu_count() or 1,
        port=free_port(),
    )
    settings = ServerConfig(load_format="dummy", env={"ASYNCGRPO_SYNC_FAULT": fault})
    running = start_server(server_command(settings, needs), run_dir=tmp_path)
    policy = TrainedPolicy(str(policy_folder))
    try:
        with VLLMControl(running.base_url, timeout_s=60.0) as control:
            publisher = make_publisher(
                control=control,
                capabilities=control.capabilities(),
                backend="shm",
                parameters=policy.parameters,
                score=policy.score,
                canary_ids=canary_token_ids(policy.vocab_size),
            )
            with pytest.raises(WeightSyncError, match=named):
                publisher.publish(0)
    finally:
        running.stop()
