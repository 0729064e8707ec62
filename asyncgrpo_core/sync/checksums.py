"""Compare the server's digests of its parameters with those of the trainer's tensors (nccl and ipc).

The server digests its own parameters, by /weight_checker (sha256 of the bytes) or, where it was started with our worker
extension, by `fingerprint`, which a GPU computes in place: fused ones (qkv_proj = q, k, v along dimension 0; the
experts of a layer, one after the other), vocabularies padded with zeros, in the server's dtype, or in float32 where
vLLM computes with that (routers, their biases, a delta rule's decay). What cannot be found by its name is looked for
among all digests, which needs no table of names: a digest says what the tensor is. Layers that a kernel lays out
differently do not match even when they are right; so a mismatch counts only for tensors that matched before (see
`canary.judge`).
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from asyncgrpo_core.sync.backend import TensorEvidence
from asyncgrpo_core.sync.fingerprint import fingerprint

logger = logging.getLogger(__name__)

_RANK_PREFIX = re.compile(r"^dp(\d+):pp(\d+):pcp(\d+):tp(\d+):")
# vLLM's packed_modules_mapping, of the decoders whose checkpoints hold the parts; others hold the fused one themselves.
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
# Where keys are values too (Gemma 4), vLLM holds them twice.
_KEYS_ARE_VALUES = ("q_proj", "k_proj", "k_proj")
VOCABULARY_PADDING = 64
MOST_FLOAT32_ELEMENTS = 2**24  # of what a 16-bit server keeps in float32: routers, at most. Digests of more take long.
# The experts of a layer: what one of each is made of, by the names that checkpoints have.
_EXPERTS = re.compile(r"^(.*\bexperts)\.(?:routed_experts\.)?(w13|w2)_weight$")
_EXPERT_PARTS = {"w13": (("gate_proj", "up_proj"), ("w1", "w3")), "w2": (("down_proj",), ("w2",))}
_ALL_EXPERTS = {"w13": "gate_up_proj", "w2": "down_proj"}  # ... and of checkpoints that hold them as one tensor


def compare_checksums(
    server: Mapping[str, str],
    parameters: Iterable[tuple[str, Tensor]],
    server_dtype: torch.dtype,
    *,
    fingerprints: bool = False,
) -> TensorEvidence | None:
    """Evidence from digests, or None when the server's tensors are sharded (tensor parallelism).

    Args:
        server: the server's name -> digest: sha256 in hexadecimal, as /weight_checker {"action": "checksum"} gives
            them, or `fingerprint`.
        parameters: (Hugging Face name, tensor) as sent; an `nn.Buffer` is what training does not change.
        server_dtype: the dtype that the server holds floating-point weights in.
        fingerprints: which of the two digests these are.
    """
    digests: dict[str, set[str]] = {}
    for key, digest in server.items():
        match = _RANK_PREFIX.match(key)
        if match is not None and (int(match.group(4)) > 0 or int(match.group(3)) > 0):
            return None
        digests.setdefault(_RANK_PREFIX.sub("", key), set()).add(digest)
    sent: dict[str, Tensor] = {}
    unchanging: set[str] = set()
    device = torch.device("cpu")
    for name, tensor in parameters:
        if fingerprints and tensor.is_cuda:
            device = tensor.device
        # Gathered shards and merged adapters are copies, and would be a whole model on a GPU of the trainer.
        stays = fingerprints and getattr(tensor, "live_weight", False)
        sent[name] = tensor.detach() if stays else tensor.detach().cpu()
        if isinstance(tensor, nn.Buffer):
            unchanging.add(name)
    held = _Held(server_dtype, fingerprint if fingerprints else _sha256, device)
    try:
        return _evidence(digests, sent, unchanging, held)
    except torch.OutOfMemoryError:
        logger.warning("The trainer's GPU has no room to digest weights; they are digested on the host, slowly.")
        return _evidence(digests, sent, unchanging, replace(held, device=torch.device("cpu")))


def _evidence(
    digests: Mapping[str, set[str]], sent: Mapping[str, Tensor], unchanging: set[str], held: _Held
) -> TensorEvidence:
    matched, differing, elsewhere = _by_name(digests, sent, held)
    known = matched | differing
    for name, tensor in sent.items():
        if ".experts." in name and tensor.ndim < 3:  # one of many: a server holds them together
            continue
        if name not in known and _take(elsewhere, held.expected([tensor])):
            matched.add(name)
    matched -= differing  # one of its copies at the server is another
    compared = matched | differing
    return TensorEvidence(
        kind="checksums",
        compared=len(compared),
        differing=tuple(name for name in sent if name in differing and name not in unchanging),
        unchecked=tuple(name for name in sent if name not in compared and name not in unchanging),
        matched=tuple(name for name in sent if name in matched),
        constant=tuple(name for name in sent if name in unchanging and name not in matched),
    )


def _by_name(
    digests: Mapping[str, set[str]], sent: Mapping[str, Tensor], as_held: _Held
) -> tuple[set[str], set[str], Counter[str]]:
    """Names whose digest is right, names whose digest is another, and the digests of the server's other tensors."""
    by_plain_name = {_plain(name): name for name in sent}
    matched: set[str] = set()
    differing: set[str] = set()
    elsewhere: Counter[str] = Counter()
    for name, held in digests.items():
        if held == {as_held.empty}:
            continue
        parts = [by_plain_name[part] for part in _parts(_plain(name), by_plain_name) if part in by_plain_name]
        if not parts:
            elsewhere.update(held if len(held) == 1 else ())
            continue
        orders = (as_held.expected([sent[part] for part in order], name) for order in _orders(name, parts))
        right = any(held == {digest} for digest in itertools.chain.from_iterable(orders))
        (matched if right else differing).update(parts)
    return matched, differing, elsewhere


