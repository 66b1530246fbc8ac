"""What is not installed with the package, and by which extra it comes."""

from __future__ import annotations

from ragged_format.errors import MissingDependencyError

__all__ = ["require_polars"]


def require_polars(need: str) -> None:
    """Raise if polars is not installed.

    Parameters
    ----------
    need : str
        What needs it, as the beginning of a sentence in the plural.

    Raises
    ------
    MissingDependencyError
        It is not (``RF-D001``).
    """
    try:
        import polars as pl  # noqa: F401
    except ImportError as err:
        raise MissingDependencyError(
            f"{need} need polars", expected="module 'polars'", got=str(err),
            remedy="pip install 'ragged-format[pipeline]'",
        ) from err  # fmt: skip
