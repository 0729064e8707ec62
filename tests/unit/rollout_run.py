"""Runs an AsyncRolloutLoop inside the test's own event loop, against tests.unit.fakes.FakeVLLM."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from asyncgrpo_core.metrics import MetricWindow
from asyncgrpo_core.rollout.buffer import SampleBuffer
from asyncgrpo_core.rollout.loop import AsyncRolloutLoop
from asyncgrpo_core.rollout.outbox import ErrorOutbox, MetricOutbox
from asyncgrpo_core.types import GroupRecord
from tests.unit.fakes import EOS_ID, FakeTokenizer, FakeVLLM

ROWS = [{"prompt": [{"role": "user", "content": f"q{i}"}], "answer": i} for i in range(6)]


def config_of(server: FakeVLLM | None = None, **changes: Any) -> SimpleNamespace:
    """The fields of AsyncGRPOConfig that the rollout side reads."""
    values = {
        "num_generations": 4,
        "max_completion_length": 16,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": None,
        "chat_template_kwargs": None,
        "vllm_server_base_url": "http://127.0.0.1:1" if server is None else server.base_url,
        "vllm_server_timeout": 10.0,
        "score_centering": True,
        "num_sampler_logprobs": 4,
        "max_concurrent_rollouts": 64,
        "max_staleness": 4,
        "rollout_worker_timeout": 30.0,
        "train_sampling_strategy": "sequential",
        "seed": 42,
        "max_tool_calling_iterations": None,
        "advantage_std": True,
        "tool_timeout": 10.0,
        "tool_failure_limit": 0.95,
        "tool_failure_window": 200,
        "max_tool_result_chars": 32768,
        "long_conversation": "stop",
        "turn_prompts": "render",
        "reward_timeout": 10.0,
    }
    return SimpleNamespace(**{**values, **changes})


def length_reward(completions: list, **_columns: Any) -> list[float]:
    """Differs within nearly every group of the fake server's replies."""
    return [float(len(c[0]["content"])) for c in completions]


@dataclass
class LoopRun:
    """One loop with everything that it is connected to; `records` collects what reached the buffer."""

    loop: AsyncRolloutLoop
    buffer: SampleBuffer
    version: Any
    allowance: Any
    heartbeat: Any
    failed: threading.Event
    records: list[GroupRecord] = field(default_factory=list)

    async def until(self, condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
        """Run the loop until the condition over `records` holds; the loop's own error is raised."""
        stop = False
        task = asyncio.create_task(self.loop.run(lambda: stop))
        deadline = time.monotonic() + timeout_s
        try:
            while not task.done():
                self.records += self.buffer.take()
                if condition():
                    return
                assert time.monotonic() < deadline, f"no such state after {timeout_s} s"
                await asyncio.sleep(0.005)
            await task
            raise AssertionError("the loop ended by itself")
        finally:
            stop = True
            if not task.done():
                await task

    def ended(self) -> list[GroupRecord]:
        return [record for record in self.records if record.outcome not in ("report", "filtered")]

    def metrics(self) -> dict[str, float]:
        window = MetricWindow()
        for record in self.records:
            window.extend(record.metrics)
        return window.reduce()


def loop_run(
    server: FakeVLLM,
    folder: Path,
    *,
    loop_cls: type[AsyncRolloutLoop] = AsyncRolloutLoop,
    rows: Any = ROWS,
    reward_funcs: list | None = None,
    allowance: int = 1_000_000,
    run_settings: dict | None = None,
    resume_state: dict | None = None,
    tokenizer: Any = None,
    tools: list | None = None,
    environment_factory: Any = None,
    score_queue_maxsize: int = 16,
    **config: Any,
) -> LoopRun:
    buffer = SampleBuffer(folder / "buffer")
    version, tokens, heartbeat = (SimpleNamespace(value=v) for v in (0, allowance, 0.0))
    failed = threading.Event()
    loop = loop_cls(
        config_of(server, **config),
        "policy",
        rows,
        [length_reward] if reward_funcs is None else reward_funcs,
        tokenizer or FakeTokenizer(),
        [EOS_ID if tokenizer is None else tokenizer.eos_token_id],
        buffer,
        version,
        tokens,
        heartbeat,
        failed,
        ErrorOutbox(buffer),
        MetricOutbox(),
        tools=tools,
        environment_factory=environment_factory,
        score_queue_maxsize=score_queue_maxsize,
        run_settings=run_settings,
        resume_state=resume_state,
    )
    return LoopRun(loop, buffer, version, tokens, heartbeat, failed)
