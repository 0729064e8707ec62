"""AsyncGRPOTrainer: a `transformers.Trainer` whose batches come from a live rollout worker.

    train() -> pipeline.start() -> [ next_step -> forward / loss / backward -> optimizer -> finish_step (sync) ] -> stop

The transformers loop is the clock. This class only says where a step's rows come from (`get_batch_samples`), what
the loss is (`compute_loss`), what happens when a step ends (`PipelineCallback`) and what a checkpoint holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from asyncgrpo_core.metrics import MetricEvent, MetricWindow
from asyncgrpo_core.models.forward import causal_model
from asyncgrpo_core.models.moe import router_coefficient
from asyncgrpo_core.rollout.loop import AsyncRolloutLoop
from asyncgrpo_core.rollout.worker import refuse_unguarded_script
from asyncgrpo_core.training.callbacks import PipelineCallback
from asyncgrpo_core.training.checkpoint import complete_checkpoint, load_rollout_state, resolve_resume
from asyncgrpo_core.training.clock import StepClock
from asyncgrpo_core.training.completions import format_completions
from asyncgrpo_core.training.config import AsyncGRPOConfig
from asyncgrpo_core.training.cores import share_cores
from asyncgrpo_core.training.dataset import check_dataset, normalise_reward_funcs
from asyncgrpo_core.training.distributed import Ranks
from asyncgrpo_core.training.live_batches import LiveBatches, initial_training_values, no_collator
from asyncgrpo_core.training.loss import LossSettings, async_grpo_loss
from asyncgrpo_core.training.loss_sums import LossSums
from asyncgrpo_core.training.mfu import MfuMeter
from asyncgrpo_core.training.nonfinite import NonFiniteGuard
from asyncgrpo_core.training.pipeline import Pipeline
from asyncgrpo_core.training.policy_link import policy_link
from asyncgrpo_core.training.ranked_trainer import RankedTrainer
from asyncgrpo_core.training.router_loss import add_router_loss
from asyncgrpo_core.training.row_shares import RowShare, shares_of
from asyncgrpo_core.training.run_context import PolicyLink, RunContext
from asyncgrpo_core.training.source import Step
from asyncgrpo_core.training.step_metrics import add_length_bias, record_performance, record_skipped, record_trained
from asyncgrpo_core.training.trainer_parts import default_args, eos_token_ids, load_parts, name_of
from asyncgrpo_core.training.trainer_summary import summarise

RewardFunc = Callable[..., list[float]]


class AsyncGRPOTrainer(RankedTrainer):
    """Trainer for GRPO with generation on a separate vLLM server (reference, AsyncGRPOTrainer).

    Args:
        model: model id, local folder, or a `PreTrainedModel` (its attention is switched to the packed one).
        reward_funcs: one or several module-level callables; called with `prompts`, `completions`, `completion_ids`
            and every dataset column but `prompt`; each returns one float or None per completion. Summed.
        args: configuration; None uses the defaults.
        train_dataset: `Dataset` or `IterableDataset` with a conversational "prompt" column.
        processing_class: tokenizer; None loads the model's. Left padding; the pad token falls back to eos.
        callbacks: added to the default ones.
        optimizers: (optimizer, scheduler); None entries get the defaults.
        peft_config: wraps the model in an adapter; a server with --enable-lora gets it alone, others merged weights.
        tools: module-level functions the model may call.
        environment_factory: callable, or dict of callables by the "environment" column, that makes an environment.
        run: run folder and served name when a launcher owns them (beyond the reference, keyword only).

    Raises:
        ConfigError: an argument is of the wrong kind; DataError: the dataset does not have the needed shape.
    """

    loop_cls: type[AsyncRolloutLoop] = AsyncRolloutLoop
    _tag_names = ("asyncgrpo", "async-grpo")
    args: AsyncGRPOConfig
    processing_class: Any

    def __init__(
        self,
        model: str | PreTrainedModel,
        reward_funcs: RewardFunc | list[RewardFunc] | None = None,
        args: AsyncGRPOConfig | None = None,
        train_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: Any = None,
        tools: list[Callable] | None = None,
        environment_factory: Any = None,
        *,
        run: RunContext | None = None,
    ) -> None:
        refuse_unguarded_script()
        if args is None:
            args = default_args(model)
        share_cores(args)
        reward_funcs = normalise_reward_funcs(reward_funcs, environment_factory, self.loop_cls)
        num_rows = check_dataset(train_dataset, environment_factory, args.max_steps)
        policy, processing_class = load_parts(model, args, processing_class, peft_config)
        self.ranks = Ranks(args.process_index, args.world_size, deadline_s=args.ddp_timeout)
        self.window = MetricWindow()
        self.clock = StepClock()
        self.run = run or RunContext(run_dir=Path(args.output_dir or "trainer_output"))
        super().__init__(
            model=policy,
            args=args,
            data_collator=no_collator,
            train_dataset=train_dataset,
            processing_class=processing_class,
            callbacks=[PipelineCallback(self), *(callbacks or [])],
            optimizers=optimizers,
        )
        causal_model(policy).add_model_tags(list(self._tag_names))  # for the model card of a push
        self.loss_is_scaled_for_ga = False  # the loss is a mean over one micro-batch
        self.loss_settings = LossSettings.from_config(args)
        self.mfu = MfuMeter.of_training(policy, policy.config, args)
        self.guard = NonFiniteGuard(
            self.run.run_dir / "bad_rows", args.max_nonfinite_steps, rank=args.process_index, world_size=args.world_size
        )
        self._sums = LossSums()  # of the step, on the device
        self.router_aux_loss_coef = router_coefficient(causal_model(policy).config, args.router_aux_loss_coef)
        self._step: Step | None = None
        self._taken_at = 0.0  # when its samples left the queue
        self.resume_folder: Path | None = None
        self.pipeline = Pipeline(
            args,
            self.run,
            model_name=name_of(model),
            num_rows=num_rows,
            worker_arguments={
                "loop_cls": self.loop_cls,
                "dataset": train_dataset,
                "reward_funcs": reward_funcs,
                "processing_class": processing_class,
                "eos_token_ids": eos_token_ids(policy, processing_class),
                "tools": tools,
                "environment_factory": environment_factory,
            },
            window=self.window,
            should_stop=self._should_stop,
            stop_requested=lambda: self._stop_reason is not None,
        )

    # -- start and stop -------------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ):
        """Train until `max_steps`, or until `num_train_epochs` passes over the prompts (reference, train).

        Args:
            resume_from_checkpoint: a checkpoint folder, or True for the newest complete one in `output_dir`.

        Raises:
            CheckpointError: there is no complete checkpoint to resume from.
            TypeError: something that the rollout worker needs cannot be pickled.
            ServerError, WeightSyncError, RolloutError: a part of the pipeline failed; it is closed by then.
        """
        if resume_from_checkpoint is None:
            resume_from_checkpoint = self.args.resume_from_checkpoint
        self.resume_folder = resolve_resume(resume_from_checkpoint, Path(self.args.output_dir or "trainer_output"))
        folder = None if self.resume_folder is None else str(self.resume_folder)
        train = super().train
        return self._run_on_ranks(lambda: train(folder, trial, ignore_keys_for_eval), close=self.pipeline.stop)

    def start_pipeline(self) -> None:
        """Bring server, sync and worker up (called when the Trainer has prepared model and optimizer)."""
        link = policy_link(self)
        self.ranks.lead("start", lambda: self._start(link))
        self.clock = StepClock(self.args.device)

    def _start(self, link: PolicyLink) -> None:
        resumed = None
        if self.resume_folder is not None:
            state, samples = load_rollout_state(self.resume_folder)
            resumed = (state, samples, self.resume_folder)
        self.pipeline.start(link, resumed)

    def finish_pipeline(self) -> None:
        """End generation and send the last weights."""
        self.training_has_ended = True
        self.ranks.lead("finish", self.pipeline.finish)

    def _should_stop(self) -> bool:
        self.ranks.check()
        if self.ranks.asked_to_stop is not None:
            self.request_stop(self.ranks.asked_to_stop)
        return self._stop_reason is not None or self.control.should_training_stop or self.epochs_are_done()

    def epochs_are_done(self) -> bool:
        """Whether `num_train_epochs` passes over the prompts have ended; False when `max_steps` decides."""
        return self.args.max_steps <= 0 and self.pipeline.book.passes_done(self.args.num_train_epochs)

    # -- what the transformers loop asks --------------------------------------------------------------------------

    def get_train_dataloader(self):  # type: ignore[override]
        return LiveBatches()

    def set_initial_training_values(self, args, dataloader):  # type: ignore[override]
        """See `live_batches.initial_training_values`."""
        return initial_training_values(args, self.pipeline.num_rows)

    def get_batch_samples(self, epoch_iterator, num_batches, device):  # type: ignore[override]
        """The rows of the next step; none, with the stop flag set, when training is over."""
        finished = 0 < self.args.max_steps <= self.state.global_step
        shares = None if finished else self._next_shares(num_batches)
        if shares is None:
            self.control.should_training_stop = True
            self.control.should_save = self.state.global_step > 0 and not finished
            return [], None
        num_top = self.args.num_sampler_logprobs if self.args.score_centering else 0
        rows = [share.pack(num_top) for share in shares]
        self.guard.begin(rows)
        self._sums = LossSums()
        return rows, None

    def _next_shares(self, num_batches: int) -> list[RowShare] | None:
        """This rank's rows of the next step; None when the run is to stop before it is full."""
        if not self.ranks.lead("plan", lambda: self._plan(num_batches)):
            return None
        return self.ranks.scatter("rows", shares_of(self._step, self.ranks.world_size) if self._step else None)

    def _plan(self, num_batches: int) -> bool:
        self._step = self.pipeline.next_step(num_batches)
        self._taken_at = time.time()
        return self._step is not None

    def training_step(self, model, inputs, num_items_in_batch=None):  # type: ignore[override]
        if self.pipeline.overlap is not None:  # on rank 0
            self.pipeline.overlap.computing = True
        with self.clock.part("fwd_bwd"):
            loss = super().training_step(model, inputs, num_items_in_batch)
        self.clock.open_optimizer()
        return loss

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):  # type: ignore[override]
        """Mean loss over the trained tokens of one micro-batch. Only the row's plan is copied to the host."""
        with self.clock.part("fwd"):
            output = model(**inputs, temperature=self.args.temperature)
            normalizer = self.loss_settings.normalizer(inputs)
            loss, sums = async_grpo_loss(output, inputs, self.loss_settings, normalizer)
            loss = add_router_loss(loss, sums, output, inputs, self.router_aux_loss_coef)
        self._sums = self._sums.merge(sums)
        self.guard.saw_loss(loss, output.logprobs)
        loss = loss * self.ranks.world_size  # DDP and FSDP average over the ranks; their losses add up
        return (loss, output) if return_outputs else loss

    def floating_point_ops(self, inputs) -> int:
        return 0  # the model's estimate assumes padded batches; perf/* counts tokens instead

    # -- when a step ends -----------------------------------------------------------------------------------------

    def _get_grad_norm(self, model, grad_norm=None):
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        self.guard.saw_gradient(norm)
        return norm

    def end_step(self) -> None:
        """Books, metrics and weight sync of the step that the optimizer just finished."""
        self.clock.close_optimizer()
        self.guard.save(self.state.global_step, self._step, self.processing_class, self.model)
        if not self.guard.skip:
            self.window.extend(self._sums.events())
        for stop_reason, events, findings in self.ranks.gather("metrics", self._own_metrics()):
            self.window.extend(events)
            self.guard.heard(findings)
            if stop_reason is not None:
                self.request_stop(stop_reason)
        self.ranks.lead("end of step", self._finish_step)
        if not self.ranks.is_leader:
            self.clock.finish_step()

    def _own_metrics(self) -> tuple[str | None, list[MetricEvent], list[str]]:
        """What this rank has to tell rank 0 about a step (rank 0 itself: nothing)."""
        return (
            (None, [], []) if self.ranks.is_leader else (self._asked_to_stop, self.window.drain(), self.guard.findings)
        )

    def _finish_step(self) -> None:
        assert self._step is not None and self.pipeline.overlap is not None
        self.pipeline.overlap.computing = False
        step, number, pipeline = self._step, self.state.global_step, self.pipeline
        record = record_skipped if self.guard.skip else record_trained
        tokens, trained = record(self.window, step, pipeline.policy_version, pipeline.token_budget, self._taken_at)
        pipeline.counters.num_tokens += tokens
        pipeline.counters.trained_tokens += trained
        pipeline.finish_step(step, number, skipped=self.guard.skip)
        wall, parts = self.clock.finish_step()
        record_performance(self.window, wall, parts, tokens, trained)
        self.mfu.record(self.window, step, parts["fwd_bwd"], wall)
        self.guard.check(number)
        if self.pipeline.num_rows:
            self.state.epoch = self.pipeline.book.passes()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the window's metrics to a training log (reference, 'Logged metrics')."""
        if "loss" in logs:
            logs = {**logs, "num_tokens": float(self.pipeline.counters.num_tokens), **self.window.reduce()}
            add_length_bias(logs)
            if self.args.log_completions and self._step is not None and self.is_world_process_zero():
                count = self.args.num_completions_to_print
                print(format_completions(self._step, self.processing_class, self.state.global_step, count), flush=True)
        super().log(logs, start_time)

    def complete_checkpoint(self, folder: Path) -> None:
        complete_checkpoint(folder, self.pipeline, self.state.global_step)

    # -- what is known --------------------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """The trainer's part of run_summary.json."""
        return summarise(self)
