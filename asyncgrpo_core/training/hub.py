"""What a push to the hub takes of `output_dir`: the model and what its user put beside it, nothing of the run's own.

transformers uploads the whole of `output_dir` but checkpoints and names that begin with "_". A script's run folder *is*
its `output_dir`: rollouts, prompts, logs and the serving cache of adapters lie there too, and must not be published.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import Trainer
from transformers import trainer as transformers_trainer

# What a run keeps in its folder (RunContext, NonFiniteGuard), and every hidden folder (.vllm_lora of AdapterStore, a
# checkpoint that is being saved), as patterns of huggingface_hub.
PRIVATE = ("buffer/*", "bad_rows/*", "logs/*", "ledger*.sqlite*", ".*/*")


class HubTrainer(Trainer):
    """A `Trainer` that publishes its policy and keeps its run to itself."""

    _push_is_asked_for = False

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Upload model, tokenizer, model card and what the user put into `output_dir` (reference, push_to_hub).

        `PRIVATE` files and checkpoints stay. Arguments and result are transformers'; the repository is
        `args.hub_model_id`, else the name of `output_dir`.
        """
        with private_files_stay(str(self.args.output_dir)):
            return super().push_to_hub(commit_message, blocking, token, revision, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        self._push_is_asked_for = True  # transformers asks before the checkpoint is whole

    def push_checkpoint(self, folder: Path) -> None:
        """Push as `hub_strategy` says, if that was asked for while `folder`, whole now, was saved."""
        if self._push_is_asked_for:
            self._push_is_asked_for = False
            if folder.is_dir():  # else rotated away already
                with private_files_stay(str(self.args.output_dir)):
                    super()._push_from_checkpoint(str(folder))


@contextmanager
def private_files_stay(output_dir: str | os.PathLike[str]) -> Iterator[None]:
    """Uploads of `output_dir` that transformers' Trainer begins meanwhile leave out `PRIVATE`, in the background too.

    The Trainer does not let its patterns be changed, so its way to the hub is what is changed.
    """
    api = transformers_trainer.hf_api
    transformers_trainer.hf_api = lambda: _Uploads(api(), Path(output_dir))  # type: ignore[assignment, return-value]
    try:
        yield
    finally:
        transformers_trainer.hf_api = api


class _Uploads:
    """A `HfApi` whose uploads of one folder leave out `PRIVATE`; everything else is the api's own."""

    def __init__(self, api: Any, folder: Path) -> None:
        self._api, self._folder = api, folder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    def upload_folder(self, *, folder_path: str, ignore_patterns: Any = None, **kwargs: Any) -> Any:
        patterns = [ignore_patterns] if isinstance(ignore_patterns, str) else list(ignore_patterns or ())
        if Path(folder_path).resolve() == self._folder.resolve():
            patterns += PRIVATE
        return self._api.upload_folder(folder_path=folder_path, ignore_patterns=patterns, **kwargs)
