"""Jobs that tests run, and what they compare."""

import hashlib
from pathlib import Path

import numpy as np

import ragged_format as rf
from ragged_format.testing import rollouts
from ragged_pipeline.jobs.merge import Merge


def bytes_of(folder):
    """Digest of every file of a dataset by its name, the lock of the manifest left out."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(Path(folder).iterdir())
        if path.name != "manifest.lock"
    }


def write_rollouts(folder, rows=400, seed=0, **options):
    """A dataset of several shards."""
    batch = rollouts(np.random.default_rng(seed), num_samples=rows, **options)
    with rf.Writer(folder, batch.schema, batch_rows=32, max_shard_bytes=1 << 20) as writer:
        writer.write(batch)
    return batch


class Failing(Merge):
    """A merge whose task number `at` raises what it is told."""

    name = "failing"

    def __init__(self, *, at=1, how="ragged", **options):
        super().__init__(**options)
        self.at, self.how = at, how

    def options(self):
        return {**super().options(), "at": self.at, "how": self.how}

    def produce(self, plan, stage, task, context):
        for number, batch in enumerate(super().produce(plan, stage, task, context)):
            if task.index == self.at and number == 0:
                if self.how == "ragged":
                    raise rf.InvariantError("broken", where=rf.Where(file="f", row=3), got=-1)
                if self.how == "os":
                    raise OSError(28, "No space left on device", "shard")
                if self.how == "die":
                    import os

                    os.kill(os.getpid(), 9)
                raise KeyError("surprise")
            yield batch


class DiesOnce(Merge):
    """A merge whose first task kills its process the first time."""

    name = "dies_once"

    def __init__(self, *, mark, **options):
        super().__init__(**options)
        self.mark = mark

    def options(self):
        return {**super().options(), "mark": self.mark}

    def produce(self, plan, stage, task, context):
        import os

        if task.index == 0 and not Path(self.mark).exists():
            Path(self.mark).touch()
            os.kill(os.getpid(), 9)
        yield from super().produce(plan, stage, task, context)
