"""Threads of a trainer that computes on the CPU beside its own server."""

from __future__ import annotations

import logging
import os
from urllib.parse import urlsplit

import torch

from asyncgrpo_core.training.config import AsyncGRPOConfig

logger = logging.getLogger(__name__)

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def share_cores(args: AsyncGRPOConfig) -> None:
    """Use half of the cores when a server on this machine needs the others; OMP_NUM_THREADS decides when it is set.

    Spinning OpenMP threads of two processes on the same cores starve each other: a step took eight times as long.
    """
    if args.device.type != "cpu" or "OMP_NUM_THREADS" in os.environ:
        return
    if not any(urlsplit(url).hostname in _LOOPBACK for url in args.server_urls):
        return
    threads = max(1, (os.cpu_count() or 2) // 2)
    if threads < torch.get_num_threads():
        torch.set_num_threads(threads)
        logger.info(
            "Training with %d of %d cores beside the server (OMP_NUM_THREADS decides).", threads, os.cpu_count()
        )
