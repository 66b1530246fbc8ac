"""The catalogue of stable codes: every rule of the format and every kind of error, once.

``spec/03-invariants.md`` and ``spec/schema/codes.json`` state the same catalogue; a test holds the
three equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["CODES", "Code"]

Level = Literal["structural", "full", "-"]


@dataclass(frozen=True, slots=True)
class Code:
    """One stable code.

    Attributes
    ----------
    code : str
        Identifier; never reused for another meaning.
    error : str
        Class in :mod:`ragged_format.errors` that carries it.
    rule : str
        The statement that holds for valid data, or the situation of the error.
    level : {"structural", "full", "-"}
        Validation level that checks it; ``"-"`` where no validation is involved.
    """

    code: str
    error: str
    rule: str
    level: Level = "-"


_ALL = (
    # Schema
    Code("RF-S001", "NotRaggedError", "Schema metadata has version, profile, vocab_size and root_axes, well formed."),
    Code("RF-S002", "NotRaggedError", "The profile is 'sample' or 'packed'."),
    Code("RF-S003", "SchemaMismatchError", "Every required or requested column is present, and no surplus one."),
    Code("RF-S004", "SchemaMismatchError", "Every column has the physical type of its declaration; lists are large_list; ids of a set or head are integers, its log-probs and weights floats."),
    Code("RF-S005", "SchemaMismatchError", "Nullability is as declared: only record columns and member items may be null."),
    Code("RF-S006", "SchemaMismatchError", "Every column lies on an axis that is a root axis or opened by exactly one counts column: standard columns and the parts of a set or head on theirs."),
    Code("RF-S007", "SchemaMismatchError", "A standard column has its standard fill."),
    Code("RF-S008", "SchemaMismatchError", "Column names are unique."),
    Code("RF-S009", "SchemaMismatchError", "Every metadata value is one that the metadata table allows."),
    Code("RF-S010", "SchemaMismatchError", "Data that is joined has one identity."),
    # Versions and features
    Code("RF-V001", "UnsupportedVersionError", "The major format version is one that the reader supports."),
    Code("RF-V002", "UnsupportedFeatureError", "Every required feature is one that the reader supports."),
    # Invariants of both profiles
    Code("RF-I001", "InvariantError", "Every Arrow array is valid: offsets do not decrease and stay inside their child, buffers are long enough, text is UTF-8.", "structural"),
    Code("RF-I002", "InvariantError", "There is no null outside nullable columns.", "structural"),
    Code("RF-I003", "InvariantError", "In each record, all columns of one root axis have the same length.", "structural"),
    Code("RF-I004", "InvariantError", "Counts are not negative, and those of one batch and axis sum to less than 2^62.", "structural"),
    Code("RF-I005", "InvariantError", "In each record, the counts that open an axis sum to the length of every column on it.", "structural"),
    Code("RF-I006", "InvariantError", "sample_id is not empty, and unique within a dataset.", "full"),
    Code("RF-I007", "InvariantError", "Token ids (input_ids, target_ids) are in [0, vocab_size).", "full"),
    Code("RF-I008", "InvariantError", "A mask is 0 or 1.", "structural"),
    Code("RF-I009", "InvariantError", "Element 0 of completion_mask is 0: nothing predicts the first token.", "full"),
    Code("RF-I010", "InvariantError", "target_flags has no bit set above bit 4.", "full"),
    Code("RF-I011", "InvariantError", "Ids of a candidate set are in [0, vocab_size).", "full"),
    Code("RF-I012", "InvariantError", "Ids of a candidate set are strictly ascending.", "full"),
    Code("RF-I013", "InvariantError", "A candidate set that is not empty contains the sampled token.", "full"),
    Code("RF-I014", "InvariantError", "Ids of a head are in [0, vocab_size).", "full"),
    Code("RF-I015", "InvariantError", "Ids of a head are unique (random draws excepted).", "full"),
    Code("RF-I016", "InvariantError", "The column <axis>_log_probs of a head does not increase (approximate columns and random draws excepted).", "full"),
    Code("RF-I017", "InvariantError", "Log-probs, logits, loss weights, advantages and weights of a set or head are finite.", "full"),
    Code("RF-I018", "InvariantError", "A log-prob is at most 0, within 1e-4 (approximate columns and logits excepted).", "full"),
    Code("RF-I019", "InvariantError", "The probabilities of a set or head sum to at most 1, within 1e-4 (float16: 5e-3; approximate columns, logits and random draws excepted).", "full"),
    Code("RF-I020", "InvariantError", "What target_flags calls missing is absent: count 0, or log-prob 0.0.", "full"),
    Code("RF-I021", "InvariantError", "metrics and provenance are null or a JSON object (RFC 8259: no NaN).", "full"),
    Code("RF-I022", "InvariantError", "temperature, reward and advantage are null or finite, and temperature is not negative.", "full"),
    Code("RF-I023", "InvariantError", "branch_index and token_offset are null or not negative.", "full"),
    Code("RF-I024", "InvariantError", "Weights of random draws are positive.", "full"),
    # Invariants of the packed profile
    Code("RF-I030", "InvariantError", "Every node has at least one token.", "full"),
    Code("RF-I031", "InvariantError", "In each record, node_lengths sum to the number of tokens.", "full"),
    Code("RF-I032", "InvariantError", "Nodes are in depth-first preorder: a parent is -1, the previous node or one of its ancestors.", "full"),
    Code("RF-I033", "InvariantError", "position_ids is the number of ancestors of each token.", "full"),
    Code("RF-I034", "InvariantError", "pred_index is in [0, number of tokens).", "full"),
    Code("RF-I035", "InvariantError", "member_index is in [0, number of members).", "full"),
    Code("RF-I036", "InvariantError", "Targets are ordered by (member, position), each position at most once per member.", "full"),
    Code("RF-I037", "InvariantError", "member_leaf is in [0, number of nodes).", "full"),
    Code("RF-I038", "InvariantError", "member_lengths is the number of tokens from the root to the end of the member's leaf.", "full"),
    Code("RF-I039", "InvariantError", "pred_index lies on the path of its member, before the member's last token.", "full"),
    Code("RF-I040", "InvariantError", "target_ids is the member's token that follows pred_index.", "full"),
    Code("RF-I041", "InvariantError", "A node without children is the leaf of a member.", "full"),
    # Containers
    Code("RF-C001", "CorruptError", "The bytes are a well-formed Arrow container."),
    Code("RF-C002", "TruncatedError", "The container is complete up to its trailer."),
    Code("RF-C003", "MissingEndOfStreamError", "A stream ends with Arrow's end-of-stream mark."),
    Code("RF-C004", "ChecksumError", "Content matches the digests stored with it."),
    Code("RF-C005", "BrokenShardError", "A shard is the one that the manifest lists."),
    Code("RF-C006", "MissingShardError", "Every listed shard exists."),
    Code("RF-C007", "ManifestError", "The manifest is well formed and matches its checksum."),
    Code("RF-C008", "DatasetNotFoundError", "There is data at the given place."),
    Code("RF-C009", "DatasetExistsError", "The target is free, or the mode allows to change it."),
    Code("RF-C010", "StorageError", "A place can be reached and allows the access; an object store keeps its promises."),
    # Limits
    Code("RF-L001", "LimitExceededError", "The input stays within configured and format limits."),
    Code("RF-L002", "LimitExceededError", "An index or slice bound lies inside its axis."),
    # States, conversion, packing, dependencies
    Code("RF-T001", "StateMismatchError", "A saved state belongs to this data, these options and this version."),
    Code("RF-T002", "HandOverError", "The source of a distributed hand-over has rows, and all processes speak one protocol."),
    Code("RF-A001", "ConversionError", "Foreign data can be converted without loss or contradiction."),
    Code("RF-A002", "ConversionError", "Foreign data has the shape that its engine documents."),
    Code("RF-A003", "ConversionError", "A response is a result, not the engine's error answer."),
    Code("RF-A004", "ConversionError", "A candidate set that was requested is there."),
    Code("RF-A005", "ConversionError", "Ids of foreign data agree with each other and with the vocabulary."),
    Code("RF-A006", "ConversionError", "Parts of a response have lengths and shapes that agree."),
    Code("RF-A007", "ConversionError", "Foreign log-probs are there, possible, and of the mode that the call names."),
    Code("RF-A008", "ConversionError", "An engine's event stream is complete."),
    Code("RF-A009", "ConversionError", "A response is of an endpoint that returns what is converted."),
    Code("RF-A010", "ConversionError", "A response and its prompt can be identified, once."),
    Code("RF-A011", "ConversionError", "Options and columns of a conversion fit each other and the engine."),
    Code("RF-P001", "PackingError", "Samples can be packed as asked."),
    Code("RF-J001", "JobError", "The options of a job fit each other and its input."),
    Code("RF-J002", "WorkerError", "The processes of a job live until their tasks are done."),
    Code("RF-D001", "MissingDependencyError", "The optional dependency is installed."),
)  # fmt: skip

CODES: dict[str, Code] = {entry.code: entry for entry in _ALL}
