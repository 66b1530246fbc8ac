"""One ragged format from the sampler to the loss.

Candidate-id sets, counts and top-K tables of language-model rollouts as Arrow lists: the same on
disk, over HTTP and in memory. Start with :func:`sample_schema`, :class:`Writer` and
:class:`Dataset`; the model is explained in ``docs/architecture.md`` and specified in ``spec/``.
"""

from ragged_format.canonical import canonical
from ragged_format.dataset import Dataset
from ragged_format.digest import digest, record_digests, schema_digest
from ragged_format.errors import (
    BrokenShardError,
    ChecksumError,
    ConversionError,
    CorruptError,
    DatasetExistsError,
    DatasetNotFoundError,
    HandOverError,
    InvariantError,
    JobError,
    LimitExceededError,
    ManifestError,
    MissingDependencyError,
    MissingEndOfStreamError,
    MissingShardError,
    NotRaggedError,
    OutOfRangeError,
    PackingError,
    RaggedError,
    RaggedWarning,
    SchemaMismatchError,
    StateMismatchError,
    StorageError,
    TruncatedError,
    UnknownColumnError,
    UnsupportedFeatureError,
    UnsupportedVersionError,
    Where,
    WorkerError,
)
from ragged_format.files import FileReader, FileWriter, read_file, write_file
from ragged_format.messages import decode_message, encode_message
from ragged_format.parse import parse_schema
from ragged_format.profiles import packed_schema, sample_schema, standard_column
from ragged_format.ragged import concat, cut, join, select, select_targets, slice_axis, take
from ragged_format.rules import TargetFlag
from ragged_format.schema import Axis, Column, LogProb, RaggedSchema
from ragged_format.sources import Source, open_source, register_scheme
from ragged_format.streams import StreamReader, StreamWriter, read_stream, write_stream
from ragged_format.validate import validate
from ragged_format.writer import Writer, sweep

__version__ = "0.1.0"

__all__ = [
    "Axis",
    "BrokenShardError",
    "ChecksumError",
    "Column",
    "ConversionError",
    "CorruptError",
    "Dataset",
    "DatasetExistsError",
    "DatasetNotFoundError",
    "FileReader",
    "FileWriter",
    "HandOverError",
    "InvariantError",
    "JobError",
    "LimitExceededError",
    "LogProb",
    "ManifestError",
    "MissingDependencyError",
    "MissingEndOfStreamError",
    "MissingShardError",
    "NotRaggedError",
    "OutOfRangeError",
    "PackingError",
    "RaggedError",
    "RaggedSchema",
    "RaggedWarning",
    "SchemaMismatchError",
    "Source",
    "StateMismatchError",
    "StorageError",
    "StreamReader",
    "StreamWriter",
    "TargetFlag",
    "TruncatedError",
    "UnknownColumnError",
    "UnsupportedFeatureError",
    "UnsupportedVersionError",
    "Where",
    "WorkerError",
    "Writer",
    "canonical",
    "concat",
    "cut",
    "decode_message",
    "digest",
    "encode_message",
    "join",
    "open_source",
    "packed_schema",
    "parse_schema",
    "read_file",
    "read_stream",
    "record_digests",
    "register_scheme",
    "sample_schema",
    "schema_digest",
    "select",
    "select_targets",
    "slice_axis",
    "standard_column",
    "sweep",
    "take",
    "validate",
    "write_file",
    "write_stream",
]
