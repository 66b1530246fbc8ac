"""Which systems there are adapters for, what each reads and writes, and whose form a payload has.

A module of :mod:`ragged_format.adapters` takes part by a constant ``ADAPTER`` of type
:class:`Adapter`; its name is the module's. Commands list, choose and run adapters through this
registry only.
"""

from __future__ import annotations

import inspect
import json
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from ragged_format import adapters
from ragged_format.arguments import shown
from ragged_format.errors import ConversionError, Where

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "JSON_SUFFIXES",
    "Adapter",
    "Reader",
    "Writer",
    "adapter_arguments",
    "all_adapters",
    "choose_reader",
    "choose_writer",
    "option_names",
    "recognize",
    "required_options",
    "unrecognized",
]

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """How payloads of a system come in.

    Attributes
    ----------
    to_samples : callable
        ``to_samples(payloads, *, vocab_size, ..., report=None)`` returns one batch of samples. Its
        other keyword arguments are the options that ``ragged convert`` passes on; `schema`,
        `columns` and `on_error` among them work as in `ragged_format.adapters.vllm.to_samples`.
    payloads : callable, optional
        ``payloads(path)`` yields the payloads of one file or directory, in order, with bounded
        memory. ``None``: JSON records, which the command reads itself.
    suffixes : tuple of str
        Names of files that `payloads` reads end so; a directory stands for all such files in it.
        Empty: a path is given to `payloads` as it is, directory or not.
    window : int
        Payloads of one call of `to_samples`, at most.
    needs_vocab_size : bool
        False where payloads state it, so that ``--vocab-size`` may be left out.
    recognizes : callable, optional
        Tells whether a payload (of JSON: the record) has the form that this adapter reads. It is
        quick, raises nothing, and is false for the forms of other adapters.
    """

    to_samples: Callable[..., pa.RecordBatch]
    payloads: Callable[[str], Iterable[Any]] | None = None
    suffixes: tuple[str, ...] = JSON_SUFFIXES
    window: int = 256
    needs_vocab_size: bool = True
    recognizes: Callable[[Any], bool] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """How records of this format go out.

    Attributes
    ----------
    write : callable
        ``write(batches, path, **options)`` takes an iterable of batches of `profile`, writes a file
        or a directory at `path`, which does not exist, and returns counts by name. Its keyword
        arguments are the options that ``ragged export`` passes on.
    profile : {"sample", "packed", "any"}
        Of the batches.
    makes : str
        What is written, in a few words: "one msgpack file per rank".
    """

    write: Callable[..., Mapping[str, int]]
    profile: Literal["sample", "packed", "any"]
    makes: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """One system, or one form of its data.

    Attributes
    ----------
    name : str
        For ``--from`` and ``--to``; the name of the module.
    title : str
        System and form, in a few words.
    reads : Reader, optional
    writes : Writer, optional
    """

    name: str
    title: str
    reads: Reader | None = None
    writes: Writer | None = None


@cache
def all_adapters() -> dict[str, Adapter]:
    """Return every adapter by name, in order of their names."""
    out = {}
    for info in pkgutil.iter_modules(adapters.__path__):
        if info.name.startswith("_"):
            continue
        found = getattr(import_module(f"{adapters.__name__}.{info.name}"), "ADAPTER", None)
        if isinstance(found, Adapter):
            out[found.name] = found
    return dict(sorted(out.items()))


def choose_reader(name: str) -> Reader:
    """Return how payloads of a system come in.

    Raises
    ------
    ConversionError
        There is no such adapter, or it only writes (``RF-A001``).

    Examples
    --------
    >>> choose_reader("vllm").window
    256
    """
    reads = {key: adapter.reads for key, adapter in all_adapters().items()}
    name = name if isinstance(name, str) else repr(name)
    found = reads.get(name)
    if found is None:
        known = [key for key, reader in reads.items() if reader is not None]
        raise ConversionError(
            "no adapter reads this form", expected=", ".join(known), got=shown(name),
            remedy="it can only be written" if name in reads else "name one of these",
        )  # fmt: skip
    return found


def choose_writer(name: str) -> Writer:
    """Return how records go out to a system.

    Raises
    ------
    ConversionError
        There is no such adapter, or it only reads (``RF-A001``).
    """
    writes = {key: adapter.writes for key, adapter in all_adapters().items()}
    name = name if isinstance(name, str) else repr(name)
    found = writes.get(name)
    if found is None:
        known = [key for key, writer in writes.items() if writer is not None]
        raise ConversionError(
            "no adapter writes this form", expected=", ".join(known) or "none yet", got=shown(name),
            remedy="it can only be read" if name in writes else "name one of these",
        )  # fmt: skip
    return found


