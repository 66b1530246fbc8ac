"""Errors that say what is wrong, where, what was expected, what was found and what to do.

Every error raised for bad input derives from :class:`RaggedError` and carries a stable ``code``
that the specification defines (``spec/03-invariants.md``). Each class also derives from the builtin
that a caller would look for (``ValueError``, ``OSError``, …).

A place where nothing can be written is bad input: :class:`DatasetNotFoundError` where its directory
is missing, :class:`DatasetExistsError` where something is in the way, :class:`StorageError` where
the system allows nothing. A disk that is full or fails is not: writing then raises the ``OSError``
of the operating system, with its ``errno``. So ``except OSError`` gets all of these.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

__all__ = [
    "BrokenShardError",
    "ChecksumError",
    "ConversionError",
    "CorruptError",
    "DatasetExistsError",
    "DatasetNotFoundError",
    "HandOverError",
    "InvariantError",
    "JobError",
    "LimitExceededError",
    "ManifestError",
    "MissingDependencyError",
    "MissingEndOfStreamError",
    "MissingShardError",
    "NotRaggedError",
    "OutOfRangeError",
    "PackingError",
    "RaggedError",
    "RaggedWarning",
    "SchemaMismatchError",
    "StateMismatchError",
    "StorageError",
    "TruncatedError",
    "UnknownColumnError",
    "UnsupportedFeatureError",
    "UnsupportedVersionError",
    "Where",
    "WorkerError",
]


@dataclass(frozen=True, slots=True)
class Where:
    """The place of a fault; parts that are unknown or do not apply are ``None``.

    Attributes
    ----------
    file : str, optional
        Path or name of the source.
    batch : int, optional
        Index of the record batch within the source.
    row : int, optional
        Index of the record within the batch.
    column : str, optional
        Column name.
    position : int, optional
        Index of the element within the record's list in that column.
    """

    file: str | None = None
    batch: int | None = None
    row: int | None = None
    column: str | None = None
    position: int | None = None

    def __str__(self) -> str:
        parts = (
            f"{name} {value!r}" if isinstance(value, str) else f"{name} {value}"
            for name in self.__slots__
            if (value := getattr(self, name)) is not None
        )
        return ", ".join(parts) or "unknown place"

    def inside(self, outer: Where) -> Where:
        """Return this place with the parts that it lacks taken from `outer`."""
        missing = {
            name: getattr(outer, name) for name in self.__slots__ if getattr(self, name) is None
        }
        return replace(self, **missing)


class RaggedWarning(UserWarning):
    """Of everything this package warns of: what is right, and slower than it need be."""


class RaggedError(Exception):
    """Base of all errors of this package.

    Parameters
    ----------
    what : str
        The rule that is broken, in one sentence.
    code : str, optional
        Stable identifier from the specification.
    where : Where, optional
        Place of the fault.
    expected, got : object, optional
        What the rule asks for and what was found.
    remedy : str, optional
        What the caller can do.

    Examples
    --------
    >>> error = RaggedError(
    ...     "a count is negative",
    ...     code="RF-I004",
    ...     where=Where(row=3, column="candidate_counts", position=7),
    ...     expected=">= 0",
    ...     got=-2,
    ...     remedy="check the producer",
    ... )
    >>> print(error)
    [RF-I004] a count is negative
      where:    row 3, column 'candidate_counts', position 7
      expected: >= 0
      got:      -2
      remedy:   check the producer
    """

    code: str = "RF-E000"

    def __init__(
        self,
        what: str,
        *,
        code: str | None = None,
        where: Where | None = None,
        expected: Any = None,
        got: Any = None,
        remedy: str | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.code = type(self).code if code is None else code
        self.where = where or Where()
        self.expected = expected
        self.got = got
        self.remedy = remedy

    def __str__(self) -> str:
        lines = [f"[{self.code}] {self.what}"]
        if self.where != Where():
            lines.append(f"  where:    {self.where}")
        if self.expected is not None:
            lines.append(f"  expected: {self.expected}")
        if self.got is not None:
            lines.append(f"  got:      {self.got}")
        if self.remedy:
            lines.append(f"  remedy:   {self.remedy}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        # The keyword-only constructor needs help to cross process boundaries.
        fields = {
            name: getattr(self, name) for name in ("code", "where", "expected", "got", "remedy")
        }
        return _rebuild, (type(self), self.what, fields)

    def at(self, outer: Where) -> RaggedError:
        """Add the parts of the place that only the caller knows (file, batch); returns itself."""
        self.where = self.where.inside(outer)
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return the error as plain JSON values, for ``--json`` output and problem documents."""
        where = {
            name: value
            for name in Where.__slots__
            if (value := getattr(self.where, name)) is not None
        }
        return {
            "error": type(self).__name__,
            "code": self.code,
            "what": self.what,
            "where": where,
            "expected": None if self.expected is None else str(self.expected),
            "got": None if self.got is None else str(self.got),
            "remedy": self.remedy,
        }


