"""A dataset in an object store as the output of a job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ragged_format.errors import DatasetNotFoundError, StorageError
from ragged_format.local_storage import lease_name
from ragged_format.storage import open_storage
from ragged_pipeline.outputs import LocalOutput, Output
from ragged_pipeline.stores.object_storage import ObjectStorage
from ragged_pipeline.stores.session import commit, require_conditions

if TYPE_CHECKING:
    from ragged_format.manifest import Manifest
    from ragged_pipeline.plan import Plan

__all__ = ["StoreOutput"]


class StoreOutput(Output):
    """A prefix of an object store.

    Tasks leave their files in a work directory on local disk, where an interrupted run finds them
    again; they are uploaded when all are done, and removed after the commit.

    Parameters
    ----------
    place : str
        URL.

    Raises
    ------
    UnsupportedFeatureError
        The place can only be read from (``RF-V002``).
    """

    def __init__(self, place: str) -> None:
        storage = open_storage(place)
        if not isinstance(storage, ObjectStorage):
            storage.begin("")
            raise TypeError(place)
        self._storage = storage
        self.place = storage.place
        self._token = ""
        self._names: list[str] = []
        scratch = storage.location.scratch("jobs") / storage.location.key
        scratch.parent.mkdir(parents=True, exist_ok=True)
        self._local = LocalOutput(str(scratch))

    def current(self) -> Manifest | None:
        """Return the manifest that is there."""
        with suppress(DatasetNotFoundError):
            return self._storage.read_manifest()
        return None

    def work(self, plan: Plan) -> Path:
        """Return the work directory of a plan."""
        return self._local.work(plan)

    @contextmanager
    def held(self, plan: Plan) -> Iterator[None]:
        """Hold the plan on this machine, and a lease that keeps its shards from being swept."""
        with self._local.held(plan):
            self._token, self._names = plan.token, []
            try:
                require_conditions(self._storage.objects, lease_name(plan.token))
                yield
            finally:
                # A store out of reach keeps it, and it expires.
                with suppress(StorageError):
                    self._storage.objects.delete([lease_name(plan.token)])

    def tidy(self, plan: Plan) -> None:
        """Remove what a run left that was killed after its commit, unless it lives."""
        if self.work(plan).exists():
            with suppress(OSError), self._local.held(plan):
                self._local.clear(plan)
                self._storage.objects.delete([lease_name(plan.token)])

    def moved(self, name: str) -> Path | None:  # noqa: ARG002 - the base's
        """Return None: files are copied."""
        return None

    def put(self, file: Path, name: str) -> None:
        """Upload a file; it stays where it is until the commit."""
        self._storage.objects.upload(file, name)
        self._storage.objects.put(lease_name(self._token), b"")
        self._names.append(name)

    def commit(self, build: Callable[[Manifest | None], Manifest]) -> Manifest:
        """Replace the manifest by a conditional put."""
        return commit(self._storage, build, self._names, self._token, _ignore)


def _ignore(*, undecided: bool) -> None:
    """Do nothing: a run whose commit is undecided is run again, with the same result."""
