"""Packing: samples that share prefixes become one training row, and rows are planned for ranks."""

from ragged_format.packing.pack import pack_row
from ragged_format.packing.report import PackReport

__all__ = ["PackReport", "pack_row"]
