"""Every setting of the server: its name, meaning, default and bounds, stated once.

A value comes from, in this order: the command line (``--max-request-bytes 64MiB``), the
environment (``RAGGED_MAX_REQUEST_BYTES``), the settings file (TOML, ``max_request_bytes =
"64MiB"``), the default. The command's options and the table in ``docs/server.md`` are made from
this class.
"""

from __future__ import annotations

import json
import os
import tomllib
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BeforeValidator,
    ByteSize,
    Field,
    SecretStr,
    ValidationError,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from ragged_format.arguments import parse_bytes, parse_seconds
from ragged_format.errors import LimitExceededError, Where
from ragged_server.http.errors import SettingsError

__all__ = ["ServerSettings", "as_toml", "is_loopback", "load_settings"]


_NO_SIZE = "a size is a number of bytes, or has a unit: 65536, 64MiB, 1.5GB"


def _seconds(value: Any) -> Any:
    """Return what the command line takes as a duration; other values are left to pydantic."""
    if isinstance(value, str):
        try:
            return parse_seconds(value)
        except LimitExceededError as err:
            raise ValueError(f"{err.what}: {err.expected}") from err
    return value


def _bytes(value: Any) -> Any:
    """Return what the command line takes as a size; other values are left to pydantic."""
    if isinstance(value, str):
        try:
            return parse_bytes(value)
        except LimitExceededError as err:
            raise ValueError(_NO_SIZE) from err
    return value


def _words(value: Any) -> Any:
    return value.replace(",", " ").split() if isinstance(value, str) else value


Seconds = Annotated[float, BeforeValidator(_seconds), Field(ge=0, allow_inf_nan=False)]
PositiveSeconds = Annotated[float, BeforeValidator(_seconds), Field(gt=0, allow_inf_nan=False)]
Size = Annotated[ByteSize, BeforeValidator(_bytes), Field(ge=1)]
Count = Annotated[int, Field(ge=1)]
MI = 1 << 20


