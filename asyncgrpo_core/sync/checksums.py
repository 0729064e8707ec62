"""Compare the server's /weight_checker digests with those of the trainer's tensors (nccl and ipc).

The server digests its own parameters (sha256 of the bytes): fused ones (qkv_proj = q, k, v along dimension 0; the
experts of a layer, one after the other), vocabularies padded with zeros, in the server's dtype. Layers that a kernel
lays out differently do not match even when they are right; so a mismatch counts only for tensors that matched before
(see `canary.judge`).
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor

from asyncgrpo_core.sync.backend import TensorEvidence

_RANK_PREFIX = re.compile(r"^dp(\d+):pp(\d+):pcp(\d+):tp(\d+):")
# vLLM's packed_modules_mapping of the dense decoder families.
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
VOCABULARY_PADDING = 64
# The experts of a layer: what one of each is made of, by the names that checkpoints have.
_EXPERTS = re.compile(r"^(.*\bexperts)\.(?:routed_experts\.)?(w13|w2)_weight$")
_EXPERT_PARTS = {"w13": (("gate_proj", "up_proj"), ("w1", "w3")), "w2": (("down_proj",), ("w2",))}


def compare_checksums(
    server: Mapping[str, str], parameters: Iterable[tuple[str, Tensor]], server_dtype: torch.dtype
) -> TensorEvidence | None:
    """Evidence from digests, or None when the server's tensors are sharded (tensor parallelism).

    Args:
        server: the server's name -> sha256 hex digest, as /weight_checker {"action": "checksum"} gives them.
        parameters: (Hugging Face name, tensor) as sent.
        server_dtype: the dtype that the server holds floating-point weights in.
    """
    digests: dict[str, set[str]] = {}
    for key, digest in server.items():
        match = _RANK_PREFIX.match(key)
        if match is not None and (int(match.group(4)) > 0 or int(match.group(3)) > 0):
            return None
        digests.setdefault(_RANK_PREFIX.sub("", key), set()).add(digest)
    # Experts sent one by one are copies that were made for the sending: not all of them at once on the GPU.
    sent = {name: tensor.cpu() if ".experts." in name else tensor for name, tensor in parameters}
    by_plain_name = {_plain(name): name for name in sent}
    differing: list[str] = []
    used: set[str] = set()
    compared = 0
    for name, held in digests.items():
        parts = [by_plain_name[part] for part in _parts(_plain(name), by_plain_name) if part in by_plain_name]
        if not parts or held == {_EMPTY}:
            continue
        used.update(parts)
        compared += len(parts)
        if not any(held == {digest} for digest in _expected([sent[part] for part in parts], server_dtype)):
            differing.extend(parts)
    return TensorEvidence(
        kind="checksums",
        compared=compared,
        differing=tuple(differing),
        unchecked=tuple(name for name in sent if name not in used),
    )


_EMPTY = hashlib.sha256(b"").hexdigest()


def _plain(name: str) -> str:
    """Without the wrappers that only one side may have: "language_model.model.norm" and "model.language_model.norm"."""
    return ".".join(part for part in name.split(".") if part not in ("model", "language_model"))


def _parts(name: str, sent: Collection[str]) -> tuple[str, ...]:
    """The plain names that a server parameter is made of, in their order in it."""
    experts = _EXPERTS.match(name)
    if experts is not None:
        return _expert_parts(experts.group(1), _EXPERT_PARTS[experts.group(2)], sent)
    path, _, leaf = name.rpartition(".")
    parent, _, last = path.rpartition(".")
    if last not in FUSED:
        return (name,)
    return tuple(f"{parent}.{part}.{leaf}" if parent else f"{part}.{leaf}" for part in FUSED[last])


def _expert_parts(experts: str, namings: Iterable[tuple[str, ...]], sent: Collection[str]) -> tuple[str, ...]:
    for naming in namings:
        of_each = ([f"{experts}.{i}.{part}.weight" for part in naming] for i in itertools.count())
        parts = [part for one in itertools.takewhile(lambda one: one[0] in sent, of_each) for part in one]
        if parts:
            return tuple(parts)
    return ()


def _expected(tensors: list[Tensor], dtype: torch.dtype) -> Iterable[str]:
    """Digests that right weights may have: as they are, or padded like a vocabulary."""
    whole = torch.cat([_as_held(tensor, dtype) for tensor in tensors])
    yield _digest(whole)
    padding = -whole.shape[0] % VOCABULARY_PADDING if whole.ndim == 2 else 0
    if padding:
        yield _digest(torch.cat([whole, whole.new_zeros(padding, whole.shape[1])]))


def _as_held(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    tensor = tensor.detach()
    return (tensor.to(dtype) if tensor.is_floating_point() else tensor).cpu()


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest()
