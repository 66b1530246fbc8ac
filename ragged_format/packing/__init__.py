"""Packing: samples that share prefixes become one training row, and rows are planned for ranks."""

from ragged_format.packing.pack import pack_row
from ragged_format.packing.plan import Plan, plan_rows
from ragged_format.packing.report import PackReport
from ragged_format.packing.unpack import unpack_row

__all__ = ["PackReport", "Plan", "pack_row", "plan_rows", "unpack_row"]
