"""Steps whose loss or gradient is not finite: skipped, counted, their rows kept for study, and a run of them stopped.

    guard.begin(rows)                      the rows of this rank, one per micro-batch
    guard.saw_loss(loss, logprobs)         after each forward; stays on the device
    guard.saw_gradient(norm)               after clipping
    guard.keep_out(optimizer, scaler)      before the optimizer step; all ranks decide the same
    guard.save(...)                        every rank, when the step has ended
    guard.heard(findings)                  rank 0: what the other ranks found wrong in their rows
    guard.check(...)                       rank 0: the error after too many in a row

One bad micro-batch spoils the whole step, because its gradient is added to the others'. Skipped means: weights,
moments and step counts of the optimizer stay as they were; the learning-rate schedule goes on, since it counts the
steps of the run.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from asyncgrpo_core.errors import NonFiniteError
from asyncgrpo_core.packing.planner import MicroBatch

logger = logging.getLogger(__name__)

FORMAT = "1"
_MOST_STEPS_SAVED = 50  # a run that skips now and then for days must not fill the disk


class NonFiniteGuard:
    """Watches the loss of every micro-batch and the gradient of every step.

    Args:
        folder: where bad rows are written (RUN/bad_rows).
        max_in_a_row: this many bad steps one after another end the run.
        rank, world_size: of this process. All ranks must call the same methods.
    """

    def __init__(self, folder: Path, max_in_a_row: int, *, rank: int = 0, world_size: int = 1) -> None:
        self.folder, self.max_in_a_row = folder, max_in_a_row
        self.rank, self.world_size = rank, world_size
        self.in_a_row = 0
        self._saved = 0
        self.findings: list[str] = []  # what is wrong with the rows of a skipped step, as sentences
        self.begin([])

    def begin(self, rows: Sequence[Mapping[str, Tensor]]) -> None:
        """A step starts; `rows` are this rank's (kept until the next one, so that bad ones can be written)."""
        self._rows = list(rows)
        self._losses: list[Tensor] = []
        self._logprobs: list[Tensor] = []
        self._norm: Tensor | None = None
        self.skip = False
        self._expected = False
        self.findings = []
        self._bad: list[list[bool]] = []  # [rank][micro-batch], the last column is the gradient

    def saw_loss(self, loss: Tensor, logprobs: Tensor) -> None:
        """One micro-batch's loss, and the policy's log-probabilities of its trained tokens."""
        self._losses.append(loss.detach())
        self._logprobs.append(logprobs.detach())

    def saw_gradient(self, norm: Tensor | float | None) -> None:
        """The norm of the step's gradient over all parameters, before it was clipped."""
        if norm is None:
            return
        if hasattr(norm, "full_tensor"):  # sharded parameters
            norm = norm.full_tensor()
        self._norm = norm.detach() if isinstance(norm, Tensor) else torch.tensor(float(norm))

    def keep_out(self, optimizer: Any, scaler: Any = None) -> None:
        """Before the optimizer step: take its gradients away when the step must not reach the weights."""
        if self.decide(None if scaler is None else scaler.get_scale()):
            optimizer.zero_grad(set_to_none=True)  # an optimizer passes over parameters without a gradient

    def decide(self, loss_scale: float | None = None) -> bool:
        """Whether this step must not reach the weights. One small collective and one copy to the host.

        Args:
            loss_scale: of fp16 training. An overflow at a scale above 1 is how the scaler finds its scale: the step is
                skipped, but it is no sign of something wrong.
        """
        device = self._losses[0].device if self._losses else torch.device("cpu")
        norm = torch.zeros((), device=device) if self._norm is None else self._norm.to(device)
        own = ~torch.stack([torch.isfinite(value.reshape(())) for value in (*self._losses, norm)])
        flags = torch.zeros((self.world_size, len(own)), dtype=torch.int32, device=device)
        flags[self.rank] = own
        if self.world_size > 1:
            torch.distributed.all_reduce(flags)
        self._bad = flags.bool().tolist()
        self.skip = any(map(any, self._bad))
        self._expected = self.skip and self._cause == "gradient" and loss_scale is not None and loss_scale > 1
        if not self._expected:
            self.in_a_row = self.in_a_row + 1 if self.skip else 0
        return self.skip

    @property
    def _cause(self) -> str:
        return "loss" if any(flag for rank in self._bad for flag in rank[:-1]) else "gradient"

    def save(
        self,
        number: int,
        step: Sequence[MicroBatch] | None = None,
        tokenizer: Any = None,
        model: nn.Module | None = None,
    ) -> None:
        """Write the offending rows of a skipped step: every rank its own, rank 0 also who their samples are.

        Args:
            number: of the step.
            step: the rows of all ranks, on rank 0.
            tokenizer: for the samples' text; None leaves it out.
            model: looked at for parameters that are not finite (this rank's shard) when the run is about to end.
        """
        if not self.skip or self._expected:
            return
        mine = [i for i in range(len(self._rows)) if self._is_offending(self.rank, i)]
        rows = {i: self._with_policy(i) for i in mine}
        of = f" of rank {self.rank}" if self.world_size > 1 else ""
        self.findings = [finding for i, row in rows.items() for finding in _bad_tensors(f"micro-batch {i}{of}", row)]
        if model is not None and self.in_a_row >= self.max_in_a_row:
            self.findings += _bad_parameters(model)
        logger.warning(
            "Step %d is skipped: its %s is not finite (%d in a row). %s",
            number,
            self._cause,
            self.in_a_row,
            " ".join(self.findings) or "Every tensor of the rows is finite.",
        )
        self._saved += 1
        if self._saved > _MOST_STEPS_SAVED:
            logger.warning("Its rows are not saved: those of %d steps are in %s.", _MOST_STEPS_SAVED, self.folder)
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        if rows:
            path = self.folder / f"step-{number}-rank-{self.rank}.safetensors"
            tensors = {f"{i}/{name}": value.contiguous() for i, row in rows.items() for name, value in row.items()}
            save_file(tensors, path, {"format": FORMAT, "step": str(number), "rank": str(self.rank), **self._facts()})
        if step is not None:
            content = {"format": FORMAT, "step": number, **self._facts(), "samples": self._samples(step, tokenizer)}
            (self.folder / f"step-{number}.json").write_text(json.dumps(content, indent=1, ensure_ascii=False))

    def heard(self, findings: Iterable[str]) -> None:
        """What another rank found in its rows and its shard of the policy: the cause may lie there alone."""
        self.findings += [finding for finding in findings if finding not in self.findings]

    def check(self, number: int) -> None:
        """On rank 0, after `save` and `heard`.

        Raises:
            NonFiniteError: `max_in_a_row` steps in a row were skipped.
        """
        if not self.skip or self.in_a_row < self.max_in_a_row:
            return
        raise NonFiniteError(
            f"The {self._cause} was not finite in {self.in_a_row} steps in a row (the last is step {number}); they "
            f"were skipped, so the weights are those after step {number - self.in_a_row}.",
            f"Their rows are in {self.folder} (asyncgrpo_core.training.nonfinite.load_bad_rows reads them). "
            + _advice(self.findings, self._cause),
        )

    def _is_offending(self, rank: int, microbatch: int) -> bool:
        """A row with a bad loss; every row when only the gradient is bad: it cannot be said which one it comes from."""
        return self._cause == "gradient" or self._bad[rank][microbatch]

    def _with_policy(self, microbatch: int) -> dict[str, Tensor]:
        row = {name: value.cpu() for name, value in self._rows[microbatch].items() if isinstance(value, Tensor)}
        row["policy_logprobs"] = self._logprobs[microbatch].float().cpu()
        row["loss"] = self._losses[microbatch].float().cpu().reshape(())
        return row

    def _facts(self) -> dict[str, str]:
        norm = "unknown" if self._norm is None else repr(float(self._norm))
        return {"cause": self._cause, "grad_norm": norm}

    def _samples(self, step: Sequence[MicroBatch], tokenizer: Any) -> list[dict[str, Any]]:
        found = []
        for i, microbatch in enumerate(step):
            for rank, row in enumerate(microbatch.rows):
                if not self._is_offending(rank, i):
                    continue
                for index, sample in enumerate(row):
                    about = {"rank": rank, "microbatch": i, "sample_index": index, "sample_id": sample.sample_id}
                    about |= {"slot": sample.slot._asdict(), "generation": sample.generation}
                    about |= {"rollout_id": sample.rollout_id, "model_version": sample.model_version}
                    about |= {"advantage": float(sample.advantage), "reward": float(sample.reward)}
                    about |= {"tokens": sample.sequence.num_tokens, "trained": sample.sequence.num_trained}
                    if tokenizer is not None:
                        about["text"] = tokenizer.decode(sample.sequence.token_ids.tolist())
                    found.append(about)
        return found


