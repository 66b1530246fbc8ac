"""The resumable position of a loader, as JSON values that can be checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ragged_format.errors import StateMismatchError

__all__ = ["MOST_EPOCHS", "Identity", "Point", "common_state", "dump", "parse"]

_KIND = "ragged_format.torch.RaggedLoader"
_VERSION = 1
# Epochs and batches are kept as int64 in shared memory, and counted on.
MOST_EPOCHS = 1 << 62


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
    shuffle: bool | str
    seed: int
    tail: str


def dump(identity: Identity, point: Point, **dealt: int | None) -> dict[str, Any]:
    """Return the state; `dealt` (batch size, ranks) is for the reader and may change on resume."""
    return {
        "kind": _KIND, "version": _VERSION, **identity._asdict(), **point._asdict(), **dealt,
    }  # fmt: skip


def common_state(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state from which all ranks continue, given that of every rank.

    For a checkpoint: gather the states of all ranks, then save the one that this returns.

    Parameters
    ----------
    states : sequence of mapping
        What ``state_dict()``, or ``batch.state``, of every rank says, in rank order.

    Raises
    ------
    StateMismatchError
        Ranks stopped at different steps, or read other data or options; both sides are printed.

    Examples
    --------
    >>> common_state([{"epoch": 0, "position": 8}, {"epoch": 0, "position": 4}])
    Traceback (most recent call last):
    ...
    ragged_format.errors.StateMismatchError: [RF-T001] the ranks stopped at different places
      expected: epoch=0, position=8 (rank 0)
      got:      epoch=0, position=4 (rank 1)
      remedy:   save the states after the same step on every rank
    """
    if not isinstance(states, list | tuple) or not all(isinstance(s, Mapping) for s in states):
        raise StateMismatchError(
            "states are a list of mappings", expected="one for each rank", got=repr(states),
            remedy="gather what state_dict() returned on every rank",
        )  # fmt: skip
    if not states:
        raise StateMismatchError(
            "there is no state", expected="one for each rank", got="none",
            remedy="gather what state_dict() returned on every rank",
        )  # fmt: skip
    own = {"rank"}
    first = {name: value for name, value in states[0].items() if name not in own}
    for rank, state in enumerate(states):
        names = [*first, *(name for name in state if name not in first and name not in own)]
        differing = [name for name in names if state.get(name) != first.get(name)]
        if differing:
            raise StateMismatchError(
                "the ranks stopped at different places",
                expected=_shown(states[0], _named(differing)) + " (rank 0)",
                got=_shown(state, _named(differing)) + f" (rank {rank})",
                remedy="save the states after the same step on every rank",
            )  # fmt: skip
    return dict(states[0])


def _named(differing: list[str]) -> list[str]:
    """Return the names to print: a place is always printed whole."""
    place = [name for name in ("epoch", "position") if {"epoch", "position"} & {*differing}]
    return place + [name for name in differing if name not in place]


def _shown(state: Mapping[str, Any], names: list[str]) -> str:
    return ", ".join(f"{name}={state.get(name)!r}" for name in names)


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
            expected=_shown(ours, differing) + " (this loader)",
            got=_shown(state, differing) + " (the state)",
            remedy="open the same dataset with the same options, or start without the state",
        )  # fmt: skip
    point = Point(*(state.get(name, -1) for name in Point._fields))
    sound = all(type(n) is int and 0 <= n < MOST_EPOCHS for n in point)
    if not sound or point.position > identity.num_rows:
        raise StateMismatchError(
            "the state is malformed",
            expected=f"integers epoch, batches >= 0, position in [0, {identity.num_rows}]",
            got={name: state.get(name) for name in Point._fields},
            remedy="pass what state_dict() returned, unchanged",
        )  # fmt: skip
    return point
