"""``POST /v1/samples``: from a body to records that are on disk.

Plain ASGI, since most requests of a server are these (docs/design/024-http.md). What costs time
runs in threads: decoding, validation, digests; the event loop moves bytes only.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from ragged_format.adapters.registry import JSON_SUFFIXES, all_adapters
from ragged_server.http.body import (
    Headers,
    Receive,
    Scope,
    Send,
    headers_of_scope,
    read_body,
    reserve_body,
)
from ragged_server.http.decode import Body, Form
from ragged_server.http.decoders import Job
from ragged_server.http.errors import BadRequestError, UnsupportedMediaError
from ragged_server.http.respond import Parameters, parameters_of, send_json

if TYPE_CHECKING:
    from ragged_server.http.auth import Key
    from ragged_server.http.context import Context
    from ragged_server.http.limits import Reservation
    from ragged_server.store.records import Appended

__all__ = ["ARROW", "JSON_FORMS", "Ingest", "sources"]

ARROW = "application/vnd.apache.arrow.stream"
JSON_FORMS: dict[str, Form] = {"application/json": "json", "application/x-ndjson": "ndjson"}
_FORMS: dict[str, Form] = {ARROW: "arrow", **JSON_FORMS}
# Arguments of adapters that a request may choose, and how their text is read.
_OPTIONS = ("logprobs_mode", "on_missing_support", "on_invalid_support")
_MAX_KEY = 255


def sources() -> list[str]:
    """Return the adapters that read JSON, for ``?source=``."""
    return [
        name
        for name, adapter in all_adapters().items()
        if adapter.reads is not None
        and adapter.reads.payloads is None
        and adapter.reads.suffixes == JSON_SUFFIXES
    ]


class Ingest:
    """The route.

    Parameters
    ----------
    context : Context
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._sources = sources()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 201 when the records are durable; 200 if there was nothing new among them."""
        context = self._context
        headers = headers_of_scope(scope)
        key = context.keys.check(_text(headers, b"authorization"), "ingest")
        context.require_intake()
        store = context.store
        parameters = parameters_of(scope, ("source", "vocab_size", *_OPTIONS))
        form, is_compressed = self._form(headers)
        source, options = self._source(form, parameters)
        idempotency_key = _idempotency_key(headers)
        with reserve_body(headers, context.settings, context.budget) as reservation:
            context.ingesting += 1
            try:
                data = await read_body(scope, receive, reservation.size, context.settings)
                reservation.shrink(len(data))
                context.metrics.received.inc(len(data))
                context.metrics.sizes.observe(len(data))
                body = Body(data, form, is_compressed, source, options)
                del data
                appended, report = await _stored(
                    context, store, body, reservation, key, idempotency_key
                )
            finally:
                context.ingesting -= 1
        await _answer(send, appended, report)

    def _form(self, headers: Headers) -> tuple[Form, bool]:
        media_type = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        form = _FORMS.get(media_type.decode("latin-1"))
        if form is None:
            raise UnsupportedMediaError(
                "the body's media type is not one that is read", expected=", ".join(_FORMS),
                got=media_type.decode("latin-1")[:80] or "no Content-Type",
                headers={"Accept-Post": ", ".join(_FORMS)},
            )  # fmt: skip
        coding = headers.get(b"content-encoding", b"identity").strip().lower()
        if coding not in (b"identity", b"zstd", b""):
            raise UnsupportedMediaError(
                "the body's content coding is not one that is read", expected="zstd or identity",
                got=coding.decode("latin-1")[:80], headers={"Accept-Encoding": "zstd, identity"},
            )  # fmt: skip
        return form, coding == b"zstd"

    def _source(self, form: Form, parameters: Parameters) -> tuple[str, dict[str, Any]]:
        source = parameters.text("source")
        if form == "arrow":
            if not parameters:
                return "", {}
            given = [name for name in ("source", "vocab_size", *_OPTIONS) if parameters.text(name)]
            if given:
                raise BadRequestError(
                    f"an Arrow stream has no {given[0]}", expected="no parameters",
                    got=given[0], remedy=f"leave it out, or send JSON as {', '.join(JSON_FORMS)}",
                )  # fmt: skip
            return "", {}
        if source not in self._sources:
            raise BadRequestError(
                "the parameter source names whose JSON it is", expected=" or ".join(self._sources),
                got="none" if source is None else source[:80],
            )  # fmt: skip
        options: dict[str, Any] = {
            name: text for name in _OPTIONS if (text := parameters.text(name)) is not None
        }
        if parameters.text("vocab_size") is not None:
            options["vocab_size"] = parameters.integer("vocab_size", 0, 1, 1 << 31)
        return source, options


async def _stored(
    context: Context,
    store: Any,
    body: Body,
    reservation: Reservation,
    key: Key | None,
    idempotency_key: str | None,
) -> tuple[Appended, dict[str, Any] | None]:
    """Return what became of a body when it is durable; decoders and store tell once."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[Appended, dict[str, Any] | None]] = loop.create_future()

    def tell(
        appended: Appended | None, error: BaseException | None, report: dict[str, Any] | None
    ) -> None:
        if done.cancelled():
            return  # there is nobody to answer; what was stored stays
        if error is not None:
            done.set_exception(error)
        elif appended is not None:
            done.set_result((appended, report))

    def on_stored(*outcome: Any) -> None:
        context.answers.put(loop, partial(tell, *outcome))

    account = None if key is None else key.name
    context.decoders.submit(Job(body, reservation, store, account, idempotency_key, on_stored))
    return await done


async def _answer(send: Send, appended: Appended, report: dict[str, Any] | None) -> None:
    status = 201 if appended.stored and not appended.replayed else 200
    data: dict[str, Any] = {
        "first_sequence": appended.first_sequence,
        "stored": appended.stored,
        "duplicates": appended.duplicates,
        "cursor": appended.cursor,
        "replayed": appended.replayed,
    }
    if report is not None:
        data["conversion"] = report
    fields = [(b"ragged-cursor", appended.cursor.encode())]
    await send_json(send, status, data, fields)


def _text(headers: Headers, name: bytes) -> str | None:
    value = headers.get(name)
    return None if value is None else value.decode("latin-1")


def _idempotency_key(headers: Headers) -> str | None:
    """Return the Idempotency-Key, a string of RFC 8941 or bare."""
    text = _text(headers, b"idempotency-key")
    if text is None:
        return None
    key = text.strip()
    if len(key) >= 2 and key[0] == key[-1] == '"':
        key = key[1:-1]
    if not 0 < len(key) <= _MAX_KEY or not key.isascii() or not key.isprintable():
        raise BadRequestError(
            "the Idempotency-Key is malformed", expected=f"1 to {_MAX_KEY} printable characters",
            got=f"{len(key)} characters",
        )  # fmt: skip
    return key
