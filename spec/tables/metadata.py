"""Every metadata key of the format: the words of the metadata tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Place = Literal["schema", "field", "batch", "trailer", "commit"]


@dataclass(frozen=True)
class Key:
    """One key in the namespace ``ragged_format:``.

    `required` says when it must be there.
    """

    name: str
    place: Place
    type: str
    required: str
    meaning: str

    @property
    def identity(self) -> bool:
        """Whether data that is joined must agree in it."""
        return self.place in {"schema", "field"} and self.name != "version"


_FIELD = "if not the standard's"

KEYS: tuple[Key, ...] = (
    Key("version", "schema", "`MAJOR.MINOR`, decimal", "yes",
        "version of the format that the writer follows"),
    Key("profile", "schema", "`sample` or `packed`", "yes", "which columns and rules apply"),
    Key("vocab_size", "schema", "decimal, 1 to 2^31", "yes",
        "size of the model's vocabulary: every id is below it"),
    Key("root_axes", "schema", "JSON list of strings", "yes",
        "axes that each record opens itself; the profile's own ones first, in their order"),
    Key("required_features", "schema", "JSON list of strings, sorted", "no: `[]`",
        "features without which the data must not be read; version 0.1 defines none"),
    Key("axis", "field", "string", "unless the column is standard",
        "axis on which the column lies"),
    Key("fill", "field", "JSON number", "no: 0, of log-probs -30000.0",
        "value of the slots that padding adds, finite, of the column's type"),
    Key("shape", "field", "JSON list of integers >= 1", "no: the list's size",
        "shape of an element of a fixed-size list; the product is its size"),
    Key("opens", "field", "string", _FIELD, "axis that this counts column opens"),
    Key("mask", "field", "`true` or `false`", _FIELD,
        "the counts are 0 or 1, and the opened axis is a subset of this one"),
    Key("head_kind", "field", "`set`, `top_k`, `support` or `draws`", _FIELD,
        "what the opened axis holds"),
    Key("log_prob", "field", "JSON object", _FIELD, "that and how values are log-probs"),
    Key("approximate", "field", "`true` or `false`", "no: `false`",
        "from a lossy source: RF-I016, RF-I018 and RF-I019 do not apply"),
    Key("share_key", "field", "`true` or `false`", "no: `false`",
        "packing compares this column, besides token ids, before it shares a prefix"),
    Key("media", "field", "`true` or `false`", "no: `false`",
        "packing shares no prefix of records in which this is set, unless a share key exists"),
    Key("digest", "batch", "32 hexadecimal digits", "yes", "batch digest"),
    Key("trailer", "trailer", "canonical JSON object", "yes",
        "what the writer wrote, see schema/trailer.schema.json"),
    Key("trailer_checksum", "trailer", "32 hexadecimal digits", "yes",
        "xxh3-128 of the bytes of `trailer`"),
    Key("commit", "commit", "canonical JSON object", "yes", "what is committed, see §11.2"),
    Key("commit_checksum", "commit", "32 hexadecimal digits", "yes",
        "xxh3-128 of the bytes of `commit`"),
)  # fmt: skip

LOG_PROB: tuple[tuple[str, str, str, str], ...] = (
    ("mode", "`processed`, `raw`", "`processed`",
     "after or before the sampler's temperature and truncation"),
    ("normalizer", "`support`, `vocabulary`", "`support`",
     "set of ids over which probabilities sum to 1"),
    ("value", "`log_prob`, `logit`", "`log_prob`", "normalized log-probs in nats, or plain logits"),
    ("temperature", "number > 0", "absent", "sampling temperature, where one holds for all values"),
)  # fmt: skip
