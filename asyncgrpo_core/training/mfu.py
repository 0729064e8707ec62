"""Model FLOPs utilization: operations that the model needed / operations that the training devices could have done.

What counts is the work of the rows as they were forwarded, by operation count (2 per multiply-add):

    matrices    every forwarded token (a shared one once) passes all matrices of all layers
    attention   4 x heads x head_dim per visible (query, key) pair and layer; a sliding window hides pairs
    head        every loss term passes the language-model head once; other positions never reach it

The backward pass costs twice the forward, once where weights are frozen (only the input's gradient is needed).
Recomputed activations are not counted: that is what makes it *model* FLOPs. Element-wise work is not counted either.

Reference: 'Performance metrics', perf/fwd_bwd_mfu and perf/wall_clock_mfu.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from asyncgrpo_core.metrics import MetricWindow
from asyncgrpo_core.models.forward import causal_model
from asyncgrpo_core.packing.planner import MicroBatch
from asyncgrpo_core.packing.trie import PrefixTrie
from asyncgrpo_core.types import TrainingSample

logger = logging.getLogger(__name__)

# Dense bf16 / fp16 tensor throughput without sparsity, operations per second, by what the device calls itself. The
# first name that occurs in it counts. Sources: NVIDIA's data sheets of A100, H100, H200, L40S, GH200 and the DGX B200
# data sheet (4.5e15 with sparsity per GPU), AMD's of Instinct MI300X and MI325X.
_PEAKS = (
    ("H200 NVL", 835.5e12),
    ("H200", 989.5e12),
    ("H100 NVL", 835.5e12),
    ("H100 PCIe", 756.5e12),
    ("H100", 989.5e12),
    ("GH200", 989.5e12),
    ("B200", 2250e12),
    ("A100", 312e12),
    ("L40S", 362.05e12),
    ("MI325X", 1307.4e12),
    ("MI300X", 1307.4e12),
)

# Layers of attention with q, k, v and o matrices and a gated MLP of three matrices.
_DENSE = (
    *("llama", "mistral", "qwen2", "qwen3", "qwen3_vl_text", "smollm3", "olmo2", "granite"),
    *("gemma", "gemma2", "gemma3_text", "glm", "glm4"),
)
# The same, with a router and experts of three matrices in the layers that are not in `mlp_only_layers`.
_MIXTURES = ("qwen3_moe", "qwen3_vl_moe_text", "mixtral")


def peak_flops(device_name: str, precision: str) -> float | None:
    """Operations per second of one device at a precision; None when no data sheet is known for it.

    Args:
        device_name: as `torch.cuda.get_device_name` says it.
        precision: "bf16", "fp16" or "fp32"; float32 depends on whether TF32 is used, so it is not known.
    """
    if precision not in ("bf16", "fp16"):
        return None
    words = device_name.replace("-", " ").upper()
    return next((peak for name, peak in _PEAKS if f" {name.upper()} " in f" {words} "), None)


def segments_of(samples: Sequence[TrainingSample]) -> np.ndarray:
    """Runs of unshared positions of a row, int64 [S, 2]: each forwards the positions [start, end) of its samples."""
    trie = PrefixTrie()
    for sample in samples:
        trie.add(sample)
    return np.array([(s.start, s.end) for s in trie.segments()], np.int64).reshape(-1, 2)


def visible_pairs(segments: np.ndarray, window: int | None = None) -> int:
    """(query, key) pairs of causal attention: the token at position p sees p + 1 keys, at most `window` of them."""
    start, end = segments[:, 0], segments[:, 1]
    if window is None:
        return int((end * (end + 1) - start * (start + 1)).sum()) // 2
    inside_start, inside_end = np.minimum(start, window), np.minimum(end, window)
    growing = inside_end * (inside_end + 1) - inside_start * (inside_start + 1)
    full = (end - inside_end) - (start - inside_start)
    return int(growing.sum()) // 2 + int(full.sum()) * window


@dataclass(frozen=True)
class ModelFlops:
    """Forward operations of a decoder, per unit of work."""

    per_token: int  # matrices of all layers, router included
    per_pair: dict[int | None, int]  # window (None = causal over everything) -> attention of all layers that have it
    per_term: int  # language-model head

    @classmethod
    def from_config(cls, config: Any) -> ModelFlops | None:
        """From a transformers config; None for an architecture whose operations are not known here."""
        text = config.get_text_config(decoder=True)
        if text.model_type not in (*_DENSE, *_MIXTURES):
            return None
        hidden, heads = text.hidden_size, text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or hidden // heads
        projections = 2 * hidden * head_dim * 2 * (heads + (text.num_key_value_heads or heads))
        windows = Counter(_windows(text))
        return cls(
            per_token=text.num_hidden_layers * projections + sum(_mlp(text, i) for i in range(text.num_hidden_layers)),
            per_pair={window: layers * 4 * heads * head_dim for window, layers in windows.items()},
            per_term=2 * hidden * text.vocab_size,
        )

    def of_row(self, samples: Sequence[TrainingSample], trained_share: float = 1.0) -> float:
        """Forward and backward operations of one row.

        Args:
            trained_share: share of the matrices' weights that are trained; the rest need no weight gradient.
        """
        segments = segments_of(samples)
        tokens = int((segments[:, 1] - segments[:, 0]).sum())
        terms = sum(sample.sequence.num_trained for sample in samples)
        matrices = self.per_token * tokens + self.per_term * terms
        attention = sum(flops * visible_pairs(segments, window) for window, flops in self.per_pair.items())
        return (2 + trained_share) * matrices + 3 * attention


def _windows(text: Any) -> list[int | None]:
    """The sliding window of every layer; None for a layer that sees everything before it."""
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention" if window and text.model_type in ("mistral", "mixtral") else "full_attention"]
        kinds *= text.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _mlp(text: Any, layer: int) -> int:
    """Forward operations per token of one layer's MLP or experts."""
    three = 2 * 3 * text.hidden_size
    sparse = text.model_type in _MIXTURES and layer not in (getattr(text, "mlp_only_layers", None) or [])
    if not sparse or (layer + 1) % getattr(text, "decoder_sparse_step", 1):
        return three * text.intermediate_size
    width = getattr(text, "moe_intermediate_size", None) or text.intermediate_size
    experts = getattr(text, "num_local_experts", None) or text.num_experts
    return text.num_experts_per_tok * three * width + 2 * text.hidden_size * experts