class ServerSettings(BaseSettings):
    """All settings of one server, as :func:`load_settings` gathers them.

    Sizes are bytes or have a unit (``64MiB``); durations are seconds or have a unit (``15m``).
    """

    model_config = SettingsConfigDict(
        env_prefix="RAGGED_", extra="forbid", frozen=True, env_ignore_empty=True,
        validate_default=False, nested_model_default_partial_update=False,
    )  # fmt: skip
    # Not on the command line, where other users of the machine see it.
    NOT_OPTIONS: ClassVar[frozenset[str]] = frozenset({"directory", "keys"})

    directory: Path = Field(description="Directory of the dataset; made where it does not exist.")
    name: str = Field(
        "",
        description="Name of the dataset, to which keys are bound. Default: the directory's name.",
        max_length=200,
    )

    host: str = Field(
        "127.0.0.1", description="Address to listen on; without keys only a loopback address."
    )
    port: int = Field(8080, description="Port to listen on; 0 takes a free one.", ge=0, le=65535)
    allowed_hosts: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_words)] = Field(
        (), description="Further names that the Host header may have while there are no keys."
    )
    tls_cert: Path | None = Field(
        None, description="Certificate chain (PEM); with tls_key, the server speaks HTTPS."
    )
    tls_key: Path | None = Field(None, description="Private key of tls_cert (PEM).")
    keys_file: Path | None = Field(None, description="TOML file with the API keys.")
    keys: SecretStr | None = Field(
        None, description="API keys as words NAME:SCOPE+SCOPE:SECRET; in the environment only."
    )

    schema_file: Path | None = Field(
        None,
        description="File, stream or dataset with the log's schema. Default: the first request's.",
    )
    vocab_size: Count | None = Field(
        None, description="Of the model; lets the first request be engine JSON."
    )
    segment_bytes: Size = Field(
        ByteSize(256 * MI),
        description="Size at which a log segment is closed and sealed into shards.",
    )
    segment_age_s: PositiveSeconds = Field(
        300.0, description="Age at which a log segment is closed and sealed into shards."
    )
    retain_bytes: Size | None = Field(
        None, description="Oldest shards are removed while the dataset is larger."
    )
    retain_age_s: PositiveSeconds | None = Field(
        None, description="Shards are removed when their newest record is older."
    )
    retain_policy_version: int | None = Field(
        None, description="Shards are removed when all their records have an older policy version."
    )
    grace_s: Seconds = Field(
        60.0, description="Time for which removed files stay for readers that use them."
    )
    dedupe_window_s: Seconds = Field(
        0.0, description="Time for which ids of removed samples are still known."
    )
    idempotency_window_s: Seconds = Field(
        86400.0, description="Time for which an Idempotency-Key is remembered."
    )
    quota_records: Count | None = Field(
        None, description="Records that one key may store in a window."
    )
    quota_bytes: Size | None = Field(None, description="Bytes that one key may store in a window.")
    quota_window_s: PositiveSeconds = Field(86400.0, description="Window of the quotas.")
    queue_bytes: Size = Field(
        ByteSize(256 * MI), description="Validated requests that may wait for the disk."
    )

    max_request_bytes: Size = Field(ByteSize(64 * MI), description="Largest body, as sent.")
    max_decoded_bytes: Size = Field(
        ByteSize(256 * MI), description="Largest body, as decompressed; also largest in memory."
    )
    max_json_bytes: Size = Field(
        ByteSize(32 * MI), description="Largest body of engine JSON, as decompressed."
    )
    max_in_flight_bytes: Size = Field(
        ByteSize(512 * MI), description="Bodies that are held at one time, all together."
    )
    max_request_records: Count = Field(1 << 16, description="Most records of one request.")
    max_request_batches: Count = Field(
        1 << 12, description="Most batches of one request, those without records included."
    )
    max_request_tokens: Count = Field(1 << 24, description="Most tokens of one request.")
    max_record_tokens: Count = Field(1 << 22, description="Most tokens of one record.")
    max_set_width: Count = Field(1 << 20, description="Most elements of one candidate set or head.")
    max_header_bytes: Size = Field(
        ByteSize(32 << 10), description="Largest request line and header together."
    )
    header_timeout_s: PositiveSeconds = Field(
        10.0, description="Time for a whole header to arrive."
    )
    body_idle_timeout_s: PositiveSeconds = Field(
        30.0, description="Time without any byte of a body."
    )
    body_timeout_s: PositiveSeconds = Field(600.0, description="Time for a whole body to arrive.")
    keep_alive_timeout_s: PositiveSeconds = Field(
        75.0, description="Time for which an idle connection is kept."
    )
    max_connections: Count = Field(4096, description="Open connections.")

    page_bytes: Size = Field(
        ByteSize(16 * MI), description="Size of an answer to a read that does not ask for one."
    )
    max_page_bytes: Size = Field(ByteSize(64 * MI), description="Largest answer to a read.")
    max_wait_s: Seconds = Field(60.0, description="Longest wait of a read for new records.")
    max_readers: Count = Field(
        32, description="Reads that are answered at one time; waiting ones do not count."
    )
    max_waiting: Count = Field(1024, description="Reads that wait for new records at one time.")
    send_timeout_s: PositiveSeconds = Field(
        30.0, description="Time for which a reader may take nothing of its answer."
    )

    workers: Count = Field(
        1,
        description="Processes that talk HTTP, decode and validate. With more than one, another"
        " process has the store.",
    )
    decode_threads: Count = Field(
        min(4, os.cpu_count() or 1),
        description="Threads that decode and validate. Default: the number of cores, at most 4.",
    )
    read_threads: Count = Field(4, description="Threads that read the log and encode answers.")
    drain_timeout_s: PositiveSeconds = Field(
        30.0, description="Time that running requests get to end when the server stops."
    )
    drain_delay_s: Seconds = Field(
        0.0,
        description="Time for which a stopping server answers, so that balancers see /readyz.",
    )
    seal_on_stop: bool = Field(
        default=True,
        description="Whether a stopping server seals what is in the log, in what is left of"
        " drain_timeout_s.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least level of log lines."
    )
    log_format: Literal["json", "text"] = Field("json", description="Form of log lines.")
    log_requests: Literal["all", "errors", "none"] = Field(
        "all", description="Which requests get a log line; probes never do."
    )
    tokenizer: Path | None = Field(
        None, description="tokenizer.json with which the page shows text."
    )

    @model_validator(mode="after")
    def _agree(self) -> Self:
        for smaller, larger in _ORDERED:
            if getattr(self, smaller) > getattr(self, larger):
                raise ValueError(f"{smaller} is larger than {larger}")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together")
        if not self.has_keys and not is_loopback(self.host):
            raise ValueError(
                f"host {self.host!r} is not a loopback address, and there are no keys: everyone who"
                " reaches the address could write and read; set keys_file, or RAGGED_KEYS"
            )
        return self

    @property
    def has_keys(self) -> bool:
        """Whether requests need a key."""
        return self.keys_file is not None or self.keys is not None

    @property
    def dataset(self) -> str:
        """Name of the dataset, to which keys are bound."""
        return self.name or self.directory.absolute().name


