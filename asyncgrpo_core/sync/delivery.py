"""Does the served model compute with what was sent? Runs inside the server, after a weight update.

Every received tensor is compared with what the model now *uses*, and a difference is reported by the
tensor's Hugging Face name. On a CPU vLLM packs the weight of a linear layer into an opaque oneDNN handle and
empties the parameter, so there the layer itself is asked: one-hot inputs return columns of its weight exactly
(1 * w plus zeros has no rounding), and one dense random input covers the other columns up to rounding. The
same is asked of layers that keep both a parameter and a packed copy: the parameter can be new and the copy
old, which is how a tied lm_head fails on CPU.

Nothing here imports vllm; `model` is any module with vLLM's conventions (`packed_modules_mapping`,
`hf_to_vllm_mapper`, `cpu_linear` on packed layers).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

NUM_ONE_HOT = 16
_EXACT_ATOL = 1e-30  # the kernels may flush subnormal numbers to zero
# Rounding of one dense product, relative to the output's root mean square.
_DENSE_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}


@dataclass
class DeliveryReport:
    """What `compare_delivery` found. All names are Hugging Face names unless said otherwise.

    Attributes:
        checked: number of received tensors that were compared (a tied head counts as one more).
        differing: name -> largest absolute difference.
        unchecked: name -> why it could not be compared.
        missing: server-side names of parameters that nothing was sent for.
    """

    checked: int = 0
    differing: dict[str, float] = field(default_factory=dict)
    unchecked: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class _Piece:
    name: str  # Hugging Face name
    tensor: Tensor


def tied_name(head: str, source: str) -> str:
    """How a head that shares another parameter's weight is called in reports and errors."""
    return f"{head} (tied to {source})"


@torch.no_grad()
def compare_delivery(model: nn.Module, received: Mapping[str, Tensor], *, seed: int = 0) -> DeliveryReport:
    """Compare `received` (Hugging Face name -> tensor as sent) with what `model` now computes with.

    `seed` draws the probed columns, so that successive updates probe different ones.
    """
    report = DeliveryReport()
    modules = dict(model.named_modules())
    targets = _group_by_target(model, modules, received, report)
    for (path, leaf), pieces in targets.items():
        _compare_target(modules[path], leaf, pieces, report, seed)
    _compare_tied(modules, targets, report, seed)
    experts = {_experts(_server_name(model, name)) for name in received} - {None}
    report.missing = [
        name for name in _missing(model, modules, targets) if _experts(name) is None or _experts(name) not in experts
    ]
    return report


def _server_name(model: nn.Module, name: str) -> str | None:
    """The received name under vLLM's renames only (q_proj stays q_proj), or None where vLLM ignores it."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return name
    if hasattr(mapper, "get_rename_mapper"):
        return mapper.get_rename_mapper()._map_name(name)
    return mapper._map_name(name)


def _group_by_target(
    model: nn.Module, modules: dict[str, nn.Module], received: Mapping[str, Tensor], report: DeliveryReport
) -> dict[tuple[str, str], list[_Piece]]:
    """(module path, parameter name) -> the received tensors it is made of, in their packed order."""
    packed = getattr(model, "packed_modules_mapping", None) or {}
    ordered: dict[tuple[str, str], dict[int, _Piece]] = {}
    for name, tensor in received.items():
        mapped = _server_name(model, name)
        if mapped is None:
            report.unchecked[name] = "the server's model ignores this name"
            continue
        path, _, leaf = mapped.rpartition(".")
        place = (path, 0) if path in modules else _packed_place(path, packed, modules)
        if _experts(mapped) in modules:
            report.unchecked[name] = "the server packs the experts of a layer into one tensor"
        elif place is None:
            report.unchecked[name] = f"no module {path!r} in the server's model"
        else:
            ordered.setdefault((place[0], leaf), {})[place[1]] = _Piece(name, tensor)
    return {key: [pieces[i] for i in sorted(pieces)] for key, pieces in ordered.items()}


def _experts(name: str | None) -> str | None:
    """The module that holds a layer's experts ("model.layers.0.mlp.experts"), for what lies in it; else None."""
    head, found, _ = (name or "").partition(".experts.")
    return f"{head}.experts" if found else None


def _packed_place(
    path: str, packed: Mapping[str, list[str]], modules: Mapping[str, nn.Module]
) -> tuple[str, int] | None:
    parent, _, last = path.rpartition(".")
    for fused, parts in packed.items():
        fused_path = f"{parent}.{fused}" if parent else fused
        if last in parts and fused_path in modules:
            return fused_path, parts.index(last)
    return None


def _compare_target(module: nn.Module, leaf: str, pieces: list[_Piece], report: DeliveryReport, seed: int) -> None:
    actual = getattr(module, leaf, None)
    if not isinstance(actual, Tensor):
        for piece in pieces:
            report.unchecked[piece.name] = f"{type(module).__name__} has no tensor {leaf!r}"
        return
    probing = leaf == "weight" and hasattr(module, "cpu_linear") and pieces[0].tensor.ndim == 2
    if actual.numel() == 0 and not probing:
        for piece in pieces:
            report.unchecked[piece.name] = f"{type(module).__name__}.{leaf} was emptied by the server"
        return
    if actual.numel() > 0:
        for piece, difference in _value_differences(actual, pieces, report):
            _note(report, piece.name, difference, 0.0)
        report.checked += len(pieces)
    if probing and all(piece.name not in report.unchecked for piece in pieces):
        _probe(module, actual.dtype, pieces, report, seed)
        report.checked += len(pieces) if actual.numel() == 0 else 0


