"""Options that the commands of the client share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ragged_format.errors import DatasetNotFoundError, Where
from ragged_server.client._core import base_urls

__all__ = ["CaFile", "KeyFile", "RetryFor", "Url", "Zstd", "key_of", "urls_of"]

Url = Annotated[
    str,
    typer.Argument(
        metavar="URL",
        show_default=False,
        help="Of the server, such as http://127.0.0.1:8080; of replicas, with commas between.",
    ),
]
Zstd = Annotated[
    int | None,
    typer.Option("--zstd", metavar="LEVEL", min=1, max=22, help="Send and get bodies under zstd."),
]
RetryFor = Annotated[
    float,
    typer.Option(
        "--retry-for", metavar="SECONDS", min=0, help="How long a request is tried again."
    ),
]
KeyFile = Annotated[
    Path | None,
    typer.Option(
        "--key-file", metavar="FILE", help="File with the API key. Default: RAGGED_API_KEY, if set."
    ),
]
CaFile = Annotated[
    Path | None,
    typer.Option("--ca-file", metavar="FILE", help="Certificates (PEM) that the server's is of."),
]


def urls_of(url: str) -> list[str]:
    """Return the URLs that one argument names, without the path of samples.

    Raises
    ------
    UnsupportedFeatureError
        One is not that of a server (``RF-V002``).
    LimitExceededError
        There is none (``RF-L001``).
    """
    return list(base_urls([part.strip() for part in url.split(",") if part.strip()]))


def key_of(file: Path | None) -> str | None:
    """Return the key in a file.

    Raises
    ------
    DatasetNotFoundError
        There is no key in it (``RF-C008``).
    """
    if file is None:
        return None
    key = file.read_text().strip()
    if not key:
        raise DatasetNotFoundError(
            "the file has no key", where=Where(file=str(file)), expected="one line", got="nothing"
        )
    return key
