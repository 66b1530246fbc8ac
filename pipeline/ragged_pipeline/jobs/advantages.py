"""Advantages: rewards, normalized within their group over all shards."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ragged_format.arguments import check_choice, check_number
from ragged_format.errors import JobError, Where
from ragged_format.profiles import standard_column
from ragged_pipeline.exchange import Exchange, Keys, hashed

if TYPE_CHECKING:
    from ragged_pipeline.inputs import RecordInputs
    from ragged_pipeline.job import Context
    from ragged_pipeline.plan import Plan

__all__ = ["Advantages"]

Scale = Literal["std", "none"]
Baseline = Literal["mean", "leave_one_out"]
Single = Literal["zero", "reward", "error"]
NullReward = Literal["error", "skip"]
_KEY = np.dtype([
    ("hash", np.uint64, 2), ("conversation", np.uint64, 2), ("reward", np.float64),
    ("known", np.bool_), ("named", np.bool_),
])  # fmt: skip
_VERDICT = np.dtype([("advantage", np.float64), ("known", np.bool_)])


class Advantages(Exchange):
    """Sets the record column ``advantage`` to the reward relative to the group.

    Each conversation of a group counts once: rows that share a ``rollout_id`` are branches of one.
    ``advantage = (reward - baseline) / scale`` with, over the conversations of the group,

    * baseline: their mean, or that of the others (``"leave_one_out"``);
    * scale: their sample standard deviation (n - 1) plus `eps`, or 1 (``"none"``, as Dr. GRPO has
      it).

    Sums run in the order of the records, so that results are the same in every run.

    Parameters
    ----------
    baseline : {"mean", "leave_one_out"}
    scale : {"std", "none"}
    eps : float
        Added to the standard deviation.
    single : {"zero", "reward", "error"}
        The advantage in a group of one conversation: nothing to compare with, the reward, or none.
    null_reward : {"error", "skip"}
        What to do with a record without reward: refuse the job, or leave the record out of its
        group, its advantage null.
    """

    name = "advantages"
    version = 1
    key_type = _KEY
    verdict_type = _VERDICT

    def __init__(
        self,
        *,
        baseline: Baseline = "mean",
        scale: Scale = "std",
        eps: float = 1e-6,
        single: Single = "zero",
        null_reward: NullReward = "error",
    ) -> None:
        check_choice("baseline", baseline, ("mean", "leave_one_out"))
        check_choice("scale", scale, ("std", "none"))
        check_choice("single", single, ("zero", "reward", "error"))
        check_choice("null_reward", null_reward, ("error", "skip"))
        check_number("eps", eps, 0)
        if not math.isfinite(eps):
            raise JobError("eps is finite", expected="0 <= eps < inf", got=eps, remedy="pass 1e-6")
        self.baseline, self.scale, self.eps = baseline, scale, float(eps)
        self.single, self.null_reward = single, null_reward

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments that make this job again."""
        return {
            "baseline": self.baseline, "scale": self.scale, "eps": self.eps,
            "single": self.single, "null_reward": self.null_reward,
        }  # fmt: skip

    def prepare(self, inputs: RecordInputs) -> None:
        """Raise if the input has no rewards or no groups."""
        lacking = [name for name in ("group_id", "reward") if name not in inputs.ragged]
        if lacking or inputs.ragged.profile != "sample":
            raise JobError(
                "advantages need samples with rewards in groups",
                expected="samples with the columns group_id and reward",
                got=f"profile {inputs.ragged.profile!r} without {', '.join(lacking) or 'either'}",
                remedy="put reward and group_id beside request and response of the records that "
                "are converted, or declare them when samples are written",
            )  # fmt: skip

    def output_schema(self, inputs: RecordInputs) -> pa.Schema:
        """Return the schema of the input with the column advantage."""
        if "advantage" in inputs.ragged:
            return inputs.schema
        columns = [*inputs.ragged, standard_column("advantage")]
        return inputs.ragged.replace_columns(columns).to_arrow()

    def key_columns(self, inputs: RecordInputs) -> list[str] | None:
        """Return the columns that groups and conversations are told by."""
        wanted = ("sample_id", "group_id", "rollout_id", "reward")
        return [name for name in wanted if name in inputs.ragged]

    def keys(self, batch: pa.RecordBatch, context: Context) -> Keys:
        """Return group, conversation and reward of every record."""
        number = batch.num_rows
        groups = batch.column("group_id").to_pylist()
        if None in groups:
            raise _refused("a record has no group", batch, groups.index(None), "group_id",
                           "a group_id, for instance the record's own id")  # fmt: skip
        rewards = batch.column("reward")
        known = np.asarray(rewards.is_valid())
        if self.null_reward == "error" and not known.all():
            row = int(np.argmin(known))
            raise _refused("a record has no reward", batch, row, "reward",
                           "a reward, or null_reward='skip'")  # fmt: skip
        keys = np.zeros(number, self.key_type)
        keys["hash"] = hashed((group.encode() for group in groups), number)
        keys["reward"] = np.asarray(rewards.fill_null(0.0))
        if not np.isfinite(keys["reward"]).all():
            row = int(np.argmin(np.isfinite(keys["reward"])))
            raise _refused("a reward is no finite number", batch, row, "reward", "a finite reward")
        keys["known"] = known
        if "rollout_id" in batch.schema.names:
            names = batch.column("rollout_id").to_pylist()
            keys["named"] = [name is not None for name in names]
            texts = (None if name is None else name.encode() for name in names)
            keys["conversation"] = hashed(texts, number)
        context.figures["null_rewards"] = context.figures.get("null_rewards", 0) + int(
            (~known).sum()
        )
        return keys

    def decide(self, keys: Keys, context: Context) -> npt.NDArray[Any]:
        """Return the advantage of every record of whole groups."""
        out = np.zeros(len(keys), self.verdict_type)
        rows = np.flatnonzero(keys["known"])
        if not len(rows):
            return out
        keys = keys[rows]
        # Records without rollout_id are conversations of their own: numbered.
        conversation = keys["conversation"].copy()
        own = np.flatnonzero(~keys["named"])
        conversation[own, 0], conversation[own, 1] = 0, own.astype(np.uint64)
        named = keys["named"]
        order = np.lexsort((
            conversation[:, 1], conversation[:, 0], named, keys["hash"][:, 1], keys["hash"][:, 0]
        ))  # fmt: skip
        group_starts = _starts(keys["hash"][order])
        new_group = np.zeros(len(order), np.bool_)
        new_group[group_starts] = True
        new = new_group.copy()
        new[_starts(conversation[order])] = True
        new[1:] |= named[order][1:] != named[order][:-1]
        of_conversation = np.cumsum(new) - 1
        reward = keys["reward"][order]
        first = reward[new]
        other = np.flatnonzero(reward != first[of_conversation])
        if len(other):
            one, another = first[of_conversation[other[0]]], reward[other[0]]
            raise JobError(
                "branches of one conversation have different rewards",
                expected="one reward for all rows of a rollout_id",
                got=f"{another} beside {one}; rows with another than the first: {len(other)}",
                remedy="set the reward of a conversation on all its rows, or clear rollout_id",
            )  # fmt: skip
        # Conversations in the order of their first records, for sums in canonical order.
        lead = np.minimum.reduceat(order, np.flatnonzero(new))
        of_group = (np.cumsum(new_group) - 1)[new]
        canonical = np.lexsort((lead, of_group))
        values = np.empty(len(first))
        with np.errstate(over="ignore", invalid="ignore"):
            values[canonical] = self._normalized(first[canonical], of_group[canonical], context)
        if not np.isfinite(values).all():
            raise JobError(
                "rewards are too large for their mean and deviation", where=Where(column="reward"),
                expected="squares and sums below 1.8e308", got=f"{np.abs(first).max():g}",
                remedy="divide all rewards by one number",
            )  # fmt: skip
        out["advantage"][rows[order]] = values[of_conversation]
        out["known"][rows] = True
        return out

    def _normalized(
        self, reward: npt.NDArray[np.float64], of_group: npt.NDArray[np.int64], context: Context
    ) -> npt.NDArray[np.float64]:
        """Return advantages of conversations, sorted by group and then by their order."""
        starts = np.flatnonzero(np.diff(of_group, prepend=-1))
        size = np.diff(starts, append=len(reward)).astype(np.float64)
        mean = np.add.reduceat(reward, starts) / size
        centered = reward - mean[of_group]
        deviation = np.sqrt(np.add.reduceat(centered * centered, starts) / np.maximum(size - 1, 1))
        alone = size[of_group] == 1
        context.figures["groups"] = len(size)
        context.figures["conversations"] = len(reward)
        context.figures["groups_of_one"] = int((size == 1).sum())
        context.figures["groups_without_spread"] = int(((size > 1) & (deviation == 0)).sum())
        if self.single == "error" and alone.any():
            raise JobError(
                "a group has one conversation only", expected="at least two in every group",
                got=f"{int(alone.sum())} groups of one", remedy="pass single='zero' or 'reward'",
            )  # fmt: skip
        if self.baseline == "leave_one_out":
            # reward - mean of the others = (reward - mean) n / (n - 1)
            centered = centered * (size / np.maximum(size - 1, 1))[of_group]
        if self.scale == "std":
            below = deviation + self.eps
            # Without spread and eps everything is 0, not 0 / 0.
            centered = np.divide(
                centered, below[of_group], out=np.zeros_like(centered), where=below[of_group] > 0
            )
        centered[alone] = reward[alone] if self.single == "reward" else 0.0
        return centered

    def apply(
        self, batch: pa.RecordBatch, verdicts: npt.NDArray[Any], plan: Plan, context: Context
    ) -> pa.RecordBatch | None:
        """Return the batch with its advantages."""
        schema = self.schema(plan, context)
        values = pa.array(verdicts["advantage"], pa.float64(), mask=~verdicts["known"])
        arrays = [values if name == "advantage" else batch.column(name) for name in schema.names]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    def finish(self, plan: Plan, figures: list[list[dict[str, Any]]]) -> dict[str, Any]:
        """Return counts of records, conversations and groups."""
        read, decided = (super(Advantages, self).finish(plan, [part]) for part in figures[:2])
        return {**read, **decided}


def _starts(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Return where another key begins in sorted ones, (n, 2)."""
    changed = np.ones(len(keys), np.bool_)
    changed[1:] = (keys[1:] != keys[:-1]).any(axis=1)
    return np.flatnonzero(changed)


def _refused(what: str, batch: pa.RecordBatch, row: int, column: str, remedy: str) -> JobError:
    names = batch.schema.names
    record = batch.column("sample_id")[row].as_py() if "sample_id" in names else f"row {row}"
    got = batch.column(column)[row].as_py()
    return JobError(
        what, where=Where(column=column), expected="no null" if got is None else "a finite number",
        got=f"{'null' if got is None else got} in {record!r}",
        remedy=f"give it {remedy}",
    )  # fmt: skip
