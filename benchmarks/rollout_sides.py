"""One side of the rollout benchmark: a rollout worker and, in place of the trainer, a consumer of its samples.

    python -m benchmarks.rollout_sides ours|trl --url http://127.0.0.1:PORT --tokenizer FOLDER ...

Prints {"pid": worker} when the worker runs; then answers every line on stdin with the tokens consumed so far.
Runs as its own process, so that only the worker's CPU time counts. `trl` runs in TRL's environment: nothing here
imports asyncgrpo_core except for `ours`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from benchmarks.rollout_replies import MODEL, prompt_messages

NUM_GENERATIONS = 8
NUM_PROMPTS = 256


def reward(completions: list, completion_ids: list[list[int]], **_columns: Any) -> list[float]:
    """Trivial, and different for the replies of a group (a group of equal rewards is dropped by ours)."""
    return [float(sum(ids[:16]) % 17) for ids in completion_ids]


class Side(Protocol):
    """What the benchmark needs of a worker."""

    pid: int

    def take(self) -> int:
        """Take some of what has arrived: its generated tokens, 0 when nothing has."""

    def pending(self) -> int:
        """What has arrived and was not taken, in samples or groups."""

    def stop(self) -> None: ...


def train_rows(num: int = NUM_PROMPTS) -> Any:
    from datasets import Dataset

    return Dataset.from_list([{"prompt": prompt_messages(), "answer": str(i)} for i in range(num)])


class Trl:
    """TRL's AsyncRolloutWorker, with the arguments that its trainer passes by default."""

    def __init__(self, args: argparse.Namespace, tokenizer: Any) -> None:
        from accelerate.state import PartialState
        from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker

        PartialState()  # its logger wants it
        self._worker = AsyncRolloutWorker(
            model_name=MODEL, dataset=train_rows(), reward_funcs=[reward], processing_class=tokenizer,
            eos_token_ids=[tokenizer.eos_token_id], num_generations=NUM_GENERATIONS,
            max_inflight_tasks=args.in_flight, queue_maxsize=1024, vllm_server_url=args.url,
            max_tokens=args.reply_tokens, request_timeout=600,
        )  # fmt: skip
        self._worker.start()
        self.pid = self._worker._process.pid

    def take(self) -> int:
        self._worker.check_health(600.0)
        with contextlib.suppress(queue.Empty):  # the trainer reads them, too
            self._worker.metrics_queue.get_nowait()
        with contextlib.suppress(queue.Empty):
            return int(self._worker.rollout_buffer.get_nowait().completion_mask.sum())
        return 0

    def pending(self) -> int:
        return int(not self._worker.rollout_buffer.empty())  # also when half a sample is in the pipe

    def stop(self) -> None:
        self._worker.stop()


class Ours:
    """Our RolloutWorker, as the trainer starts it; the token allowance is without limit."""

    def __init__(self, args: argparse.Namespace, tokenizer: Any) -> None:
        from asyncgrpo_core.rollout.buffer import SampleBuffer
        from asyncgrpo_core.rollout.worker import RolloutWorker
        from asyncgrpo_core.training.config import AsyncGRPOConfig

        self._folder = tempfile.TemporaryDirectory(prefix="rollout-benchmark-")
        config = AsyncGRPOConfig(
            output_dir=self._folder.name, vllm_server_base_url=args.url, num_generations=NUM_GENERATIONS,
            max_completion_length=args.reply_tokens, max_concurrent_rollouts=args.in_flight, use_cpu=True,
            score_centering=args.top_logprobs > 0, num_sampler_logprobs=args.top_logprobs or 8,
            per_device_train_batch_size=NUM_GENERATIONS,
        )  # fmt: skip
        self._buffer = SampleBuffer(self._folder.name + "/buffer")
        self._worker = RolloutWorker(
            **({"loop_cls": _profiled_loop()} if args.profile else {}),
            config=config, model_name=MODEL, dataset=train_rows(), reward_funcs=[reward], processing_class=tokenizer,
            eos_token_ids=[tokenizer.eos_token_id], buffer=self._buffer, initial_allowance=1 << 60, initial_version=1,
            run_settings=None if args.token_route else {"use_token_route": False},
        )  # fmt: skip
        self._worker.start()
        self._worker.wait_ready(120.0)
        assert self._worker.pid is not None
        self.pid = self._worker.pid

    def take(self) -> int:
        self._worker.check()
        records = self._buffer.take(16)
        failed = [record.error for record in records if record.outcome == "failed"]
        assert not failed, failed
        return sum(sample.sequence.num_trained for record in records for sample in record.samples)

    def pending(self) -> int:
        return len(self._buffer.pending_files())

    def stop(self) -> None:
        self._worker.stop()
        self._folder.cleanup()


def _profiled_loop() -> type:
    from benchmarks.rollout_parts import ProfiledLoop

    return ProfiledLoop


def consume(side: Side, answer: Callable[[str], None]) -> None:
    """Take samples until stdin ends; answer each of its lines with the tokens taken and what waits to be taken."""
    taken, finished, lock = 0, threading.Event(), threading.Lock()
    failure: list[BaseException] = []

    def take() -> None:
        nonlocal taken
        try:
            while not finished.is_set():
                tokens = side.take()  # may block: a frozen worker may have written half a sample
                with lock:
                    taken += tokens
                if tokens == 0:
                    time.sleep(0.005)
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=take)
    thread.start()
    for _ in sys.stdin:
        if failure:
            break
        with lock:
            answer(json.dumps({"tokens": taken, "pending": side.pending()}))
    finished.set()
    thread.join()
    if failure:
        raise failure[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=("ours", "trl"))
    parser.add_argument("--url", required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--in-flight", type=int, required=True)
    parser.add_argument("--reply-tokens", type=int, required=True)
    parser.add_argument("--top-logprobs", type=int, default=0)
    parser.add_argument("--token-route", type=int, choices=(0, 1), default=1)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    # the parent reads answers from the real stdout; whatever libraries print goes to stderr
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    side: Side = Trl(args, tokenizer) if args.which == "trl" else Ours(args, tokenizer)
    try:
        print(json.dumps({"pid": side.pid}), file=answers)
        consume(side, lambda text: print(text, file=answers))
    finally:
        side.stop()


if __name__ == "__main__":
    main()
