"""Offline jobs over ragged datasets, built on polars.

Conversion, packing, filtering and statistics of whole datasets: functions from an iterator of
record batches to an iterator of record batches, with the runners and the commands of `ragged`
that apply them. Needs the extra ``ragged-format[pipeline]``.

This package imports ``ragged_format`` and never ``ragged_server``.
"""