class MfuMeter:
    """Records `perf/fwd_bwd_mfu` and `perf/wall_clock_mfu` of a step; nothing when one of its two numbers is unknown.

    Args:
        flops: of the policy, None for an unknown architecture.
        peak: operations per second of one training device, None when unknown.
        devices: training devices; the server's are not among them.
        trained_share: see `ModelFlops.of_row`.
    """

    def __init__(
        self, flops: ModelFlops | None, peak: float | None, devices: int = 1, trained_share: float = 1.0
    ) -> None:
        self.flops, self.peak, self.devices, self.trained_share = flops, peak, devices, trained_share

    @classmethod
    def of_training(cls, model: nn.Module, config: Any, args: Any) -> MfuMeter:
        """For the policy on the device that it is trained on. Says in one log line what is not known.

        Args:
            model: the policy, before it is sharded; config: its transformers config; args: the AsyncGRPOConfig.
        """
        flops = ModelFlops.from_config(config)
        name = _device_name(args.device)
        precision = _precision(model, args)
        peak = None if name is None else peak_flops(name, precision)
        if flops is None:
            kind = config.get_text_config(decoder=True).model_type
            logger.info("perf/*_mfu is not logged: the operations of the architecture %r are not known.", kind)
        elif peak is None and name is not None:
            logger.info("perf/*_mfu is not logged: the peak of %r at %s is not known.", name, precision)
        return cls(flops, peak, args.world_size, _trained_share(model))

    def record(self, window: MetricWindow, step: Sequence[MicroBatch], fwd_bwd_s: float, wall_s: float) -> None:
        """Add one step. A window's value is all its operations over all its seconds.

        Args:
            step: the rows of all ranks.
            fwd_bwd_s, wall_s: seconds of the forward and backward passes, and of the whole step.
        """
        if self.flops is None or self.peak is None:
            return
        done = sum(self.flops.of_row(row, self.trained_share) for microbatch in step for row in microbatch.rows)
        possible = self.peak * self.devices
        window.rate("perf/fwd_bwd_mfu", done, fwd_bwd_s * possible)
        window.rate("perf/wall_clock_mfu", done, wall_s * possible)


def _device_name(device: torch.device) -> str | None:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def _precision(model: nn.Module, args: Any) -> str:
    if args.bf16 or args.fp16:
        return "bf16" if args.bf16 else "fp16"
    dtype = next(model.parameters()).dtype
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, "fp32")


def _trained_share(model: nn.Module) -> float:
    """Share of the decoder's matrices, by entries, that require a gradient: 1.0, or near 0 with an adapter."""
    decoder = causal_model(model).get_decoder()
    embedding = id(decoder.get_input_embeddings().weight)
    matrices = [p for p in decoder.parameters() if p.ndim >= 2 and id(p) != embedding]
    return sum(p.numel() for p in matrices if p.requires_grad) / max(sum(p.numel() for p in matrices), 1)
