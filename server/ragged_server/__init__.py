"""The HTTP server that takes samples in durably and serves them to trainers.

Ingestion of Arrow streams and engine JSON, a durable log, tailing by cursor, metrics and a status
page. Needs the extra ``ragged-format[server]``.

This package imports ``ragged_format`` and never ``ragged_pipeline``.
"""
