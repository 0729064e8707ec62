"""The trainer's part of run_summary.json."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncgrpo_core.training.trainer import AsyncGRPOTrainer


def summarise(trainer: AsyncGRPOTrainer) -> dict[str, Any]:
    """Steps, rewards, books, syncs and rates as of now; may be asked from another thread."""
    counters = trainer.pipeline.current_counters()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    tenth = max(len(rewards) // 10, 1)
    seconds = max(counters.train_s, 1e-9)
    resumed_from = trainer.resume_folder
    return {
        "global_step": trainer.state.global_step,
        "resumed_from": None if resumed_from is None else str(resumed_from),
        "train_s": counters.train_s,
        "reward": {
            "first": sum(rewards[:tenth]) / tenth if rewards else None,
            "last": sum(rewards[-tenth:]) / tenth if rewards else None,
        },
        "ledger": trainer.pipeline.ledger_counts(),
        "weight_sync": counters.sync or None,
        "throughput": {
            "generated_tokens_per_s": counters.generated_tokens / seconds,
            "trained_tokens_per_s": counters.trained_tokens / seconds,
            "overlap_frac": counters.overlapped_s / counters.window_s if counters.window_s else 0.0,
        },
    }