def _orders(name: str, parts: list[str]) -> list[list[str]]:
    """How a server may join the parts: FlashInfer's CUTLASS kernels want each expert's up projection first."""
    if "w13" not in name or len(parts) < 2 or len(parts) % 2:
        return [parts]
    return [parts, [part for gate, up in zip(parts[::2], parts[1::2], strict=True) for part in (up, gate)]]


def _take(held: Counter[str], wanted: Iterable[str]) -> bool:
    """Whether one of the digests is among what is held; it is then taken away, for one tensor proves one other."""
    found = next((digest for digest in wanted if held[digest] > 0), None) if held else None
    if found is not None:
        held[found] -= 1
    return found is not None


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
    kept = FUSED[last]
    if last == "qkv_proj" and _under(parent, "v_proj", leaf) not in sent:
        kept = _KEYS_ARE_VALUES
    return tuple(_under(parent, part, leaf) for part in kept)


def _under(parent: str, part: str, leaf: str) -> str:
    return f"{parent}.{part}.{leaf}" if parent else f"{part}.{leaf}"


def _expert_parts(experts: str, namings: Iterable[tuple[str, ...]], sent: Collection[str]) -> tuple[str, ...]:
    for naming in namings:
        of_each = ([f"{experts}.{i}.{part}.weight" for part in naming] for i in itertools.count())
        parts = [part for one in itertools.takewhile(lambda one: one[0] in sent, of_each) for part in one]
        if parts:
            return tuple(parts)
    return ()


@dataclass(frozen=True)
class _Held:
    """How a server may hold what was sent, and which digests it then has.

    Attributes:
        dtype: of its floating-point weights.
        digest: sha256 or `fingerprint`.
        device: where the digests are made here.
    """

    dtype: torch.dtype
    digest: Callable[[Tensor], str]
    device: torch.device

    @property
    def empty(self) -> str:
        return self.digest(torch.empty(0))

    def expected(self, tensors: list[Tensor], name: str = "") -> Iterator[str]:
        """Digests that right weights may have under the server's `name`: by dtype, padded, turned round or swapped."""
        for whole in self._joined(tensors):
            yield self.digest(whole)
            padding = -whole.shape[0] % VOCABULARY_PADDING if whole.ndim in (1, 2) else 0  # of a head's bias too
            if padding:
                yield self.digest(torch.cat([whole, whole.new_zeros(padding, *whole.shape[1:])]))
            if len(tensors) > 1 or whole.ndim not in (2, 3):
                continue
            yield self.digest(whole.transpose(-1, -2))  # matrices and experts published as [..., inputs, outputs]
            if whole.ndim == 3 and "w13" in name:  # as in `_orders`
                yield from (self.digest(_halves_swapped(experts)) for experts in (whole, whole.transpose(-1, -2)))

    def _joined(self, tensors: list[Tensor]) -> Iterator[Tensor]:
        """In the server's dtype; small ones also in float32: sent in the server's dtype (matrices), or as they are."""
        parts = [tensor.reshape(1) if tensor.ndim == 0 else tensor for tensor in tensors]
        if not all(part.is_floating_point() for part in parts):
            yield _cat([part.to(self.device) for part in parts])
            return
        rounded = _cat([self._there(part, self.dtype) for part in parts])
        yield rounded
        if self.dtype != torch.float32 and rounded.numel() <= MOST_FLOAT32_ELEMENTS:
            yield rounded.float()
            yield _cat([self._there(part, torch.float32) for part in parts])

    def _there(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        """On the device of the digests, converted where that asks least of a GPU's memory and of the way to it."""
        return part.cpu().to(dtype) if self.device.type == "cpu" else part.to(dtype).to(self.device)


def _cat(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _halves_swapped(experts: Tensor) -> Tensor:
    half = experts.shape[1] // 2
    return torch.cat((experts[:, half:], experts[:, :half]), dim=1)


def _sha256(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest()
