"""How the weight sync reaches the policy in training: its parameters, and its own score of a canary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch.distributed.tensor import DTensor

from asyncgrpo_core.models.adapter_files import ProbeWeights, save_adapter, served_adapter
from asyncgrpo_core.models.forward import causal_model, score_tokens
from asyncgrpo_core.models.parameters import iter_server_parameters
from asyncgrpo_core.models.support import longest_sample
from asyncgrpo_core.packing.planner import CostModel
from asyncgrpo_core.training.run_context import AdapterLink, PolicyLink

if TYPE_CHECKING:
    from asyncgrpo_core.training.distributed import Ranks
    from asyncgrpo_core.training.trainer import AsyncGRPOTrainer

_CANARY_TOKENS = 48
_CANARY_TEXT = "Count to twenty: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20. The end of the story is near."


def policy_link(trainer: AsyncGRPOTrainer) -> PolicyLink:
    """Connect a trainer to its pipeline."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    dtype = next(model.parameters()).dtype
    ranks = trainer.ranks
    ranks.on("parameters", lambda: iter_server_parameters(model))
    ranks.on("score", lambda ids: _score(trainer, ids))
    sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    return PolicyLink(
        # Sharded weights are gathered by all ranks at once; a forward under FSDP or DDP is one of all ranks.
        parameters=lambda: ranks.iterate("parameters") if sharded else iter_server_parameters(model),
        score=lambda ids: ranks.together("score", ids),
        canary_ids=canary_tokens(trainer),
        dtype=str(dtype).removeprefix("torch."),
        device=trainer.args.device.type,
        adapter=adapter_link(model, ranks),
        row_cost=CostModel.of_model(causal_model(model).config),
        longest_sample=longest_sample(causal_model(model).config.get_text_config()),
    )


def adapter_link(model: Any, ranks: Ranks) -> AdapterLink | None:
    """How the sync reaches the policy's adapter, on all ranks at once: its weights may be sharded."""
    found = served_adapter(model)
    if found is None:
        return None
    if found.obstacle is None:
        probe = ProbeWeights(model)
        ranks.on("save adapter", lambda folder: save_adapter(model, folder, write=ranks.is_leader))
        ranks.on("set adapter probe", probe.set)
        ranks.on("restore adapter", probe.restore)
    return AdapterLink(
        rank=found.rank,
        obstacle=found.obstacle,
        save=lambda folder: ranks.together("save adapter", folder),
        set_probe=lambda share: ranks.together("set adapter probe", share),
        restore=lambda: ranks.together("restore adapter"),
    )


def canary_tokens(trainer: AsyncGRPOTrainer) -> list[int]:
    """A fixed text in the policy's own words: the first prompt, repeated up to 48 tokens."""
    tokenizer = trainer.processing_class
    ids: list[int] = []
    dataset = trainer.train_dataset
    first = next(iter(dataset)) if dataset is not None else {}
    if "prompt" in first:
        kwargs = cast(dict[str, Any], trainer.args.chat_template_kwargs or {})
        text = tokenizer.apply_chat_template(first["prompt"], tokenize=False, add_generation_prompt=True, **kwargs)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    ids = list(ids) or tokenizer(_CANARY_TEXT, add_special_tokens=False)["input_ids"]
    repeats = -(-_CANARY_TOKENS // len(ids))
    return (ids * repeats)[:_CANARY_TOKENS]


def _score(trainer: AsyncGRPOTrainer, ids: list[int]) -> list[float]:
    # Under the trainer's own precision (autocast and wrappers), as in a training step.
    with trainer.compute_loss_context_manager():
        return score_tokens(trainer.model_wrapped, ids)
