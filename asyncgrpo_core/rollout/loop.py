"""AsyncRolloutLoop: the rollout side's public class, with the hooks that a run may override (reference, same names).

    filter_prompt        once per prompt
    generate_one         once per rollout, num_generations at once; calls generate_one_turn once per request
    (reward functions)   once per group, when all its rollouts are there
    compute_advantages   once per group; then the group's record goes to the buffer

pipeline.py runs all of it.
"""

from __future__ import annotations

import logging
import traceback
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from asyncgrpo_core.errors import RolloutError, ServerError
from asyncgrpo_core.rollout.adapter_uses import AdapterUses
from asyncgrpo_core.rollout.advantages import centred_advantages, standardised_advantages
from asyncgrpo_core.rollout.chat.forks import fork_report
from asyncgrpo_core.rollout.chat.format import ChatFormat
from asyncgrpo_core.rollout.context import current_rollout, request_seed
from asyncgrpo_core.rollout.environments import EnvironmentPool, offers_tools
from asyncgrpo_core.rollout.one_rollout import check_reward_sources
from asyncgrpo_core.rollout.pipeline import GroupPipeline
from asyncgrpo_core.rollout.sampling import fitted, sampling_settings
from asyncgrpo_core.rollout.threads import CallThreads
from asyncgrpo_core.rollout.tool_loop import converse
from asyncgrpo_core.rollout.tools import FailureWatch, ToolBox, check_tools, tool_schema
from asyncgrpo_core.server.fleet import ServerFleet
from asyncgrpo_core.server.generation import UnknownModelError
from asyncgrpo_core.types import Rollout, RolloutGroup, TurnRecord

logger = logging.getLogger(__name__)