def _rebuild(cls: type[RaggedError], what: str, fields: dict[str, Any]) -> RaggedError:
    return cls(what, **fields)


class NotRaggedError(RaggedError, ValueError):
    """The input is not Arrow data with this format's metadata."""

    code = "RF-S001"


class SchemaMismatchError(RaggedError, ValueError):
    """A schema breaks the format's rules, or two schemas that must agree do not."""

    code = "RF-S004"


class UnknownColumnError(SchemaMismatchError, KeyError):
    """What is looked up by name has no column of that name."""

    code = "RF-S003"


class InvariantError(RaggedError, ValueError):
    """A value breaks an invariant of the format; ``code`` names it."""

    code = "RF-I001"


class UnsupportedVersionError(RaggedError, ValueError):
    """The data is of a format version that this library does not read."""

    code = "RF-V001"


class UnsupportedFeatureError(RaggedError, ValueError):
    """The data requires a feature that this library does not know."""

    code = "RF-V002"


class CorruptError(RaggedError, OSError):
    """The bytes of a container are not what its writer wrote."""

    code = "RF-C001"


class TruncatedError(CorruptError):
    """The container ends before its writer finished it."""

    code = "RF-C002"


class MissingEndOfStreamError(TruncatedError):
    """A stream has its trailer but not Arrow's end-of-stream mark."""

    code = "RF-C003"


class ChecksumError(CorruptError):
    """Content does not match the digest that was stored with it."""

    code = "RF-C004"


class BrokenShardError(CorruptError):
    """A shard is not the one that the manifest lists (rows, bytes or digest differ)."""

    code = "RF-C005"


class MissingShardError(RaggedError, FileNotFoundError):
    """The manifest lists a shard that is not there."""

    code = "RF-C006"


class ManifestError(CorruptError):
    """The manifest is missing a part, is malformed or fails its checksum."""

    code = "RF-C007"


class DatasetNotFoundError(RaggedError, FileNotFoundError):
    """There is no dataset, file or stream at the given place."""

    code = "RF-C008"


class DatasetExistsError(RaggedError, FileExistsError):
    """The target already holds a dataset and the mode does not allow to change it."""

    code = "RF-C009"


class StorageError(RaggedError, OSError):
    """A place denies the access; an object store cannot be reached or breaks its promises."""

    code = "RF-C010"


class LimitExceededError(RaggedError, ValueError):
    """The input is larger than a configured limit or than a format limit."""

    code = "RF-L001"


class OutOfRangeError(LimitExceededError, IndexError):
    """An index lies outside the data."""

    code = "RF-L002"


class StateMismatchError(RaggedError, ValueError):
    """A saved state belongs to other data, other options or another format of state."""

    code = "RF-T001"


class ConversionError(RaggedError, ValueError):
    """Foreign data cannot be converted without loss or contradiction."""

    code = "RF-A001"


class PackingError(RaggedError, ValueError):
    """Samples cannot be packed as asked."""

    code = "RF-P001"


class JobError(RaggedError, ValueError):
    """The options of an offline job do not fit each other or its input."""

    code = "RF-J001"


class WorkerError(RaggedError, RuntimeError):
    """A process that did the work of a job died."""

    code = "RF-J002"


class HandOverError(RaggedError, RuntimeError):
    """Another process of a distributed hand-over failed or differs."""

    code = "RF-T002"


class MissingDependencyError(RaggedError, ImportError):
    """An optional dependency is not installed; the remedy names the extra."""

    code = "RF-D001"