def adapter_arguments(
    function: Callable[..., Any], options: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return options as arguments of ``to_samples`` or ``write``.

    Raises
    ------
    ConversionError
        They are no mapping, or the function does not take one of them (``RF-A011``).
    """
    takes = option_names(function)
    given = {} if options is None else options
    known = isinstance(given, Mapping) and all(name in takes for name in given)
    if not known:
        raise ConversionError(
            "the adapter does not take these options", code="RF-A011",
            expected=f"a mapping of {', '.join(takes) or 'nothing'}", got=repr(options)[:200],
            remedy="pass {name: value} with these names",
        )  # fmt: skip
    if lacking := [name for name in required_options(function) if name not in given]:
        raise ConversionError(
            "the adapter needs more options", code="RF-A011", expected=", ".join(lacking),
            got=", ".join(given) or "none", remedy="pass them in options",
        )  # fmt: skip
    return dict(given)


def option_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the options of ``to_samples`` or ``write``: what has a keyword, `report` left out.

    Examples
    --------
    >>> def write(batches, path, *, top_k, lossy=False, report=None): ...
    >>> option_names(write)
    ('top_k', 'lossy')
    """
    parameters = inspect.signature(function).parameters.values()
    return tuple(
        p.name for p in parameters
        if (p.kind is p.KEYWORD_ONLY or p.default is not p.empty) and p.name != "report"
    )  # fmt: skip


def required_options(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the options of ``to_samples`` or ``write`` that have no default.

    Examples
    --------
    >>> def write(batches, path, *, top_k, lossy=False): ...
    >>> required_options(write)
    ('top_k',)
    """
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty)


def recognize(payload: Any) -> list[str]:
    """Return the names of the adapters that recognize a payload as theirs.

    A ``response`` that is JSON text or the text of an event stream is parsed first (of a stream,
    the first event), so that adapters see objects.
    """
    payload = _parsed(payload)
    readers = ((name, adapter.reads) for name, adapter in all_adapters().items())
    return [name for name, r in readers if r and r.recognizes is not None and r.recognizes(payload)]


def _parsed(payload: Any) -> Any:
    """Return a payload with the text of its response parsed, as far as that goes."""
    if not isinstance(payload, Mapping):
        return payload
    response = payload.get("response", payload.get("response_text"))
    if isinstance(response, str):
        response = response.encode(errors="surrogatepass")
    if not isinstance(response, bytes):
        return payload
    text = response.strip()
    if text.startswith(b"data:"):
        text = text.partition(b"\n")[0].removeprefix(b"data:")
    try:
        return {**payload, "response": json.loads(text)}
    except (ValueError, RecursionError):
        return payload


def unrecognized(payload: Any, where: Where, *, expected: str | None = None) -> ConversionError:
    """Return the error for a payload of an unknown form, or of another form than expected.

    Parameters
    ----------
    payload : object
        Looked at to say what it is.
    where : Where
    expected : str, optional
        The adapter that was to read it. ``None``: whichever recognizes it.
    """
    found = recognize(payload)
    known = [name for name, adapter in all_adapters().items() if adapter.reads]
    if found and expected is not None:
        return ConversionError(
            "the input has another form", where=where, expected=expected, got=" or ".join(found),
            remedy=f"convert these records with --from {found[0]}; one run reads one form",
        )  # fmt: skip
    return ConversionError(
        "the form of the input is not recognized" if not found else "the form is not certain",
        where=where, expected=expected or f"one of {', '.join(known)}",
        got=" or ".join(found) if found else _outline(payload),
        remedy="name the form with --from",
    )  # fmt: skip


def _outline(payload: Any) -> str:
    """Return what a payload is made of, briefly."""
    if not isinstance(payload, Mapping):
        return type(payload).__name__
    parts = []
    for key, value in list(payload.items())[:8]:
        inner = list(value)[:6] if isinstance(value, Mapping) else None
        parts.append(f"{key} {{{', '.join(map(str, inner))}}}" if inner else str(key))
    return f"an object of {', '.join(parts)}" + (", …" if len(payload) > 8 else "")
