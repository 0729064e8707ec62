"""Weight sync of each architecture on a vLLM server of its own: random weights there, then proved deliveries (F138)."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from asyncgrpo_core.models.forward import install_packed_forward, score_tokens
from asyncgrpo_core.models.parameters import iter_server_parameters
from asyncgrpo_core.server.command import ServerNeeds, server_command
from asyncgrpo_core.server.control import VLLMControl
from asyncgrpo_core.server.process import free_port, start_server
from asyncgrpo_core.server.settings import ServerConfig
from asyncgrpo_core.sync.canary import canary_token_ids
from asyncgrpo_core.sync.publisher import make_publisher
from tests.tiny_architectures import (
    HYBRID_ARCHITECTURES,
    NAMES,
    NEED_TORCHVISION,
    VISION_LANGUAGE_ARCHITECTURES,
    make_architecture,
    write_architecture,
)

pytestmark = [pytest.mark.integration, pytest.mark.slow]

LIMIT, LIMIT_BFLOAT16 = 1e-3, 0.1  # nats: largest difference of a token; the mean where the server has bfloat16
# vLLM's CPU build does not serve the other buffered ones in float32 (latent attention, ungrouped sigmoid scores).
SERVED = [*NAMES, "glm4_moe", "gemma4", *HYBRID_ARCHITECTURES]
HAS_TORCHVISION = importlib.util.find_spec("torchvision") is not None


@pytest.fixture
def control(request, tmp_path: Path) -> Iterator[VLLMControl]:
    """A server of one architecture that starts with random weights: nothing but a sync can make it right."""
    architecture = request.param
    is_vision_language = architecture in VISION_LANGUAGE_ARCHITECTURES
    if architecture in NEED_TORCHVISION and not HAS_TORCHVISION:
        pytest.skip("vLLM's class of this model needs torchvision, which is not installed")
    folder = write_architecture(tmp_path / "model", architecture)
    needs = ServerNeeds(
        model_path=str(folder),
        served_model_name="policy",
        dtype="float32",
        max_model_len=256,
        num_sampler_logprobs=8,
        max_concurrent_rollouts=4,
        device="cpu",
        backend="shm",
        cpu_count=os.cpu_count() or 1,
        port=free_port(),
    )
    extra = ["--limit-mm-per-prompt", '{"image": 0, "video": 0}'] if is_vision_language else []
    # A vision tower is not sent: it has to be the checkpoint's own.
    settings = ServerConfig(
        load_format="auto" if is_vision_language else "dummy",
        dtype="bfloat16" if architecture in HYBRID_ARCHITECTURES else None,  # all that vLLM's CPU delta rule takes
        extra_args=extra,
    )
    running = start_server(server_command(settings, needs), run_dir=tmp_path)
    try:
        with VLLMControl(running.base_url, timeout_s=120.0) as made:
            yield made
    finally:
        running.stop()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("architecture", "control"), [(n, n) for n in SERVED], indirect=["control"], ids=SERVED)
def test_f138_every_architecture_is_synced_and_proved(architecture: str, control: VLLMControl, record_property) -> None:
    policy = install_packed_forward(make_architecture(architecture, seed=1))
    prompts = [canary_token_ids(200, length=n, seed=n, exclude=(0, 2)) for n in (32, 70)]
    publisher = make_publisher(
        control=control,
        capabilities=control.capabilities(),
        backend=None,
        parameters=lambda: iter_server_parameters(policy),
        score=lambda ids: score_tokens(policy, ids),
        canary_ids=prompts[0],
    )
    before = control.prompt_logprobs(prompts[1])
    for version in (0, 1):
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        assert publisher.publish(version, verify=True).verified is True
        after = control.prompt_logprobs(prompts[1])
        own = score_tokens(policy, prompts[1])
        differences = [abs(a - b) for a, b in zip(after, own, strict=True)]
        largest = max(differences)
        if architecture in HYBRID_ARCHITECTURES:
            assert sum(differences) / len(differences) <= LIMIT_BFLOAT16
        else:
            assert largest <= LIMIT
        assert max(abs(a - b) for a, b in zip(before, after, strict=True)) > 0.5
        before = after
    record_property("max_abs_logp_diff", max(largest, publisher.max_abs_logp_diff))
    print(f"{architecture}: max |logp diff| {max(largest, publisher.max_abs_logp_diff):.2e}")
    publisher.close()
