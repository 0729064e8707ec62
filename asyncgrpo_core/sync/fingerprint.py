"""A digest of a tensor's bytes that is computed where the tensor is, at the speed of its memory.

sha256 is one chain of operations on one core: gigabytes take seconds to minutes, on the trainer's side and on the
server's, where generation waits meanwhile. Here every 8 bytes are mixed with their place (the finalizer of SplitMix64:
Steele, Lea and Flood, 2014) and the results added up modulo 2^64, which can be done in parallel and in any order, with
the same result on a CPU and on a GPU. Two tensors that differ have the same digest with a probability of 2^-64, unless
somebody looks for such a pair: it says whether weights arrived, not who sent them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

# Words of 8 bytes at a time: what is needed beside the tensor (and a copy of it where it is not contiguous) stays below
# 100 MB, also where a server's cache has most of the memory.
_CHUNK_WORDS = 2**21
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # SplitMix64's
_MASK = 2**64 - 1


def fingerprint(tensor: Tensor) -> str:
    """16 hexadecimal digits: a digest of the tensor's bytes in row-major order, whatever its dtype and shape."""
    return fingerprints([("", tensor)])[""]


@torch.no_grad()
def fingerprints(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Name -> digest (`fingerprint`) of many tensors, read from the device once for each kind of device."""
    sums: dict[torch.device, list[tuple[str, int, Tensor]]] = {}
    for name, tensor in named:
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        sums.setdefault(flat.device, []).append((name, flat.numel(), _sum_of_words(flat)))
        del flat  # before the next one is made contiguous
    return {
        name: f"{_mix((total + _GOLDEN * num_bytes) & _MASK):016x}"
        for entries in sums.values()
        for (name, num_bytes, _), total in zip(
            entries, torch.stack([total for _, _, total in entries]).tolist(), strict=True
        )
    }


def _sum_of_words(flat: Tensor) -> Tensor:
    """uint8 [n] -> the sum, an int64 scalar that wraps around as the additions and products below do."""
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    step = 8 * _CHUNK_WORDS
    for start in range(0, flat.numel(), step):
        words = _words(flat[start : start + step])
        places = torch.arange(1 + start // 8, 1 + start // 8 + len(words), device=flat.device)
        total += _mixed_words(places.mul_(_signed(_GOLDEN)).add_(words)).sum()
    return total


def _words(part: Tensor) -> Tensor:
    """uint8 [n] -> int64 [ceil(n / 8)]; the last one is filled up with zeros."""
    missing = -part.numel() % 8
    if missing:
        part = torch.cat((part, part.new_zeros(missing)))
    elif part.data_ptr() % 8 or part.storage_offset() % 8:
        part = part.clone()
    return part.view(torch.int64)


def _mixed_words(x: Tensor) -> Tensor:
    """SplitMix64's finalizer, in place; `>>` keeps the sign, so what it shifts in is masked away."""
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        x ^= (x >> shift) & (2 ** (64 - shift) - 1)
        x *= _signed(factor)
    return x.bitwise_xor_((x >> 31) & (2**33 - 1))


def _mix(x: int) -> int:
    """The same of a Python integer."""
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        x = ((x ^ (x >> shift)) * factor) & _MASK
    return x ^ (x >> 31)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
