"""Load metrics from polls, preemptions as differences."""

from __future__ import annotations

from asyncgrpo_core.metrics import MetricWindow
from asyncgrpo_core.rollout.admission import RolloutGate
from asyncgrpo_core.rollout.clocks import LoadWatch
from asyncgrpo_core.rollout.load_control import ConcurrencyCap
from asyncgrpo_core.rollout.outbox import MetricOutbox
from asyncgrpo_core.server.generation import GenerationClient
from asyncgrpo_core.server.load import LoadSample
from tests.unit.fakes import FakeVLLM


def reduced(samples: list[LoadSample]) -> dict[str, float]:
    box, window = MetricOutbox(), MetricWindow()
    watch = LoadWatch(None, ConcurrencyCap(8, 100), RolloutGate(8), box)
    for sample in samples:
        watch.record(sample)
    window.extend(box.drain())
    return window.reduce()


def test_preemptions_are_the_growth_and_survive_a_server_restart() -> None:
    """F073: 10 -> 14 -> (restart) 3 -> 5: 4 + 3 + 2."""
    samples = [LoadSample(preemptions=total) for total in (10.0, 14.0, 3.0, 5.0)]
    assert reduced(samples) == {"rollout/vllm_preemption_count": 9.0}


def test_usage_is_averaged_over_the_polls() -> None:
    """F072."""
    got = reduced([LoadSample(0.2, 1.0, 0.0), LoadSample(0.6, 3.0, 2.0)])
    assert got == {
        "rollout/vllm_kv_cache_usage_frac": 0.4,
        "rollout/vllm_running_requests": 2.0,
        "rollout/vllm_queued_requests": 1.0,
    }


async def test_a_poll_moves_the_gate() -> None:
    """F065, F110, F111."""
    text = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="25"} 1.0\nvllm:kv_cache_usage_perc{engine="0"} 0.9\n'
    async with FakeVLLM() as server, GenerationClient(server.base_url, "policy", use_token_route=True) as client:
        gate = RolloutGate(8)
        watch = LoadWatch(client, ConcurrencyCap(8, 100), gate, MetricOutbox())
        await watch.poll()
        assert gate.limit == 8  # no /metrics
        server.metrics = text
        await watch.poll()
        assert gate.limit == 4  # 400 tokens / 100
        await watch.poll()
        assert gate.limit == 2  # 70 % of 4, cut
