"""What the trainer's constructor makes of its arguments."""

from __future__ import annotations

import logging

import pytest

from asyncgrpo_core.training.config import AsyncGRPOConfig
from asyncgrpo_core.training.trainer_parts import keep_to_one_gpu


@pytest.mark.parametrize("visible", [1, 4])
def test_several_visible_gpus_are_not_made_copies_of_the_policy(tmp_path, caplog, visible):
    """transformers wraps a model in DataParallel where it sees several GPUs; a packed row cannot be split over them."""
    args = AsyncGRPOConfig(output_dir=str(tmp_path), use_cpu=True)
    assert args.n_gpu <= 1
    args._n_gpu = visible
    with caplog.at_level(logging.WARNING):
        keep_to_one_gpu(args)
    assert args.n_gpu == 1
    assert ("CUDA_VISIBLE_DEVICES" in caplog.text) == (visible > 1)
