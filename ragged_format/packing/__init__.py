"""Packing: samples that share prefixes become one training row, and rows are planned for ranks."""

from ragged_format.packing.attention import (
    VarlenIndex,
    attention_mask,
    cu_seqlens,
    label_ids,
    pred_order,
    tree_leave,
    varlen_index,
)
from ragged_format.packing.pack import pack_row
from ragged_format.packing.plan import Plan, deal_rows, plan_rows, planning_columns
from ragged_format.packing.report import PackReport
from ragged_format.packing.unpack import unpack_row

__all__ = [
    "PackReport",
    "Plan",
    "VarlenIndex",
    "attention_mask",
    "cu_seqlens",
    "deal_rows",
    "label_ids",
    "pack_row",
    "plan_rows",
    "planning_columns",
    "pred_order",
    "tree_leave",
    "unpack_row",
    "varlen_index",
]
