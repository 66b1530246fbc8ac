"""Calls of obstore: its errors become typed ones, and a forked child does not hang in them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from obstore import exceptions

from ragged_format.errors import RaggedError, StorageError, UnsupportedFeatureError, Where

__all__ = ["Conflict", "NotThere", "called"]


class NotThere(Exception):  # noqa: N818 - an answer, not an error
    """There is no such object."""


class Conflict(Exception):  # noqa: N818 - an answer, not an error
    """The condition of a put does not hold: somebody else was faster."""


_pid: int | None = None
# Where a machine of the cloud is asked for its credentials, when no others are there.
_METADATA_HOSTS = ("169.254.169.254", "metadata.google.internal")


@contextmanager
def called(name: str) -> Iterator[None]:
    """Turn what obstore raises inside the block into the errors of this package.

    Parameters
    ----------
    name : str
        URL of the object, for the error.

    Raises
    ------
    NotThere, Conflict
    StorageError
        The store cannot be reached or denies the access (``RF-C010``), or the process was forked
        after the first call: the threads of obstore do not live in the child.
    UnsupportedFeatureError
        The store cannot do what was asked (``RF-V002``).
    """
    global _pid
    if _pid is None:
        _pid = os.getpid()
    if _pid != os.getpid():
        raise StorageError(
            "object stores are of no use in a forked process", where=Where(file=name),
            expected="a process that was started afresh", got="a fork of one that used a store",
            remedy="start processes by spawn or forkserver: "
            "multiprocessing.get_context('forkserver'), multiprocessing_context= of DataLoader",
        )  # fmt: skip
    try:
        yield
    except FileNotFoundError as err:
        raise NotThere(name) from err
    except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as err:
        raise Conflict(name) from err
    except exceptions.NotSupportedError as err:
        raise UnsupportedFeatureError(
            "the store cannot do this", where=Where(file=name),
            expected="a store with conditional puts", got=said(err),
            remedy="use a store that has them: S3, GCS, Azure, MinIO, R2",
        ) from err  # fmt: skip
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as err:
        raise StorageError(
            "the store denies the access", where=Where(file=name),
            expected="credentials that allow it", got=said(err),
            remedy="set the store's environment variables (AWS_ACCESS_KEY_ID, ...) or pass "
            "storage_options",
        ) from err  # fmt: skip
    except exceptions.BaseError as err:
        if any(host in str(err) for host in _METADATA_HOSTS):
            raise StorageError(
                "there are no credentials for the store", where=Where(file=name),
                expected="credentials in the environment, in storage_options or from the machine",
                got=said(err),
                remedy="set the store's environment variables (AWS_ACCESS_KEY_ID, ...) or pass "
                "storage_options",
            ) from err  # fmt: skip
        raise StorageError(
            "the store did not do what was asked", where=Where(file=name),
            expected="an answer that says so", got=said(err),
            remedy="check the URL, the endpoint, the region and the network; then try again",
        ) from err  # fmt: skip
    except RaggedError:
        raise
    except OSError as err:
        if isinstance(err, FileExistsError):
            raise Conflict(name) from err
        raise


def said(error: BaseException) -> str:
    """Return the gist of an obstore error: one line, no query strings, which may hold secrets."""
    text = str(error).split("\n\nDebug source:")[0]
    text = re.sub(r"\?[^\s\"')]*", "?...", " ".join(text.split()))
    return text if len(text) <= 400 else text[:400] + "..."