_ORDERED = [
    ("max_request_bytes", "max_decoded_bytes"),
    ("max_decoded_bytes", "max_in_flight_bytes"),
    ("max_json_bytes", "max_decoded_bytes"),
    ("page_bytes", "max_page_bytes"),
    ("max_record_tokens", "max_request_tokens"),
]


def load_settings(directory: Path, file: Path | None = None, **options: Any) -> ServerSettings:
    """Return the settings from options, the environment and a file.

    Parameters
    ----------
    directory : Path
        Of the dataset.
    file : Path, optional
        TOML with settings by name.
    **options
        Settings that go before all others; ``None`` leaves one out.

    Raises
    ------
    SettingsError
        A value is unknown, malformed or out of bounds, or two contradict each other (``RF-H016``).

    Examples
    --------
    >>> settings = load_settings(Path("data/live"), max_request_bytes="8MiB", retain_age_s="7d")
    >>> settings.max_request_bytes, settings.retain_age_s, settings.dataset
    (8388608, 604800.0, 'live')
    >>> load_settings(Path("data/live"), host="0.0.0.0")
    Traceback (most recent call last):
    ...
    ragged_server.http.errors.SettingsError: [RF-H016] the settings are not usable
      expected: settings that agree
      got:      host '0.0.0.0' is not a loopback address, and there are no keys: everyone who ...
    """
    given = {key: value for key, value in options.items() if value is not None}

    values = _read(file)

    class Settings(ServerSettings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
            file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            of_file = InitSettingsSource(settings_cls, init_kwargs=values)
            return init_settings, env_settings, of_file

    try:
        return Settings(directory=directory, **given)
    except ValidationError as err:
        first = err.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"]))
        text = first["msg"].removeprefix("Value error, ")
        if first["type"].startswith("byte_size"):
            text = _NO_SIZE
        raise SettingsError(
            f"the setting {place} is not usable" if place else "the settings are not usable",
            where=Where(file=str(file) if place in values and place not in given else None),
            expected="settings that agree" if not place else text,
            got=_shown(place, first["input"]) if place else text,
        ) from err  # fmt: skip
    except ValueError as err:  # pydantic-settings: a value of the environment is not JSON
        raise SettingsError("the environment has a malformed setting", got=err) from err


def _shown(place: str, value: Any) -> str:
    return "a secret" if place == "keys" else repr(value)


def _read(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise SettingsError(
            "the settings file cannot be read", where=Where(file=str(file)),
            expected="a TOML file", got=err,
        ) from err  # fmt: skip


def as_toml(settings: ServerSettings) -> str:
    """Return settings as a file that gives them again; secrets are left out.

    Settings without a value are comments.
    """
    lines = []
    for name, field in type(settings).model_fields.items():
        if name == "directory":
            continue
        value = getattr(settings, name)
        lines.append(f"# {field.description}")
        if name == "keys":
            lines.append("# keys is read from RAGGED_KEYS only")
        elif value is None:
            lines.append(f"# {name} =")
        else:
            lines.append(f"{name} = {json.dumps(_plain(value), ensure_ascii=False)}")
    return "\n".join(lines) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def is_loopback(host: str) -> bool:
    """Return whether an address to listen on is reached from this machine only.

    Examples
    --------
    >>> [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "example.org")]
    [True, True, True, False, False]
    """
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
