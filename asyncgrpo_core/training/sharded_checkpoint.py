"""Checkpoints between runs of different kinds: sharded (FSDP2) and plain (one rank, DDP), in both directions.

    plain      model.safetensors or adapter_model.safetensors      optimizer.pt, parameters by number
    sharded    pytorch_model_fsdp_0/                               optimizer_0/, parameters by name (torch DCP)

A sharded one is read by any number of ranks. Where the kinds differ, the files are read here and not by transformers,
which knows each kind only for itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from asyncgrpo_core.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import Trainer

MODEL_SHARDS, OPTIMIZER_SHARDS = "pytorch_model_fsdp_0", "optimizer_0"
_PLAIN_OPTIMIZER, _SCHEDULER = "optimizer.pt", "scheduler.pt"


def is_sharded(folder: Path) -> bool:
    return (folder / MODEL_SHARDS).is_dir()


def fits_as_it_is(folder: Path, fsdp: bool) -> bool:
    """Whether transformers itself can read the checkpoint in a run of this kind."""
    whole_by_name = (folder / "pytorch_model_fsdp.bin").is_file()  # state_dict_type FULL_STATE_DICT
    return whole_by_name or is_sharded(folder) == fsdp


def load_model(folder: Path, model: nn.Module) -> None:
    """Load weights of the other kind into `model`, which may be sharded; every rank calls it.

    Raises:
        CheckpointError: parameters are missing or of another shape.
    """
    wanted = _own_state(model)
    if is_sharded(folder):
        _read_shards(folder / MODEL_SHARDS, {"model": wanted})
    else:
        wanted = _distributed(_plain_weights(folder, model), wanted, _aliases(model), folder)
    if _is_adapted(model):
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(model, wanted, adapter_name=_adapter_of(model))
    else:
        set_model_state_dict(model, wanted)


def load_optimizer(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Load an optimizer's state of the other kind; every rank calls it.

    Raises:
        CheckpointError: the state does not fit the optimizer.
    """
    if is_sharded(folder):
        state = get_optimizer_state_dict(model, optimizer)
        _read_shards(folder / OPTIMIZER_SHARDS, {"optimizer": state})
        set_optimizer_state_dict(model, optimizer, state)
        return
    saved = torch.load(folder / _PLAIN_OPTIMIZER, map_location="cpu", weights_only=True)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    if len(parameters) != len(numbers):
        raise CheckpointError(
            f"{folder / _PLAIN_OPTIMIZER} is of {len(numbers)} parameters and this run trains {len(parameters)}.",
            "Resume with the model and adapters that the checkpoint was made with.",
        )
    saved["state"] = {
        number: {key: _as_sharded(value, parameter) for key, value in saved["state"][number].items()}
        for number, parameter in zip(numbers, parameters, strict=True)
        if number in saved["state"]
    }
    optimizer.load_state_dict(saved)


def load_scheduler(folder: Path, scheduler: Any) -> None:
    scheduler.load_state_dict(torch.load(folder / _SCHEDULER, weights_only=True))


def whole_state(model: Any, *, keep: bool) -> dict[str, Tensor] | None:
    """The full weights on the CPU, gathered one at a time; every rank calls it, and those with `keep` get them."""
    state = {}
    tensors: dict[str, Any] = get_model_state_dict(model)
    for name, value in tensors.items():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        if keep:
            state[name] = full.cpu()
    return state if keep else None


def save_whole(trainer: Trainer, folder: Path, weights: dict[str, Tensor] | None) -> None:
    """Write config and tokenizer, and the weights unless None, as `save_pretrained` does. On one rank."""
    folder.mkdir(parents=True, exist_ok=True)
    if weights is not None:
        trainer._save(str(folder), state_dict=weights)
        return
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    model.config.save_pretrained(folder)
    if trainer.processing_class is not None:
        trainer.processing_class.save_pretrained(folder)


def _read_shards(folder: Path, state: dict[str, Any]) -> None:
    """Fill `state` in place from a folder that any number of ranks wrote; needs no process group."""
    try:
        dcp.load(state, checkpoint_id=str(folder), no_dist=True)
    except (Exception, CheckpointException) as error:  # torch's is no Exception
        raise CheckpointError(
            f"The shards in {folder} do not fit this run: {' '.join(str(error).split())[:500]}.",
            "Resume with the model and adapters that the checkpoint was made with.",
        ) from error


def _own_state(model: Any) -> dict[str, Any]:
    """What a checkpoint of `model` holds: all of it, or the adapter alone, under PEFT's own names."""
    if not _is_adapted(model):
        return get_model_state_dict(model)
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(model, adapter_name=_adapter_of(model))


def _plain_weights(folder: Path, model: nn.Module) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    files = sorted(folder.glob("adapter_model.safetensors" if _is_adapted(model) else "model*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


def _aliases(model: nn.Module) -> dict[str, list[str]]:
    """All names of every parameter, by each of them: tied tensors have several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: group for group in names.values() for name in group}


def _distributed(
    found: dict[str, Tensor], wanted: dict[str, Any], aliases: dict[str, list[str]], folder: Path
) -> dict[str, Any]:
    """The found tensors, cut like the wanted ones; a tied tensor stands in the file under one of its names."""
    state, missing = {}, []
    for name, value in wanted.items():
        source = next((found[alias] for alias in aliases.get(name, [name]) if alias in found), None)
        if source is None or source.shape != value.shape:
            missing.append(name)
        else:
            state[name] = _as_sharded(source.to(value.dtype), value)
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} parameters of this model or holds them in another shape: {missing[:3]}.",
            "Resume with the model and adapters that the checkpoint was made with.",
        )
    return state


def _as_sharded(value: Any, like: Tensor) -> Any:
    """A full tensor cut like a sharded one of the same shape, without a collective; anything else as it is."""
    if not isinstance(like, DTensor) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    value = value.to(like.device)
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def _adapter_of(model: Any) -> str:
    return model.active_adapters[0]


def _is_adapted(model: nn.Module) -> bool:
    return hasattr(model, "peft_config")
