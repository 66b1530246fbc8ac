"""Adapters between engines or trainers and the format, one module each.

An engine's module has a function ``to_samples(records, *, vocab_size, report, …)`` that returns a
record batch; ``ragged convert --from NAME`` finds it by the module's name. What adapters share lies
in the private modules: readers of JSON text (``_json``), values as arrays (``_values``), and the
way from parsed choices to a batch with its policies and counts (``_assemble``). A new engine needs
a reader of its responses that returns :class:`~ragged_format.adapters._choice.Choice` objects.
"""

from ragged_format.adapters._json import read_json as read_record

__all__ = ["read_record"]
