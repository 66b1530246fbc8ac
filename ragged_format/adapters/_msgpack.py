"""The optional MessagePack library, named in one place."""

from __future__ import annotations

from typing import Any

from ragged_format.errors import MissingDependencyError

__all__ = ["load_msgspec"]


def load_msgspec() -> Any:
    """Return the module msgspec, or raise the error that names the extra (``RF-D001``)."""
    try:
        import msgspec
    except ImportError as err:
        raise MissingDependencyError(
            "the form of this system is MessagePack", expected="the package msgspec",
            got=str(err), remedy="pip install ragged-format[adapters]",
        ) from err  # fmt: skip
    return msgspec
