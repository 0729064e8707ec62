"""A `transformers.Trainer` on several ranks: one end and one decision for all, checkpoints that any number reads."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.distributed_c10d import _set_pg_timeout
from transformers.trainer_utils import rotate_checkpoints

from asyncgrpo_core.errors import AsyncGRPOError, ConfigError
from asyncgrpo_core.training import sharded_checkpoint as sharded
from asyncgrpo_core.training.checkpoint import SAVING, clear_unfinished, not_written, publish
from asyncgrpo_core.training.distributed import Ranks
from asyncgrpo_core.training.hub import HubTrainer

logger = logging.getLogger(__name__)


class RankedTrainer(HubTrainer):
    """What `AsyncGRPOTrainer` does differently from `Trainer` because there may be several ranks.

    Attributes:
        ranks: the ranks of this run; open while `train()` runs.
        training_has_ended: the last step is done, or `train()` has failed: there is nothing left to stop.
    """

    ranks: Ranks
    training_has_ended = False
    _stop_reason: str | None = None
    _asked_to_stop: str | None = None  # on a rank that is not 0, which decides
    _is_saving = False  # transformers' files go to a folder aside

    def create_accelerator_and_postprocess(self) -> None:
        """As transformers, with FSDP2 also on CPUs, and checkpoints in shards unless the config says otherwise.

        Raises:
            ConfigError: FSDP1 was asked for.
        """
        plugin_args = self.args.fsdp_plugin_args
        says_how = "state_dict_type" in (self.args.fsdp_config or {}) or self.args.save_only_model
        if plugin_args is not None and not says_how:
            plugin_args["state_dict_type"] = "SHARDED_STATE_DICT"
        super().create_accelerator_and_postprocess()
        if self.args.world_size > 1:  # on CPUs transformers does not pass it on
            _set_pg_timeout(timedelta(seconds=self.args.ddp_timeout))
        state = self.accelerator.state
        if plugin_args is not None and state.distributed_type == DistributedType.MULTI_CPU:
            # accelerate would ignore the plugin there, without a word, and use DDP
            AcceleratorState._shared_state |= {
                "distributed_type": DistributedType.FSDP,
                "fsdp_plugin": FullyShardedDataParallelPlugin(**plugin_args),
            }
            self.is_fsdp_enabled = True
        if self.is_fsdp_enabled and state.fsdp_plugin.fsdp_version != 2:
            raise ConfigError("FSDP1 is not supported.", "Use FSDP2: fsdp_config={'version': 2}, the default.")

    @property
    def _saves_shards(self) -> bool:
        return self.is_fsdp_enabled and "SHARDED" in str(self.accelerator.state.fsdp_plugin.state_dict_type)

    # -- a run from its start to its end ---------------------------------------------------------------------------

    def _run_on_ranks(self, train: Callable[[], Any], close: Callable[[], Any]) -> Any:
        """Run `train` and then `close`, whatever happens; an error of one rank ends the others too."""
        if self.training_has_ended:  # an earlier run; a request that came since the trainer was made is kept
            self._stop_reason = self._asked_to_stop = None
            self.training_has_ended = False
        failed = True
        try:
            self.ranks.open()
            output = train()
            failed = False
            return output
        except BaseException as error:
            cause = self.ranks.explained(error)
            self.ranks.fail(cause)
            if cause is error:
                raise
            raise cause from error
        finally:
            self._close(close, failed)

    def _close(self, close: Callable[[], Any], failed: bool) -> None:
        try:
            close()
        except Exception as error:
            if not failed:
                failed = True
                self.ranks.fail(error)
                raise
            logger.exception("The pipeline did not close cleanly after the error that is raised")
        finally:
            self.training_has_ended = True
            self.ranks.close(failed=failed)

    def request_stop(self, reason: str) -> None:
        """Stop after the current step, with a checkpoint; nothing once the last step is done. Signal-safe."""
        if self.training_has_ended:
            return
        if self.ranks.is_leader:
            self._stop_reason = self._stop_reason or reason
        else:
            self._asked_to_stop = reason  # rank 0 decides for all; it is told now, or at the latest when the step ends
            self.ranks.ask_to_stop(reason)

    @property
    def stop_reason(self) -> str | None:
        """Why training was asked to stop early; None when it was not."""
        return self._stop_reason

    # -- decisions -------------------------------------------------------------------------------------------------

    def _maybe_log_save_evaluate(self, *args, **kwargs) -> None:
        self._agree_on_control()
        super()._maybe_log_save_evaluate(*args, **kwargs)
        self._agree_on_control()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log(logs, start_time)
        if "loss" in logs:  # the loop's own log, on every rank; an `on_log` may have asked for a checkpoint
            self._agree_on_control()

    def _agree_on_control(self) -> None:
        """What the callbacks of rank 0 decided holds on every rank: only there are metrics, and every signal counts."""
        if self.ranks.is_open:
            flags, reason = self.ranks.agree("control", (vars(self.control), self._stop_reason))
            if not self.ranks.is_leader:  # a signal may have come to rank 0 in between
                vars(self.control).update(flags)
                self._stop_reason = reason

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def complete_checkpoint(self, folder: Path) -> None:
        """Rank 0: write what makes a folder a whole checkpoint."""
        raise NotImplementedError

    def _get_output_dir(self, trial) -> str:
        folder = super()._get_output_dir(trial)
        return str(Path(folder) / SAVING) if self._is_saving else folder

    def _save_checkpoint(self, model, trial) -> None:
        """As transformers, but a checkpoint gets its name, and older ones go, only when it is whole.

        Raises:
            CheckpointError: it could not be written; the older ones are as they were.
        """
        home, name = Path(self._get_output_dir(trial)), f"checkpoint-{self.state.global_step}"
        if self.is_world_process_zero():
            clear_unfinished(home)
        self.accelerator.wait_for_everyone()  # nobody writes before it is cleared
        self._is_saving = True
        try:
            super()._save_checkpoint(model, trial)
        except AsyncGRPOError:
            raise
        except (Exception, CheckpointException) as error:  # a full disk is no OSError to torch and safetensors
            raise not_written(home / name, error) from error
        finally:
            self._is_saving = False
        self.accelerator.wait_for_everyone()  # every rank's files are there
        self.ranks.lead("checkpoint", lambda: self._complete(home, name))
        self.push_checkpoint(home / name)

    def _complete(self, home: Path, name: str) -> None:
        try:
            self.complete_checkpoint(home / SAVING / name)
            publish(home, name)
        except OSError as error:
            raise not_written(home / name, error) from error
        best = self.state.best_model_checkpoint
        rotate_checkpoints(str(home), self.args.save_total_limit, best_model_checkpoint=best, use_mtime=True)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the whole model, ready for `from_pretrained` and vLLM; under FSDP every rank must call it.

        Of the checkpoints of a sharded run only the last one holds the whole model beside the shards.
        """
        if not self._saves_shards:
            super().save_model(output_dir, _internal_call)
            return
        folder = output_dir or self.args.output_dir
        weights = None
        if not _internal_call or self.control.should_training_stop:
            weights = sharded.whole_state(self.model, keep=self.args.should_save)
        if self.args.should_save:
            sharded.save_whole(self, Path(str(folder)), weights)
        self.accelerator.wait_for_everyone()

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None) -> None:
        model = self.model if model is None else model
        if sharded.fits_as_it_is(Path(resume_from_checkpoint), self.is_fsdp_enabled):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            sharded.load_model(Path(resume_from_checkpoint), model)

    def _load_optimizer_and_scheduler(self, checkpoint) -> None:
        if checkpoint is None or sharded.fits_as_it_is(Path(checkpoint), self.is_fsdp_enabled):
            super()._load_optimizer_and_scheduler(checkpoint)
        else:
            optimizer: Any = self.optimizer
            sharded.load_optimizer(Path(checkpoint), self.model, getattr(optimizer, "optimizer", optimizer))
            sharded.load_scheduler(Path(checkpoint), self.lr_scheduler)
