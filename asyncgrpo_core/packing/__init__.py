"""Packing: which samples share a row (planner) and the row's tensors (layout)."""

from asyncgrpo_core.packing.layout import PackedRow, pack_row
from asyncgrpo_core.packing.planner import CostModel, MicroBatch, Placement, RowPlanner

__all__ = ["CostModel", "MicroBatch", "PackedRow", "Placement", "RowPlanner", "pack_row"]
