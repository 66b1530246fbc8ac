"""The resumable position of a loader, as JSON values that can be checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ragged_format.errors import StateMismatchError

__all__ = ["Identity", "Point", "dump", "parse"]

_KIND = "ragged_format.torch.RaggedLoader"
_VERSION = 1


class Point(NamedTuple):
    """A place between two batches.

    Attributes
    ----------
    epoch : int
    position : int
        Records of the epoch's order that all ranks have taken.
    batches : int
        Batches of the epoch that this rank has delivered.
    """

    epoch: int
    position: int = 0
    batches: int = 0


class Identity(NamedTuple):
    """What decides the order of records, so that a state means the same place."""

    fingerprint: str
    num_rows: int
    shuffle: bool
    seed: int
    tail: str


def dump(identity: Identity, point: Point, **dealt: int) -> dict[str, Any]:
    """Return the state; `dealt` (batch size, ranks) is for the reader and may change on resume."""
    return {
        "kind": _KIND, "version": _VERSION, **identity._asdict(), **point._asdict(), **dealt,
    }  # fmt: skip


def parse(state: Any, identity: Identity) -> Point:
    """Return the point of a state that belongs to `identity`.

    Raises
    ------
    StateMismatchError
        It is not a state of a loader, is of another version, or belongs to other data or options;
        the error prints both sides.
    """
    if not isinstance(state, Mapping) or state.get("kind") != _KIND:
        raise StateMismatchError(
            "this is not the state of a loader", expected=f"kind {_KIND!r}",
            got=sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__,
            remedy="pass what state_dict() returned",
        )  # fmt: skip
    if state.get("version") != _VERSION:
        raise StateMismatchError(
            "the state is of another version", expected=_VERSION, got=state.get("version"),
            remedy="resume with the library release that saved it",
        )  # fmt: skip
    ours = identity._asdict()
    differing = [name for name in ours if state.get(name) != ours[name]]
    if differing:
        raise StateMismatchError(
            "the state belongs to other data or other options",
            expected=", ".join(f"{name}={ours[name]!r}" for name in differing) + " (this loader)",
            got=", ".join(f"{name}={state.get(name)!r}" for name in differing) + " (the state)",
            remedy="open the same dataset with the same options, or start without the state",
        )  # fmt: skip
    point = Point(*(state.get(name, -1) for name in Point._fields))
    if not all(type(n) is int and n >= 0 for n in point) or point.position > identity.num_rows:
        raise StateMismatchError(
            "the state is malformed",
            expected=f"integers epoch, batches >= 0, position in [0, {identity.num_rows}]",
            got=point._asdict(),
        )  # fmt: skip
    return point
