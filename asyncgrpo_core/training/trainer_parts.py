"""What the trainer's constructor makes of its arguments."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, set_seed

from asyncgrpo_core.models.deltanet_kernels import keep_working_kernels
from asyncgrpo_core.models.forward import attention_backend, install_packed_forward
from asyncgrpo_core.models.loading import load_policy, load_processing_class
from asyncgrpo_core.models.probe import check_packed_forward
from asyncgrpo_core.models.trunk import prepare_trunk
from asyncgrpo_core.training.config import AsyncGRPOConfig

logger = logging.getLogger(__name__)


def name_of(model: str | PreTrainedModel) -> str:
    """Id or folder of a model."""
    return model if isinstance(model, str) else model.config._name_or_path


def default_args(model: str | PreTrainedModel) -> AsyncGRPOConfig:
    """The configuration of a trainer that was given none."""
    return AsyncGRPOConfig(output_dir=f"{Path(name_of(model)).name}-AsyncGRPO")


def load_parts(
    model: str | PreTrainedModel, args: AsyncGRPOConfig, processing_class: Any, peft_config: Any
) -> tuple[Any, Any]:
    """The policy with its packed forward, and its tokenizer (loaded by the model's name when none is given)."""
    keep_to_one_gpu(args)
    set_seed(args.seed)  # an adapter begins at random: the same on every rank, and in every run of this seed
    policy = load_policy(model, args, peft_config=peft_config)
    processing_class = load_processing_class(name_of(model) if processing_class is None else processing_class, args)
    install_packed_forward(policy, args.attention_backend)
    # Asked for here, so that a back end or a model that does not fit is refused before a server is waited for.
    attention_backend(policy, args.device, training_dtype(policy, args))
    check_packed_forward(policy)
    keep_working_kernels(policy, device=args.device, dtype=training_dtype(policy, args))
    prepare_trunk(policy, args.trunk_kernels, device=args.device, world_size=args.world_size)
    return policy, processing_class


def training_dtype(policy: nn.Module, args: AsyncGRPOConfig) -> torch.dtype:
    """What the layers compute in: the autocast of `bf16` or `fp16`, else the weights' own dtype."""
    if args.bf16 or args.fp16:
        return torch.bfloat16 if args.bf16 else torch.float16
    return next(policy.parameters()).dtype


def keep_to_one_gpu(args: AsyncGRPOConfig) -> None:
    """A process that sees several GPUs trains on its own; transformers would copy the policy to all (DataParallel).

    Copies would each get a part of a packed row, which means nothing; the other GPUs are the server's or other ranks'.
    """
    if args.n_gpu > 1:
        logger.warning(
            "%d GPUs are visible; this process trains on %s. CUDA_VISIBLE_DEVICES chooses one, torchrun starts a "
            "process for each.",
            args.n_gpu,
            args.device,
        )
        args._n_gpu = 1


def eos_token_ids(policy: Any, processing_class: Any) -> list[int]:
    """Every token that ends a reply: the generation config's and the tokenizer's (a chat template's end of turn)."""
    own = processing_class.eos_token_id
    return sorted({*policy.eos_token_ids, *([] if own is None else [own])})