class AsyncRolloutLoop:
    """Generates and scores rollouts, in a spawned rollout process.

    The default implements GRPO. To customize a run, subclass it at module level, override the hooks that change
    (`filter_prompt`, `generate_one`, `generate_one_turn`, `compute_advantages`, `setup`, `close`) and set the subclass
    as the trainer's `loop_cls`. A hook can read `self.config`, `self.tokenizer`, `self.model_name`, `self.dataset`.

    Args:
        config: an AsyncGRPOConfig (or subclass).
        model_name: name under which the server serves the policy.
        dataset: rows with a conversational "prompt"; every other column goes to the reward functions.
        reward_funcs: sync or async functions; their rewards are summed.
        processing_class: tokenizer with a chat template.
        eos_token_ids: tokens that end a reply.
        rollout_buffer: where ended groups go (`SampleBuffer`).
        model_version_value: `.value` is the current policy version, written by the trainer.
        token_allowance: `.value` is the cumulative number of forwarded tokens the loop may have produced and in
            progress, written by the trainer.
        heartbeat_value: `.value` is set to `time.monotonic()` while the event loop turns.
        failed_event: `.set()` is called when the loop ends with an error.
        exception_info_queue: `.put((exception, traceback text))` is called before that.
        metrics_queue: a `MetricOutbox`.
        tools: functions that the model may call (see tools.py).
        environment_factory: makes an environment, or a dict of such by name (see environments.py).
        score_queue_maxsize: completed groups that may wait to be scored before generation waits.
        lora_name: where only an adapter is synced, what the names of its versions begin with (`adapters`).
        dataset_start_index: prompts to pass over at the start.
        resume_state: {"epoch", "position", "skip"}, takes the place of `dataset_start_index`; "loop_state" is given
            to `load_state_dict`.
        in_flight_value: `.value` counts requests in flight (ours; for overlap_frac).
        generated_tokens_value: `.value` counts generated tokens (ours).
        run_settings: what the trainer learnt about the server, each optional: "use_token_route" (bool),
            "max_model_len" (int), "max_logprobs" (int), "send_seed" (bool), "api_key" (str), "candidate_sets" (bool).
    """

    # Groups that may be scored at the same time: a slow reward function (a judge) must not hold up the others.
    groups_scored_at_once = 256

    def __init__(
        self,
        config: Any,
        model_name: str,
        dataset: Any,
        reward_funcs: list[Callable[..., Any]],
        processing_class: Any,
        eos_token_ids: list[int],
        rollout_buffer: Any,
        model_version_value: Any,
        token_allowance: Any,
        heartbeat_value: Any,
        failed_event: Any,
        exception_info_queue: Any,
        metrics_queue: Any,
        tools: list[Callable[..., Any]] | None = None,
        environment_factory: Any | None = None,
        score_queue_maxsize: int = 16,
        lora_name: str | None = None,
        dataset_start_index: int = 0,
        *,
        resume_state: dict[str, Any] | None = None,
        in_flight_value: Any | None = None,
        generated_tokens_value: Any | None = None,
        run_settings: dict[str, Any] | None = None,
    ) -> None:
        self.config = config
        self.model_name = model_name
        self.dataset = dataset
        self.reward_funcs = list(reward_funcs)
        self.tokenizer = processing_class
        self.eos_token_ids = list(eos_token_ids)
        self.rollout_buffer = rollout_buffer
        self.model_version_value = model_version_value
        self.token_allowance = token_allowance
        self.heartbeat_value = heartbeat_value
        self.failed_event = failed_event
        self.exception_info_queue = exception_info_queue
        self.metrics_queue = metrics_queue
        self.tools = list(tools or [])
        self.environment_factory = environment_factory
        self.score_queue_maxsize = score_queue_maxsize
        self.lora_name = lora_name
        self.dataset_start_index = dataset_start_index
        self.resume_state = resume_state
        self.idle_at_value: Any = _Counter()  # see worker_process.SharedValues
        self.in_flight_value = in_flight_value if in_flight_value is not None else _Counter()
        self.generated_tokens_value = generated_tokens_value if generated_tokens_value is not None else _Counter()
        self.run_settings = dict(run_settings or {})
        self.seed = config.seed
        candidate_sets = bool(self.run_settings.get("candidate_sets"))
        self.sampling = sampling_settings(config, self.eos_token_ids, candidate_sets=candidate_sets)
        self.max_model_len: int | None = self.run_settings.get("max_model_len")
        self.servers: ServerFleet | None = None
        # What each server holds, written by the trainer; None where nobody says: then all hold `model_version_value`.
        self.server_versions: Sequence[int] | None = None
        self.adapters: AdapterUses | None = None  # which version each rollout names; set where `lora_name` is
        self.tools_on = bool(self.tools) or (environment_factory is not None and offers_tools(environment_factory))
        check_tools(self.tools)
        self.chat = ChatFormat(
            processing_class,
            tools_on=self.tools_on,
            template_kwargs=config.chat_template_kwargs,
            turn_prompts=config.turn_prompts,
        )
        self._call_threads = CallThreads(config.max_concurrent_rollouts, "tool")
        self.toolbox = ToolBox(
            self._call_threads,
            timeout_s=config.tool_timeout,
            max_result_chars=config.max_tool_result_chars,
            watch=FailureWatch(config.tool_failure_limit, config.tool_failure_window),
        )
        self.environments: EnvironmentPool | None = None
        if environment_factory is not None:
            self.environments = EnvironmentPool(environment_factory, self._call_threads, config.tool_timeout)
        # A server may outlive a run: version 3 of this run is not version 3 of the one before.
        self._salt = uuid.uuid4().hex[:12]

    # hooks

    def filter_prompt(self, row_index: int, row: dict[str, Any], epoch: int) -> bool:
        """Whether to generate for a prompt. A rejected prompt is skipped for this epoch and counts as consumed."""
        return True

    async def generate_one(
        self, prompt: list[dict[str, str]], tools: list[Callable[..., Any]], group_id: int = 0
    ) -> Rollout:
        """Generate one rollout for a prompt: by default a multi-turn tool loop (tool_loop.py).

        Override it to generate differently, for example with an agent framework: return every sampling request in
        `Rollout.turns`, from which the training sequences are built; set `Rollout.reward` to score it here.
        `self.rollout_row()` is the dataset row.

        Args:
            prompt: prompt messages.
            tools: the trainer's tools and the public methods of this rollout's environment.
            group_id: identifier of the rollout's group.
        """
        return await converse(self, prompt, tools)

    async def generate_one_turn(self, prompt_ids: list[int]) -> TurnRecord:
        """Sample one reply from the vLLM server with the config's sampling settings.

        Each request has its own seed (`context.request_seed`) and carries its server's policy version as cache salt.

        Raises:
            RequestRejectedError: the server refused the request; the run stops with the server's text.
            ServerError: the server did not answer after all retries; the group fails and may be generated again.
        """
        context = current_rollout.get(None)
        if context is None or self.servers is None:
            raise RolloutError(
                "generate_one_turn was called outside of generate_one.", "Call it from generate_one only."
            )
        sampling = fitted(self.sampling, len(prompt_ids), self.max_model_len)
        turn_index = context.next_turn()
        seed = None
        if self.run_settings.get("send_seed", True):
            seed = request_seed(self.seed, context.slot, context.generation, context.index, turn_index)
        self.in_flight_value.value += 1
        try:
            turn = await self.servers.generate(
                prompt_ids,
                sampling,
                seed,
                self._salt,
                affinity=context.group_id,
                member=context.index,
                model=self.request_model() if context.adapter_version is not None else None,
            )
        except UnknownModelError as error:
            if context.adapter_version is None:
                raise
            raise ServerError(
                f"The server does not know policy version {context.adapter_version} (any more): {error.message}",
                "If it was started again, the next weight sync gives it the adapter.",
            ) from error
        finally:
            self.in_flight_value.value -= 1
        self.generated_tokens_value.value += len(turn.output_ids)
        if context.adapter_version is not None:  # what the server reports is the version of its base weights
            turn.output_versions = [context.adapter_version] * len(turn.output_ids)
        return turn

    def compute_advantages(self, group: RolloutGroup) -> np.ndarray:
        """One advantage per rollout, in the order of `group.rewards`: (r - mean) / (std + 1e-8), 0 where r is NaN.

        With `advantage_std=False` it is r - mean.

        Runs for every group; a group whose scored rewards are all equal is then dropped, whatever this returns.
        """
        if group.rewards is None:
            raise RolloutError("compute_advantages was called before the group was scored.", "Set group.rewards first.")
        return (standardised_advantages if self.config.advantage_std else centred_advantages)(group.rewards)

    async def setup(self) -> None:
        """Create what the other hooks need. Runs on the loop's event loop before the first prompt."""

    async def close(self) -> None:
        """Release what `setup` created. Runs when the loop stops, also on failure."""

    def state_dict(self) -> Any:
        """What a custom loop wants to find again after a resume (JSON types); None: nothing. Beyond the reference.

        Called when a group ends, at most once per second; a checkpoint holds the newest one.
        """
        return None

    def load_state_dict(self, state: Any) -> None:
        """Take back what `state_dict` returned; called after `setup`, before the first prompt."""

    # for hooks

    @property
    def environment_classes(self) -> list[type]:
        """The factories of environments that are classes, in order: their names are known before the first rollout."""
        factories = self.environment_factory
        every = factories.values() if isinstance(factories, dict) else [factories]
        return [factory for factory in every if isinstance(factory, type)]

    def request_model(self) -> str:
        """What the running rollout's requests must name as their model: the policy, or its adapter version."""
        version = current_rollout.get().adapter_version
        return self.model_name if self.adapters is None or version is None else self.adapters.name(version)

    def rollout_row(self) -> dict[str, Any]:
        """The dataset row of the rollout that is running (empty when an environment owns the data)."""
        return current_rollout.get().row

    # machinery

    async def run(self, should_stop: Callable[[], bool], on_ready: Callable[[], None] | None = None) -> None:
        """Generate and score until `should_stop()`; any error is reported to the trainer and raised.

        `on_ready` is called when the server has been asked what it offers and `setup` has returned.
        """
        pipeline = None
        try:
            servers = await self.connect()
            await self.prepare()
            pipeline = GroupPipeline(self, servers, should_stop)
            if on_ready is not None:
                on_ready()
            await pipeline.run()
        except Exception as error:
            self.exception_info_queue.put((error, traceback.format_exc()))
            self.failed_event.set()
            raise
        finally:
            if pipeline is not None:
                pipeline.close()
            await self.release()

    async def prepare(self) -> None:
        """Environments, the `setup` hook and the state of a custom loop: what must be there before the first prompt.

        Raises:
            ConfigError: an environment cannot be used, or nothing scores the rollouts.
        """
        scoring = await self.environments.prepare(self.tools) if self.environments is not None else []
        custom = type(self).generate_one is not AsyncRolloutLoop.generate_one
        check_reward_sources(len(self.reward_funcs), scoring, custom)
        if self.tools_on:
            report = fork_report(self.chat, [tool_schema(tool) for tool in self.tools] or None)
            good = report.keeps_prefix and report.shows_tools
            logger.log(logging.INFO if good else logging.WARNING, "%s", report.text)
        await self.setup()
        state = (self.resume_state or {}).get("loop_state")
        if state is not None:
            self.load_state_dict(state)

    async def connect(self) -> ServerFleet:
        """Open `self.servers` and ask them for what `run_settings` does not say."""
        known = self.run_settings
        servers = self.servers = ServerFleet(
            self.config.vllm_server_base_url,
            self.lora_name or self.model_name,
            versions=self.server_versions,
            version=lambda: self.model_version_value.value,
            use_token_route=bool(known.get("use_token_route")),
            timeout_s=self.config.vllm_server_timeout,
            # the others are /metrics polls, which must get through while every rollout holds a connection
            max_connections=self.config.max_concurrent_rollouts + 4,
            on_retry=self._on_retry,
            max_logprobs=known.get("max_logprobs"),
            api_key=known.get("api_key"),
        )
        if not {"use_token_route", "max_model_len", "max_logprobs"} <= known.keys():
            facts = await servers.facts()
            servers.use_token_route = known.get("use_token_route", facts.token_route)
            servers.max_logprobs = known.get("max_logprobs", facts.max_logprobs)
            self.max_model_len = known.get("max_model_len", facts.max_model_len)
        return servers

    async def release(self) -> None:
        """The `close` hook, then the connections."""
        try:
            await self.close()
        except Exception:  # must not hide the error that stopped the loop, nor keep the session open
            logger.exception("close() of the rollout loop failed")
        self._call_threads.close()
        if self.servers is not None:
            await self.servers.close()

    def _on_retry(self, reason: str) -> None:
        logger.warning("a generation request is sent again: %s", reason)
        self.metrics_queue.put(("rollout/vllm_retry_count", "count", 1.0, 0.0))


class _Counter:
    def __init__(self) -> None:
        self.value = 0