def load_bad_rows(path: str | Path) -> list[dict[str, Tensor]]:
    """The rows of one `step-N-rank-R.safetensors`, in the order of their micro-batches.

    Each is a packed row (packing.PackedRow) with `policy_logprobs` [N] and `loss` beside: `loss` can be computed again
    with `model(**row, temperature=...)` and `async_grpo_loss`. `step-N.json` says which samples they hold:
    `sample_index` counts them inside a row.
    """
    rows: dict[int, dict[str, Tensor]] = {}
    with safe_open(str(path), framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 (not a dict)
            microbatch, name = key.split("/", 1)
            rows.setdefault(int(microbatch), {})[name] = file.get_tensor(key)
    return [rows[i] for i in sorted(rows)]


def _bad_tensors(where: str, row: Mapping[str, Tensor]) -> list[str]:
    """Inputs of the loss that are not finite, as sentences; padding of `top_logprobs` is -inf and fine."""
    found = []
    for name in ("advantages", "sampler_logprobs", "policy_logprobs", "top_logprobs"):
        values = row.get(name)
        if values is None:
            continue
        wrong = ~torch.isfinite(values)
        if name == "top_logprobs":
            wrong &= values != -torch.inf
        if wrong.any():
            found.append(f"{name} of {where}: {int(wrong.sum())} of {wrong.numel()} are not finite.")
    return found


def _bad_parameters(model: nn.Module) -> list[str]:
    bad = [name for name, p in model.named_parameters() if not torch.isfinite(_local(p)).all()]
    return [f"Parameters of the policy are not finite: {', '.join(bad[:3])} ({len(bad)} in all)."] if bad else []


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter  # type: ignore[no-any-return]


def _advice(findings: Iterable[str], cause: str) -> str:
    text = " ".join(findings)
    if "Parameters" in text:
        return f"{text} Go back to a checkpoint, and train with a smaller learning_rate or in bf16 or float32."
    if "advantages" in text:
        return f"{text} A reward function or compute_advantages returned a value that is not finite."
    if "sampler_logprobs" in text or "top_logprobs" in text:
        return f"{text} The server sent them: look at its log and at the dtype it serves in."
    if cause == "gradient":
        return f"{text} The loss is finite, its gradient overflows: lower learning_rate, or train in bf16 or float32."
    return f"{text} The policy's forward overflows: train in bf16 or float32, or lower learning_rate."
