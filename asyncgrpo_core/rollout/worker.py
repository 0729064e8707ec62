"""RolloutWorker: the trainer's handle on the rollout process (the process itself is worker_process.py).

Numbers travel in shared memory without locks (a lock could be left held by a SIGKILL), groups and errors as files of
the sample buffer.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from asyncgrpo_core.errors import AsyncGRPOError, RolloutError
from asyncgrpo_core.rollout.buffer import SampleBuffer
from asyncgrpo_core.rollout.loop import AsyncRolloutLoop
from asyncgrpo_core.rollout.scoring import reward_names
from asyncgrpo_core.rollout.worker_process import SharedValues, worker_main

# Set while the child is being started; a start() that finds it runs in the child, i.e. in an unguarded script.
_CHILD_MARK = "ASYNCGRPO_ROLLOUT_CHILD"
_CHILD_ENV = {
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",  # no tensor work there; spinning OpenMP threads would starve trainer and server
}


class RolloutWorker:
    """Starts, watches and stops the process that generates and scores rollouts.

    Args:
        loop_cls: AsyncRolloutLoop or a subclass, importable in another process.
        config: the AsyncGRPOConfig; also says `rollout_worker_timeout`.
        model_name: name of the policy on the server.
        dataset: training dataset with a "prompt" column.
        reward_funcs: picklable reward functions.
        processing_class: tokenizer.
        eos_token_ids: tokens that end a reply.
        buffer: where the groups arrive.
        tools, environment_factory: picklable, see AsyncRolloutLoop.
        lora_name, dataset_start_index, resume_state: see AsyncRolloutLoop.
        initial_allowance: forwarded tokens the worker may have produced and in progress, see `set_allowance`.
        initial_version: policy version of every server at the start.
        log_path: file that the child's output is appended to; None leaves it on the terminal.
        run_settings: see AsyncRolloutLoop.
    """

    def __init__(
        self,
        *,
        loop_cls: type[AsyncRolloutLoop] = AsyncRolloutLoop,
        config: Any,
        model_name: str,
        dataset: Any,
        reward_funcs: Sequence[Callable[..., Any]],
        processing_class: Any,
        eos_token_ids: Sequence[int],
        buffer: SampleBuffer,
        tools: list[Callable[..., Any]] | None = None,
        environment_factory: Any | None = None,
        lora_name: str | None = None,
        dataset_start_index: int = 0,
        resume_state: dict[str, Any] | None = None,
        initial_allowance: int,
        initial_version: int = 0,
        log_path: Path | None = None,
        run_settings: dict[str, Any] | None = None,
    ) -> None:
        self._loop_cls = loop_cls
        self._config = config
        self._reward_funcs = list(reward_funcs)
        self._tools = list(tools or [])
        self._environment_factory = environment_factory
        self._arguments = {
            "model_name": model_name,
            "dataset": dataset,
            "processing_class": processing_class,
            "eos_token_ids": list(eos_token_ids),
            "lora_name": lora_name,
            "dataset_start_index": dataset_start_index,
            "resume_state": resume_state,
            "run_settings": run_settings,
        }
        self._buffer = buffer
        self._log_path = log_path
        self._context = multiprocessing.get_context("spawn")
        urls = config.vllm_server_base_url
        num_servers = 1 if isinstance(urls, str) else len(urls)
        self._shared = SharedValues.create(self._context, initial_version, initial_allowance, num_servers)
        self._process: Any = None
        self._started_at = 0.0
        self._failure: BaseException | None = None

    # life

    def start(self) -> None:
        """Start the process.

        Raises:
            TypeError: something that must travel to the process cannot be pickled; the message names it.
            RuntimeError: called while the script is being re-imported by the worker process, i.e. the training code
                is not under `if __name__ == "__main__":`.
        """
        refuse_unguarded_script()
        payload = self._pickled()
        self._buffer.take_error()  # of an earlier worker
        with _environment({**_CHILD_ENV, _CHILD_MARK: str(self._buffer.directory)}):
            self._process = self._context.Process(
                target=worker_main,
                args=(payload, self._shared, str(self._buffer.directory), os.getpid(), self._log_path),
                name="asyncgrpo-rollout",
                daemon=False,  # reward functions may start processes of their own
            )
            self._process.start()
        self._started_at = time.monotonic()
        atexit.register(self.stop)  # or a trainer that ends without stop() would wait for the child for ever

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until the loop is set up and about to send its first request.

        Raises:
            RolloutError: the worker failed, or was not ready within `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while not self._shared.ready.value:
            self.check()
            if time.monotonic() > deadline:
                raise RolloutError(
                    f"The rollout worker was not ready after {timeout_s:.0f} s.", f"Look at {self._where_log()}."
                )
            time.sleep(0.05)

    def check(self) -> None:
        """Raise what ended the worker, or that it hangs; return when it is well.

        Raises:
            RolloutError: with the worker's traceback; "dead" when it left none; hung when its last heartbeat is older
                than config.rollout_worker_timeout. A project error of the worker (RewardError, ConfigError,
                RequestRejectedError, ...) is raised as it is.
        """
        if self._failure is not None:
            raise self._failure
        if self._process is None:
            raise RolloutError("The rollout worker was not started.", "Call start() first.")
        self._failure = self._error_left() or self._death() or self._hang()
        if self._failure is not None:
            raise self._failure

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ask the worker to end, wait `timeout_s`, then kill it with all its descendants. May be called again."""
        atexit.unregister(self.stop)
        process = self._process
        if process is None:
            return
        self._shared.stop.value = 1
        process.join(timeout_s)
        if process.is_alive():
            _kill_tree(process.pid)
            process.join(5.0)

    # shared numbers

    def set_version(self, version: int) -> None:
        """Tell the worker the policy version that every server in use holds; later groups carry it."""
        self._shared.version.value = version

    def set_server_version(self, index: int, version: int) -> None:
        """Tell the worker what one server holds: requests to it carry that version, none goes to a `LEFT_OUT` one."""
        self._shared.server_versions[index] = version

    def adapter_in_use(self, version: int) -> bool:
        """Whether a running rollout names the adapter version."""
        process, uses = self._process, self._shared.adapter_uses
        return process is not None and process.is_alive() and uses[version % len(uses)] > 0

    def revoke_adapters(self, before: int) -> None:
        """End the rollouts of every adapter version below `before`; their groups may be generated again."""
        self._shared.oldest_adapter.value = max(before, self._shared.oldest_adapter.value)

    def set_allowance(self, tokens: int) -> None:
        """Raise the cumulative number of forwarded tokens that the worker may have produced plus in progress.

        The unit is `TrainingSequence.num_tokens` summed over samples, counted from this worker's start. After each
        step: tokens the trainer took out of the buffer so far (trained or dropped) + max(max_staleness, 1) x tokens
        of one step.
        """
        self._shared.allowance.value = tokens

    def in_flight(self) -> int:
        """Requests in flight to the server now."""
        return self._shared.in_flight.value

    def is_idle(self) -> bool:
        """Whether the worker has seen the present allowance, has no group in progress and may not start one.

        Everything it generated is in the buffer then.
        """
        return self._shared.idle_at.value == self._shared.allowance.value

    def generated_tokens(self) -> int:
        """Tokens generated since the worker started, dropped groups included."""
        return self._shared.generated_tokens.value

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    # inside

    def _pickled(self) -> bytes:
        named: list[tuple[str, Any]] = [("loop_cls", self._loop_cls), ("config (args)", self._config)]
        named += [
            (f"reward function {name!r}", func)
            for name, func in zip(reward_names(self._reward_funcs), self._reward_funcs, strict=True)
        ]
        named += [(f"tool {getattr(tool, '__name__', '?')!r}", tool) for tool in self._tools]
        factories = self._environment_factory
        if isinstance(factories, dict):
            named += [(f"environment_factory[{name!r}]", factory) for name, factory in factories.items()]
        elif factories is not None:
            named.append(("environment_factory", factories))
        named += [(name, value) for name, value in self._arguments.items() if value is not None]
        for name, value in named:
            try:
                pickle.dumps(value)
            except Exception as error:  # pickling runs arbitrary code of the value
                raise TypeError(
                    f"{name} ({value!r}) cannot be sent to the rollout worker, which is a separate process: {error}. "
                    "Use a module-level function, functools.partial or an instance of a module-level class; "
                    "lambdas and closures cannot be pickled."
                ) from error
        arguments = {
            "config": self._config,
            "reward_funcs": self._reward_funcs,
            "tools": self._tools,
            "environment_factory": self._environment_factory,
            **self._arguments,
        }
        return pickle.dumps((self._loop_cls, arguments))

    def _error_left(self) -> BaseException | None:
        left = self._buffer.take_error()
        if left is None:
            return None
        error, text = left
        if isinstance(error, AsyncGRPOError):
            return error
        failure = RolloutError(f"The rollout worker failed with {type(error).__name__}: {error}\n{text}")
        failure.__cause__ = error
        return failure

    def _death(self) -> BaseException | None:
        if self._process.is_alive():
            return None
        # it may have written its error between our two looks
        return self._error_left() or RolloutError(
            f"The rollout worker is dead (exit code {self._process.exitcode}) and left no error.",
            f"Look at {self._where_log()}; exit code -9 is a kill, often for lack of memory.",
        )

    def _hang(self) -> BaseException | None:
        limit = self._config.rollout_worker_timeout
        silent_s = time.monotonic() - max(self._shared.heartbeat.value, self._started_at)
        if silent_s <= limit:
            return None
        return RolloutError(
            f"The rollout worker hangs: its last heartbeat is {silent_s:.0f} s old (rollout_worker_timeout={limit:g}).",
            "An async reward function or hook that blocks the event loop does this: await instead, or make the "
            "function sync so that it runs in a thread; raise rollout_worker_timeout if it is meant to take so long. "
            f"See {self._where_log()}.",
        )

    def _where_log(self) -> str:
        return f"its log {self._log_path}" if self._log_path is not None else "its output on the terminal"


def refuse_unguarded_script() -> None:
    """Raise RuntimeError when this is the rollout process importing a script that starts training when imported.

    The error is also left for the trainer. Costs nothing elsewhere: call it before anything expensive.
    """
    folder = os.environ.get(_CHILD_MARK)
    # the attribute is how multiprocessing itself knows that the main module is being imported for a child
    if folder is None or not getattr(multiprocessing.current_process(), "_inheriting", False):
        return
    error = RuntimeError(
        'The training script has no `if __name__ == "__main__":` guard: the rollout worker is a spawned process '
        "that imports the script again, and the script started training again instead of being imported. "
        'Put everything that runs training under `if __name__ == "__main__":`.'
    )
    SampleBuffer(folder).put_error(error, str(error))
    raise error


@contextlib.contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    """Set environment variables while a child is started: it sees them before it imports anything."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _kill_tree(pid: int) -> None:
    try:
        root = psutil.Process(pid)
        victims = [*root.children(recursive=True), root]
    except psutil.NoSuchProcess:
        return
    for victim in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
