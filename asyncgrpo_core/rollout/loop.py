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
from collections.abc import Callable
from typing import Any

import numpy as np

from asyncgrpo_core.errors import ConfigError, RolloutError
from asyncgrpo_core.rollout.advantages import standardised_advantages
from asyncgrpo_core.rollout.context import current_rollout, request_seed
from asyncgrpo_core.rollout.pipeline import GroupPipeline
from asyncgrpo_core.server.generation import GenerationClient, RequestRejectedError, SamplingSettings
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
        tools, environment_factory: refused in this version (ConfigError).
        score_queue_maxsize: completed groups that may wait to be scored before generation waits.
        lora_name: name of the adapter on the server; the policy is then requested under it.
        dataset_start_index: prompts to pass over at the start.
        resume_state: {"epoch", "position", "skip"}, takes the place of `dataset_start_index`.
        in_flight_value: `.value` counts requests in flight (ours; for overlap_frac).
        generated_tokens_value: `.value` counts generated tokens (ours).
        run_settings: what the trainer learnt about the server, each optional: "use_token_route" (bool),
            "max_model_len" (int), "max_logprobs" (int), "send_seed" (bool), "api_key" (str).
    """

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
        refuse_tools(tools, environment_factory)
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
        self.tools: list[Callable[..., Any]] = []
        self.score_queue_maxsize = score_queue_maxsize
        self.lora_name = lora_name
        self.dataset_start_index = dataset_start_index
        self.resume_state = resume_state
        self.in_flight_value = in_flight_value if in_flight_value is not None else _Counter()
        self.generated_tokens_value = generated_tokens_value if generated_tokens_value is not None else _Counter()
        self.run_settings = dict(run_settings or {})
        self.sampling = sampling_settings(config, self.eos_token_ids)
        self.max_model_len: int | None = self.run_settings.get("max_model_len")
        self.client: GenerationClient | None = None
        # A server may outlive a run: version 3 of this run is not version 3 of the one before.
        self._salt = uuid.uuid4().hex[:12]

    # hooks

    def filter_prompt(self, row_index: int, row: dict[str, Any], epoch: int) -> bool:
        """Whether to generate for a prompt. A rejected prompt is skipped for this epoch and counts as consumed."""
        return True

    async def generate_one(
        self, prompt: list[dict[str, str]], tools: list[Callable[..., Any]], group_id: int = 0
    ) -> Rollout:
        """Generate one rollout for a prompt: by default one sampled reply.

        Args:
            prompt: prompt messages.
            tools: tools of this rollout; always empty in this version.
            group_id: identifier of the rollout's group.
        """
        context = current_rollout.get()
        shared = context.first_prompt
        if shared.ids is None or prompt != shared.messages:
            ids = self.render_prompt(prompt)
            if prompt == shared.messages:
                shared.ids = ids
        else:
            ids = shared.ids
        turn = await self.generate_one_turn(ids)
        text = self.tokenizer.decode(turn.output_ids, skip_special_tokens=True)
        return Rollout(
            completion=[{"role": "assistant", "content": text}], completion_ids=turn.output_ids, turns=[turn]
        )

    async def generate_one_turn(self, prompt_ids: list[int]) -> TurnRecord:
        """Sample one reply from the vLLM server with the config's sampling settings.

        Each request has its own seed (`context.request_seed`) and carries the policy version as cache salt.

        Raises:
            RequestRejectedError: the server refused the request; the run stops with the server's text.
            ServerError: the server did not answer after all retries; the group fails and may be generated again.
        """
        context = current_rollout.get(None)
        if context is None or self.client is None:
            raise RolloutError(
                "generate_one_turn was called outside of generate_one.", "Call it from generate_one only."
            )
        sampling = self._fit(len(prompt_ids))
        turn_index = context.next_turn()
        seed = None
        if self.run_settings.get("send_seed", True):
            seed = request_seed(self.config.seed, context.slot, context.generation, context.index, turn_index)
        self.in_flight_value.value += 1
        try:
            turn = await self.client.generate(
                prompt_ids, sampling, seed, f"{self._salt}-{self.model_version_value.value}"
            )
        finally:
            self.in_flight_value.value -= 1
        self.generated_tokens_value.value += len(turn.output_ids)
        return turn

    def compute_advantages(self, group: RolloutGroup) -> np.ndarray:
        """One advantage per rollout, in the order of `group.rewards`: (r - mean) / (std + 1e-8), 0 where r is NaN.

        Runs for every group; a group whose scored rewards are all equal is then dropped, whatever this returns.
        """
        if group.rewards is None:
            raise RolloutError("compute_advantages was called before the group was scored.", "Set group.rewards first.")
        return standardised_advantages(group.rewards)

    async def setup(self) -> None:
        """Create what the other hooks need. Runs on the loop's event loop before the first prompt."""

    async def close(self) -> None:
        """Release what `setup` created. Runs when the loop stops, also on failure."""

    # machinery

    def render_prompt(self, messages: list[dict[str, Any]]) -> list[int]:
        """Messages -> prompt token ids through the chat template, ready for the assistant's reply."""
        ids = self.tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **(self.config.chat_template_kwargs or {}),
        )
        return list(ids)

    async def run(self, should_stop: Callable[[], bool], on_ready: Callable[[], None] | None = None) -> None:
        """Generate and score until `should_stop()`; any error is reported to the trainer and raised.

        `on_ready` is called when the server has been asked what it offers and `setup` has returned.
        """
        pipeline = None
        try:
            client = await self._connect()
            await self.setup()
            pipeline = GroupPipeline(self, client, should_stop)
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
            await self._release()

    async def _connect(self) -> GenerationClient:
        known = self.run_settings
        client = self.client = GenerationClient(
            self.config.vllm_server_base_url,
            self.lora_name or self.model_name,
            use_token_route=bool(known.get("use_token_route")),
            timeout_s=self.config.vllm_server_timeout,
            # the others are /metrics polls, which must get through while every rollout holds a connection
            max_connections=self.config.max_concurrent_rollouts + 4,
            on_retry=self._on_retry,
            max_logprobs=known.get("max_logprobs"),
            api_key=known.get("api_key"),
        )
        if not {"use_token_route", "max_model_len", "max_logprobs"} <= known.keys():
            facts = await client.facts()
            client.use_token_route = known.get("use_token_route", facts.token_route)
            client.max_logprobs = known.get("max_logprobs", facts.max_logprobs)
            self.max_model_len = known.get("max_model_len", facts.max_model_len)
        return client

    async def _release(self) -> None:
        try:
            await self.close()
        except Exception:  # must not hide the error that stopped the loop, nor keep the session open
            logger.exception("close() of the rollout loop failed")
        if self.client is not None:
            await self.client.close()

    def _on_retry(self, reason: str) -> None:
        logger.warning("a generation request is sent again: %s", reason)
        self.metrics_queue.put(("rollout/vllm_retry_count", "count", 1.0, 0.0))

    def _fit(self, prompt_len: int) -> SamplingSettings:
        """The sampling settings of a prompt of this length.

        /inference/v1/generate does not refuse a request that cannot finish, it cuts the reply short; so the check
        that /v1/completions makes is made here for both. Under top_k / top_p the turn may end at max_model_len.
        """
        limit, sampling = self.max_model_len, self.sampling
        if limit is None or prompt_len + sampling.max_tokens <= limit:
            return sampling
        if (sampling.top_k > 0 or sampling.top_p < 1.0) and prompt_len < limit:
            return SamplingSettings(**{**sampling.__dict__, "max_tokens": limit - prompt_len})
        raise RequestRejectedError(
            f"A prompt of {prompt_len} tokens plus max_completion_length={sampling.max_tokens} is longer than the "
            f"server's max_model_len={limit}.",
            "Lower max_completion_length, shorten the prompt or restart the server with a larger --max-model-len.",
        )


class _Counter:
    def __init__(self) -> None:
        self.value = 0


def refuse_tools(tools: Any, environment_factory: Any) -> None:
    """Raise ConfigError when tools or environments are passed: this version runs single-turn rollouts."""
    for name, value in (("tools", tools), ("environment_factory", environment_factory)):
        if value:
            raise ConfigError(
                f"{name} was passed, but this version of asyncgrpo does not run tools or environments.",
                f"Leave {name} out, or subclass AsyncRolloutLoop and override generate_one.",
            )


def sampling_settings(config: Any, eos_token_ids: list[int]) -> SamplingSettings:
    """The config's sampling settings. Top log-probabilities are asked for only when score centering needs them."""
    return SamplingSettings(
        max_tokens=config.max_completion_length,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        repetition_penalty=getattr(config, "repetition_penalty", 1.0),
        num_logprobs=config.num_sampler_logprobs if config.score_centering else 0,
        stop_token_ids=tuple(eos_token_ids),
    )
