"""The plan of a job: what each task reads and makes, fixed before anything is made.

A plan is pure data. It follows from the job's options and from the content of its inputs, and from
nothing else: no time, host, engine, number of workers, memory limit or absolute path is in it. What
a task makes follows from the plan and from the ranges of the inputs that the task names, so that
every run of one plan makes the same bytes, interrupted or not.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ragged_format.digest import canonical_json, text_digest
from ragged_format.known_schemas import known_schema, read_schema_message

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Plan", "Stage", "Task"]


@dataclass(frozen=True, slots=True)
class Task:
    """One unit of work.

    Attributes
    ----------
    index : int
        Place within its stage, from 0. Tasks of the last stage make the output shards, in order.
    payload : dict
        JSON values that say what the task reads.
    weight : int
        Bytes of input, about; for the progress only.
    """

    index: int
    payload: Mapping[str, Any] = field(default_factory=dict)
    weight: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return {"payload": dict(self.payload), "weight": self.weight}


@dataclass(frozen=True, slots=True)
class Stage:
    """Tasks that depend on earlier stages only, so that they may run in any order.

    Attributes
    ----------
    name : str
        A word for the progress: "count", "write".
    tasks : tuple of Task
    """

    name: str
    tasks: tuple[Task, ...]

    @classmethod
    def of(cls, name: str, payloads: Sequence[Mapping[str, Any]], weights: Sequence[int]) -> Stage:
        """Return a stage of tasks with these payloads and weights."""
        pairs = zip(payloads, weights, strict=True)
        return cls(name, tuple(Task(n, payload, w) for n, (payload, w) in enumerate(pairs)))

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return {"name": self.name, "tasks": [task.to_json() for task in self.tasks]}


@dataclass(frozen=True)
class Plan:
    """All stages of a job.

    Attributes
    ----------
    job : str
        Name of the job.
    version : int
        Version of the job's algorithm; another version may make other bytes.
    options : dict
        JSON values.
    inputs : list of dict
        Name, kind, fingerprint and size of each input.
    schema : pyarrow.Schema or None
        Of the output; ``None`` where only the first stages find it out.
    stages : tuple of Stage
        The last one makes the output.

    Examples
    --------
    >>> plan = Plan("copy", 1, {}, [], None, (Stage("write", (Task(0, {"rows": 3}),)),))
    >>> Plan.from_json(plan.to_json()) == plan, plan.digest
    (True, '4d471de325b732a150ad5e3171633d3d')
    """

    job: str
    version: int
    options: Mapping[str, Any]
    inputs: list[dict[str, Any]]
    schema: pa.Schema | None
    stages: tuple[Stage, ...]

    @cached_property
    def digest(self) -> str:
        """Identity of the plan: xxh3-128 of its canonical JSON, 32 hexadecimal digits."""
        return text_digest(self.to_json()).hex()

    @property
    def token(self) -> str:
        """The 16 hexadecimal digits that are part of the names of the output shards."""
        return self.digest[:16]

    def to_json(self) -> bytes:
        """Return canonical JSON."""
        schema = self.schema
        return canonical_json({
            "inputs": self.inputs, "job": self.job, "options": dict(self.options),
            "schema": None if schema is None else
            base64.b64encode(known_schema(schema).message).decode(),
            "stages": [stage.to_json() for stage in self.stages], "version": self.version,
        })  # fmt: skip

    @classmethod
    def from_json(cls, text: bytes) -> Plan:
        """Return the plan that :meth:`to_json` wrote."""
        data = json.loads(text)
        message = data["schema"]
        stages = tuple(
            Stage(
                stage["name"],
                tuple(Task(n, t["payload"], t["weight"]) for n, t in enumerate(stage["tasks"])),
            )
            for stage in data["stages"]
        )
        schema = None if message is None else read_schema_message(base64.b64decode(message)).schema
        return cls(data["job"], data["version"], data["options"], data["inputs"], schema, stages)
