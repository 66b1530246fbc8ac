"""API keys: who may do what with the dataset that this server serves.

A key is a secret of the client. The server keeps its SHA-256 only and compares all of them in
constant time, before it reads a body.
"""

from __future__ import annotations

import hashlib
import hmac
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from ragged_format.errors import Where
from ragged_server.http.errors import ForbiddenError, SettingsError, UnauthorizedError
from ragged_server.store.records import Quota

if TYPE_CHECKING:
    from ragged_server.settings import ServerSettings

__all__ = ["SCOPES", "Key", "Keys", "Scope", "load_keys"]

Scope: TypeAlias = Literal["ingest", "read", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
_FIELDS = {"name", "secret", "sha256", "scopes", "dataset", "max_records", "max_bytes", "window_s"}
# Shorter secrets can be guessed.
_MIN_SECRET = 16


@dataclass(frozen=True, slots=True)
class Key:
    """One API key.

    Attributes
    ----------
    name : str
        Of its holder; the account of quotas, and what logs and metrics show.
    digest : bytes
        SHA-256 of the secret.
    scopes : frozenset of str
        ``ingest`` writes, ``read`` reads and sees status and metrics, ``admin`` may do all.
    dataset : str, optional
        The only dataset that it is for; ``None`` for every one.
    quota : Quota, optional
        Overrides that of the settings.
    """

    name: str
    digest: bytes
    scopes: frozenset[str]
    dataset: str | None = None
    quota: Quota | None = None

    def may(self, scope: Scope) -> bool:
        """Return whether the key is for a use."""
        return scope in self.scopes or "admin" in self.scopes


class Keys:
    """The keys of one server; no keys means that everyone may do everything.

    Parameters
    ----------
    keys : iterable of Key
        With unique names and secrets.
    dataset : str
        Name of the dataset that is served.

    Examples
    --------
    >>> secret = "correct horse battery"
    >>> digest = hashlib.sha256(secret.encode()).digest()
    >>> keys = Keys([Key("workers", digest, frozenset({"ingest"}))], dataset="live")
    >>> keys.check("Bearer correct horse battery", "ingest").name
    'workers'
    >>> keys.check("Bearer correct horse battery", "read")
    Traceback (most recent call last):
    ...
    ragged_server.http.errors.ForbiddenError: [RF-H003] the key is not for this use
      expected: a key with the scope 'read'
      got:      the key 'workers', with ingest
      remedy:   ask whoever runs the server for one
    """

    def __init__(self, keys: Iterable[Key], *, dataset: str) -> None:
        self.keys = tuple(keys)
        self.dataset = dataset

    def __bool__(self) -> bool:
        return bool(self.keys)

    def check(self, authorization: str | None, scope: Scope) -> Key | None:
        """Return the key of a request that may do what it asks for; ``None`` if there are no keys.

        Parameters
        ----------
        authorization : str, optional
            Value of the Authorization header.
        scope : {"ingest", "read", "admin"}

        Raises
        ------
        UnauthorizedError
            There is no key, or an unknown one (``RF-H002``).
        ForbiddenError
            The key is for another dataset or other uses (``RF-H003``).
        """
        if not self.keys:
            return None
        scheme, _, secret = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not secret.strip():
            raise UnauthorizedError(
                "the request needs an API key", expected="Authorization: Bearer KEY",
                got="no Authorization header" if not authorization else "another scheme",
                headers={"WWW-Authenticate": f'Bearer realm="ragged", scope="{scope}"'},
                remedy="ask whoever runs the server for one",
            )  # fmt: skip
        digest = hashlib.sha256(secret.strip().encode("latin-1", "replace")).digest()
        # Every key is compared, so that time tells nothing about which one is near.
        found = [key for key in self.keys if hmac.compare_digest(key.digest, digest)]
        if not found:
            raise UnauthorizedError(
                "the API key is not known", expected="a key of this server", got="another",
                headers={"WWW-Authenticate": 'Bearer realm="ragged", error="invalid_token"'},
                remedy="ask whoever runs the server for one",
            )  # fmt: skip
        key = found[0]
        if key.dataset is not None and key.dataset != self.dataset:
            raise ForbiddenError(
                "the key is for another dataset", expected=f"a key for {self.dataset!r}",
                got=f"the key {key.name!r}, for another", headers=_forbidden(scope),
                remedy="ask whoever runs the server for one",
            )  # fmt: skip
        if not key.may(scope):
            raise ForbiddenError(
                "the key is not for this use", expected=f"a key with the scope {scope!r}",
                got=f"the key {key.name!r}, with {', '.join(sorted(key.scopes))}",
                headers=_forbidden(scope), remedy="ask whoever runs the server for one",
            )  # fmt: skip
        return key


def _forbidden(scope: Scope) -> dict[str, str]:
    challenge = f'Bearer realm="ragged", error="insufficient_scope", scope="{scope}"'
    return {"WWW-Authenticate": challenge}


def load_keys(settings: ServerSettings) -> Keys:
    """Return the keys of the settings' file and environment.

    Raises
    ------
    SettingsError
        The file cannot be read, or a key is malformed, weak or there twice (``RF-H016``).
    """
    keys: list[Key] = []
    if settings.keys_file is not None:
        keys += _of_file(settings.keys_file)
    if settings.keys is not None:
        words = settings.keys.get_secret_value().split()
        keys += [_of_word(word, number) for number, word in enumerate(words)]
    for what in ("name", "digest"):
        values = [getattr(key, what) for key in keys]
        if len(set(values)) < len(values):
            twice = sorted({key.name for key in keys if values.count(getattr(key, what)) > 1})
            raise SettingsError(
                f"two API keys have the same {'secret' if what == 'digest' else what}",
                expected="one each", got=", ".join(twice),
            )  # fmt: skip
    if settings.has_keys and not keys:
        raise SettingsError(
            "no API key is given where keys are asked for", expected="at least one key", got="none",
            remedy="leave keys_file and RAGGED_KEYS out to serve without keys on loopback",
        )  # fmt: skip
    return Keys(keys, dataset=settings.dataset)


def _of_file(path: Path) -> list[Key]:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise SettingsError(
            "the file of API keys cannot be read", where=Where(file=str(path)),
            expected="a TOML file with [[keys]]", got=err,
        ) from err  # fmt: skip
    listed = data.get("keys")
    if set(data) - {"keys"} or not isinstance(listed, list):
        raise SettingsError(
            "the file of API keys has another form", where=Where(file=str(path)),
            expected="tables [[keys]] and nothing else", got=", ".join(data) or "nothing",
        )  # fmt: skip
    return [_of_table(table, Where(file=str(path), row=row)) for row, table in enumerate(listed)]


def _of_table(table: Mapping[str, Any], where: Where) -> Key:
    if not isinstance(table, Mapping) or (unknown := sorted(set(table) - _FIELDS)):
        got = ", ".join(unknown) if isinstance(table, Mapping) else type(table).__name__
        raise _malformed(where, f"a table with {', '.join(sorted(_FIELDS))}", got)
    dataset = table.get("dataset")
    if dataset is not None and not isinstance(dataset, str):
        raise _malformed(where, "dataset is text", repr(dataset))
    return _key(
        table.get("name"), table.get("scopes"), _digest(table, where), where, dataset=dataset,
        quota=_quota(table, where),
    )  # fmt: skip


def _of_word(word: str, number: int) -> Key:
    where = Where(file="RAGGED_KEYS", row=number)
    name, colon, rest = word.partition(":")
    scopes, second, secret = rest.partition(":")
    if not colon or not second:
        raise _malformed(where, "NAME:SCOPE+SCOPE:SECRET", "a word with fewer parts")
    return _key(name, scopes.split("+"), _hash(secret, where), where)


def _key(
    name: object,
    scopes: object,
    digest: bytes,
    where: Where,
    *,
    dataset: str | None = None,
    quota: Quota | None = None,
) -> Key:
    if not isinstance(name, str) or not name or name == "*" or not name.isprintable():
        raise _malformed(where, "a name", repr(name))
    if not isinstance(scopes, list) or not scopes or not set(map(str, scopes)) <= set(SCOPES):
        raise _malformed(where, f"scopes out of {', '.join(SCOPES)}", repr(scopes))
    return Key(name, digest, frozenset(map(str, scopes)), dataset, quota)


def _digest(table: Mapping[str, Any], where: Where) -> bytes:
    secret, stated = table.get("secret"), table.get("sha256")
    if isinstance(secret, str) and stated is None:
        return _hash(secret, where)
    try:
        digest = bytes.fromhex(stated) if isinstance(stated, str) and secret is None else b""
    except ValueError:
        digest = b""
    if len(digest) != 32:
        raise _malformed(where, "either secret, or sha256 with 64 hexadecimal digits", "neither")
    return digest


def _hash(secret: str, where: Where) -> bytes:
    if len(secret) < _MIN_SECRET or not secret.isascii() or secret != secret.strip():
        expected = (
            f"a secret of at least {_MIN_SECRET} ASCII characters, as from `openssl rand -hex 32`"
        )
        raise _malformed(where, expected, f"one of {len(secret)}, or with other characters")
    return hashlib.sha256(secret.encode()).digest()


def _quota(table: Mapping[str, Any], where: Where) -> Quota | None:
    given = {
        name: table[name] for name in ("max_records", "max_bytes", "window_s") if name in table
    }
    if not given:
        return None
    for name, value in given.items():
        whole = isinstance(value, int) or (name == "window_s" and isinstance(value, float))
        if isinstance(value, bool) or not whole or value <= 0:
            raise _malformed(where, f"{name} is a positive number", repr(value))
    window = float(given.get("window_s", 86400.0))
    return Quota(given.get("max_records"), given.get("max_bytes"), window)


def _malformed(where: Where, expected: str, got: str) -> SettingsError:
    return SettingsError("an API key is malformed", where=where, expected=expected, got=got)
