"""`log_completions`: the rollouts of the step as text, on standard output (reference, config page)."""

from __future__ import annotations

from typing import Any

from asyncgrpo_core.training.source import Step
from asyncgrpo_core.types import TrainingSample

_WIDTH = 100


def format_completions(step: Step, tokenizer: Any, step_number: int, count: int | None) -> str:
    """A table with one line per sample: reward, advantage, prompt and completion.

    Args:
        count: most samples to show; None shows all of the step.
    """
    samples = [s for microbatch in step for s in microbatch.samples]
    shown = samples if count is None else samples[:count]
    lines = [f"step {step_number}: {len(shown)} of {len(samples)} samples", f"{'reward':>8} {'advantage':>9}  text"]
    lines += [f"{s.reward:8.3f} {s.advantage:+9.3f}  {_text(s, tokenizer)}" for s in shown]
    return "\n".join(lines)


def _text(sample: TrainingSample, tokenizer: Any) -> str:
    sequence = sample.sequence
    first = int(sequence.loss_mask.argmax())
    prompt = tokenizer.decode(sequence.token_ids[:first].tolist(), skip_special_tokens=True)
    reply = tokenizer.decode(sequence.token_ids[first:].tolist(), skip_special_tokens=True)
    return f"{_short(prompt)!r} -> {_short(reply)!r}"


def _short(text: str) -> str:
    return text if len(text) <= _WIDTH else "..." + text[3 - _WIDTH :]
