"""Why every rule is there: the words of the code tables."""

from __future__ import annotations

FAMILIES: tuple[tuple[str, str, str], ...] = (
    ("RF-S", "Schema", "reader and writer, before any data"),
    ("RF-V", "Versions and features", "reader, before any data"),
    ("RF-I", "Invariants of data", ""),
    ("RF-C", "Containers", "reader; RF-C009: writer; RF-C010: either"),
    ("RF-L", "Limits", "reader; RF-L002: any call"),
    ("RF-T", "States", "loader of a state"),
    ("RF-A", "Conversion", "importer and exporter"),
    ("RF-P", "Packing", "packer"),
    ("RF-J", "Jobs", "runner of a job"),
    ("RF-D", "Dependencies", "library"),
)

# Of every code that data can break.
WHY: dict[str, str] = {
    "RF-S001": "data of other writers must be imported, not guessed at",
    "RF-S002": "the profile decides what columns mean",
    "RF-S003": "a reader can rely on the required columns",
    "RF-S004": "32-bit offsets overflow when data is joined; one type per column spares casts",
    "RF-S005": "a null in a list has no place in a tensor",
    "RF-S006": "every operation follows axes",
    "RF-S007": "padding must not depend on the producer",
    "RF-S008": "columns are found by name",
    "RF-S009": "a misread mode changes what a loss means",
    "RF-S010": "a mixture of vocabularies or modes trains on nonsense",
    "RF-V001": "an old reader must detect what it cannot read",
    "RF-V002": "a reader must not ignore what changes the meaning of data",
    "RF-I001": "Arrow's own readers accept offsets that crash others later",
    "RF-I002": "Arrow lets a null cover values, so that lengths and offsets disagree",
    "RF-I003": "columns of one axis are read side by side",
    "RF-I004": "sums of counts become offsets",
    "RF-I005": "one element too few shifts all that follow to other targets",
    "RF-I006": "the id tells a duplicate from a conflict",
    "RF-I007": "ids index embedding tables",
    "RF-I008": "the mask opens the target axis",
    "RF-I009": "no output predicts the first token",
    "RF-I010": "bits 5 to 7 are reserved",
    "RF-I011": "ids index logits",
    "RF-I012": "order makes sets comparable, searchable and small to encode",
    "RF-I013": "the sampled token was drawn from the set; its probability would be 0",
    "RF-I014": "ids index logits",
    "RF-I015": "a probability would count twice",
    "RF-I016": "readers cut heads to their first k entries",
    "RF-I017": "one NaN or infinity spoils the loss of a whole batch",
    "RF-I018": "a probability is at most 1",
    "RF-I019": "probabilities of different ids add up",
    "RF-I020": "a reader that ignores flags must find nothing rather than something wrong",
    "RF-I021": "readers parse it",
    "RF-I022": "it scales losses and logits",
    "RF-I023": "it numbers and counts",
    "RF-I024": "a draw of no weight is none",
    "RF-I030": "an empty node would make levels of the tree ambiguous",
    "RF-I031": "nodes lie end to end on the token axis",
    "RF-I032": "ancestry follows from order alone, and subtrees are ranges",
    "RF-I033": "positional encodings must be those of the unpacked sample",
    "RF-I034": "it indexes hidden states",
    "RF-I035": "it assigns loss terms",
    "RF-I036": "targets of one member are a range, in the order of the sample",
    "RF-I037": "the leaf gives the member's path",
    "RF-I038": "members can be unpacked without walking the tree",
    "RF-I039": "attention shows a token its ancestors only",
    "RF-I040": "labels must be those of the unpacked sample",
    "RF-I041": "tokens that no member has cost compute for nothing",
    "RF-C001": "damage must not look like data",
    "RF-C002": "plain Arrow takes a stream that was cut between messages for a whole one",
    "RF-C003": "without the mark nobody knows whether more was to come",
    "RF-C004": "a changed bit in a token id is still a token id",
    "RF-C005": "a shard that was rewritten in place is not the one that was committed",
    "RF-C006": "a dataset with a hole must not look like a smaller one",
    "RF-C007": "the manifest decides what counts",
    "RF-C008": "nothing there is not the same as no records",
    "RF-C009": "nothing is overwritten without being asked for",
    "RF-C010": "what is lost must be seen; a store that forgets a condition loses commits",
    "RF-L001": "sizes come from outside and are declared before data",
    "RF-L002": "a wrong index must not return other data",
}


def checked_by(code: str) -> str:
    """Return who checks a code."""
    if code == "RF-I001":
        return "writer, reader, validator: always"
    if code.startswith("RF-I"):
        return "validator; writer and reader on request"
    return next(who for prefix, _, who in FAMILIES if code.startswith(prefix))
