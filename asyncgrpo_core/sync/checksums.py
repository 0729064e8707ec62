"""Compare the server's /weight_checker digests with those of the trainer's tensors (nccl and ipc).

The server digests its own parameters (sha256 of the bytes): fused ones (qkv_proj = q, k, v along dimension 0; the
experts of a layer, one after the other), vocabularies padded with zeros, in the server's dtype, or in float32 where
vLLM computes with that (routers, their biases, a delta rule's decay). What cannot be found by its name is looked for
among all digests, which needs no table of names: a digest says what the tensor is. Layers that a kernel lays out
differently do not match even when they are right; so a mismatch counts only for tensors that matched before (see
`canary.judge`).
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from asyncgrpo_core.sync.backend import TensorEvidence

_RANK_PREFIX = re.compile(r"^dp(\d+):pp(\d+):pcp(\d+):tp(\d+):")
# vLLM's packed_modules_mapping, of all its decoders; some checkpoints hold the fused one themselves.
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
VOCABULARY_PADDING = 64
MOST_FLOAT32_ELEMENTS = 2**24  # of what a 16-bit server keeps in float32: routers, at most. Digests of more take long.
# The experts of a layer: what one of each is made of, by the names that checkpoints have.
_EXPERTS = re.compile(r"^(.*\bexperts)\.(?:routed_experts\.)?(w13|w2)_weight$")
_EXPERT_PARTS = {"w13": (("gate_proj", "up_proj"), ("w1", "w3")), "w2": (("down_proj",), ("w2",))}
_ALL_EXPERTS = {"w13": "gate_up_proj", "w2": "down_proj"}  # ... and of checkpoints that hold them as one tensor


def compare_checksums(
    server: Mapping[str, str], parameters: Iterable[tuple[str, Tensor]], server_dtype: torch.dtype
) -> TensorEvidence | None:
    """Evidence from digests, or None when the server's tensors are sharded (tensor parallelism).

    Args:
        server: the server's name -> sha256 hex digest, as /weight_checker {"action": "checksum"} gives them.
        parameters: (Hugging Face name, tensor) as sent; an `nn.Buffer` is what training does not change.
        server_dtype: the dtype that the server holds floating-point weights in.
    """
    digests: dict[str, set[str]] = {}
    for key, digest in server.items():
        match = _RANK_PREFIX.match(key)
        if match is not None and (int(match.group(4)) > 0 or int(match.group(3)) > 0):
            return None
        digests.setdefault(_RANK_PREFIX.sub("", key), set()).add(digest)
    # Experts sent one by one are copies that were made for the sending: not all of them at once on the GPU.
    sent: dict[str, Tensor] = {}
    constant: set[str] = set()  # buffers are not among the server's digests; a canary proved them at the first sync
    for name, tensor in parameters:
        sent[name] = tensor.cpu() if ".experts." in name else tensor
        if isinstance(tensor, nn.Buffer):
            constant.add(name)
    by_plain_name = {_plain(name): name for name in sent}
    differing: set[str] = set()
    equal: set[str] = set()
    elsewhere: Counter[str] = Counter()  # what the server holds under names, or in layouts, that are not known here
    for name, held in digests.items():
        parts = [by_plain_name[part] for part in _parts(_plain(name), by_plain_name) if part in by_plain_name]
        if held == {_EMPTY}:
            continue
        orders = (_expected([sent[part] for part in order], server_dtype) for order in _orders(name, parts))
        if parts and any(held == {digest} for digest in itertools.chain.from_iterable(orders)):
            equal.update(parts)
            continue
        differing.update(parts)
        elsewhere.update(held if len(held) == 1 else ())
    for name in sent:
        if ".experts." in name and sent[name].ndim < 3:  # one of many: a server holds them together
            continue
        if name not in equal and _take(elsewhere, _expected([sent[name]], server_dtype)):
            equal.add(name)
            differing.discard(name)
    compared = equal | differing
    return TensorEvidence(
        kind="checksums",
        compared=len(compared),
        differing=tuple(name for name in sent if name in differing),
        unchecked=tuple(name for name in sent if name not in compared and name not in constant),
    )


def _orders(name: str, parts: list[str]) -> list[list[str]]:
    """How a server may join the parts: FlashInfer's CUTLASS kernels want each expert's up projection first."""
    if "w13" not in name or len(parts) < 2:
        return [parts]
    return [parts, [part for gate, up in zip(parts[::2], parts[1::2], strict=True) for part in (up, gate)]]


def _take(held: Counter[str], wanted: Iterable[str]) -> bool:
    """Whether one of the digests is among what is held; it is then taken away, for one tensor proves one other."""
    found = next((digest for digest in wanted if held[digest] > 0), None) if held else None
    if found is not None:
        held[found] -= 1
    return found is not None


_EMPTY = hashlib.sha256(b"").hexdigest()


def _plain(name: str) -> str:
    """Without the wrappers that only one side may have: "language_model.model.norm" and "model.language_model.norm"."""
    return ".".join(part for part in name.split(".") if part not in ("model", "language_model"))


def _parts(name: str, sent: Collection[str]) -> tuple[str, ...]:
    """The plain names that a server parameter is made of, in their order in it."""
    experts = _EXPERTS.match(name)
    if experts is not None:
        together = f"{experts.group(1)}.{_ALL_EXPERTS[experts.group(2)]}"
        if together in sent:
            return (together,)
        return _expert_parts(experts.group(1), _EXPERT_PARTS[experts.group(2)], sent)
    path, _, leaf = name.rpartition(".")
    parent, _, last = path.rpartition(".")
    if last not in FUSED or name in sent:
        return (name,)
    return tuple(f"{parent}.{part}.{leaf}" if parent else f"{part}.{leaf}" for part in FUSED[last])


def _expert_parts(experts: str, namings: Iterable[tuple[str, ...]], sent: Collection[str]) -> tuple[str, ...]:
    for naming in namings:
        of_each = ([f"{experts}.{i}.{part}.weight" for part in naming] for i in itertools.count())
        parts = [part for one in itertools.takewhile(lambda one: one[0] in sent, of_each) for part in one]
        if parts:
            return tuple(parts)
    return ()


def _expected(tensors: list[Tensor], dtype: torch.dtype) -> Iterator[str]:
    """Digests that right weights may have: in which dtype, padded like a vocabulary, or turned round."""
    for whole in _as_held(tensors, dtype):
        yield _digest(whole)
        padding = -whole.shape[0] % VOCABULARY_PADDING if whole.ndim in (1, 2) else 0  # of a head's bias too
        if padding:
            yield _digest(torch.cat([whole, whole.new_zeros(padding, *whole.shape[1:])]))
        if len(tensors) == 1 and whole.ndim in (2, 3):  # matrices and experts published as [..., inputs, outputs]
            yield _digest(whole.transpose(-1, -2))
        if len(tensors) == 1 and whole.ndim == 3:  # as in `_orders`
            yield from (_digest(_halves_swapped(experts)) for experts in (whole, whole.transpose(-1, -2)))


def _halves_swapped(experts: Tensor) -> Tensor:
    half = experts.shape[1] // 2
    return torch.cat((experts[:, half:], experts[:, :half]), dim=1)


def _as_held(tensors: list[Tensor], dtype: torch.dtype) -> Iterator[Tensor]:
    """In the server's dtype; small ones also in float32: sent in the server's dtype (matrices), or as they are."""
    parts = [tensor.detach().cpu() for tensor in tensors]
    if not all(part.is_floating_point() for part in parts):
        yield torch.cat(parts)
        return
    rounded = torch.cat([part.to(dtype) for part in parts])
    yield rounded
    if dtype != torch.float32 and rounded.numel() <= MOST_FLOAT32_ELEMENTS:
        yield rounded.float()
        yield torch.cat([part.float() for part in parts])


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest()