def _value_differences(actual: Tensor, pieces: list[_Piece], report: DeliveryReport) -> list[tuple[_Piece, float]]:
    found = []
    start = 0
    for piece in pieces:
        sent = piece.tensor
        rows = sent.shape[0] if sent.ndim else 1
        # vLLM pads vocabularies at the end, so the first rows are the sent ones.
        held = actual[start : start + rows] if sent.ndim else actual.reshape(())
        start += rows
        if len(pieces) == 1 and _packed_convolution(actual, sent):
            found.append((piece, _largest(_sorted(actual), _sorted(sent.to(device=actual.device, dtype=actual.dtype)))))
            continue
        if held.shape != sent.shape:
            report.unchecked[piece.name] = f"sent as {list(sent.shape)}, held as {list(actual.shape)}"
            continue
        found.append((piece, _largest(held, sent.to(device=held.device, dtype=held.dtype))))
    return found


def _packed_convolution(actual: Tensor, sent: Tensor) -> bool:
    """vLLM's CPU build holds a convolution's [channels, 1, width] as [channels, width], in an order of its own."""
    return sent.ndim == 3 and sent.shape[1] == 1 and actual.shape == (sent.shape[0], sent.shape[2])


def _sorted(tensor: Tensor) -> Tensor:
    return tensor.flatten().sort().values


def _probe(module: nn.Module, dtype: torch.dtype, pieces: list[_Piece], report: DeliveryReport, seed: int) -> None:
    """Compare a packed linear layer's outputs with those of the received weights (y = x W^T)."""
    num_inputs = pieces[0].tensor.shape[1]
    generator = torch.Generator().manual_seed(seed)
    columns = torch.randperm(num_inputs, generator=generator)[: min(NUM_ONE_HOT, num_inputs)]
    inputs = torch.zeros(len(columns) + 1, num_inputs)
    inputs[torch.arange(len(columns)), columns] = 1.0
    inputs[-1] = torch.randn(num_inputs, generator=generator)
    inputs = inputs.to(dtype)
    linear: Any = module.cpu_linear  # (input, weight, bias) -> output
    outputs = linear(inputs, module.weight, None)
    start = 0
    for piece in pieces:
        weight = piece.tensor.to(dtype)
        rows = weight.shape[0]
        got = outputs[:, start : start + rows]
        start += rows
        if got.shape[1] != rows:
            report.unchecked[piece.name] = f"the layer has {outputs.shape[1]} outputs, fewer than were sent"
            continue
        _note(report, piece.name, _largest(got[:-1], weight[:, columns].t()), _EXACT_ATOL)
        expected = inputs[-1].float() @ weight.float().t()
        scale = float(expected.pow(2).mean().sqrt())
        _note(report, piece.name, _largest(got[-1], expected), _DENSE_TOLERANCE.get(dtype, 6e-2) * scale)


def _compare_tied(
    modules: dict[str, nn.Module],
    targets: dict[tuple[str, str], list[_Piece]],
    report: DeliveryReport,
    seed: int,
) -> None:
    """Probe packed layers that share the weight of a received parameter (a tied lm_head)."""
    holders = {
        weight.data_ptr(): pieces
        for (path, leaf), pieces in targets.items()
        if isinstance(weight := getattr(modules[path], leaf, None), Tensor) and weight.numel()
    }
    for path, module in modules.items():
        weight = getattr(module, "weight", None)
        if (path, "weight") in targets or not hasattr(module, "cpu_linear"):
            continue
        if not isinstance(weight, Tensor) or weight.data_ptr() not in holders or not weight.numel():
            continue
        source = holders[weight.data_ptr()]
        if len(source) == 1 and source[0].tensor.ndim == 2:
            piece = _Piece(tied_name(f"{path}.weight", source[0].name), source[0].tensor)
            _probe(module, weight.dtype, [piece], report, seed)
            report.checked += 1


def _missing(
    model: nn.Module, modules: dict[str, nn.Module], targets: dict[tuple[str, str], list[_Piece]]
) -> list[str]:
    """Parameters of the served model that nothing was sent for (named_parameters lists shared ones once)."""
    sent = {id(value) for (path, leaf) in targets if (value := getattr(modules[path], leaf, None)) is not None}
    return [name for name, parameter in model.named_parameters() if id(parameter) not in sent]


def _largest(got: Tensor, wanted: Tensor) -> float:
    if not wanted.numel():
        return 0.0
    got, wanted = got.detach().double(), wanted.detach().double()
    both_nan = got.isnan() & wanted.isnan()
    difference = torch.where(both_nan | (got == wanted), torch.zeros_like(got), (got - wanted).abs())
    return float(difference.nan_to_num(nan=math.inf).max())


def _note(report: DeliveryReport, name: str, difference: float, allowed: float) -> None:
    if difference > allowed:
        report.differing[name] = max(difference, report.differing.get(name, 0.0))
