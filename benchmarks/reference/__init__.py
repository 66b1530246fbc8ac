"""The reference trainer's data formats and packing steps, for a fair baseline.

Trie, layout and loss terms are those of the installed ``trl``; the steps that it does not have yet
(candidate sets and top-K tables) are made here from their published description, in the two forms
that were published: dense tables from Python lists and dicts ("before"), and flat ids with counts
plus arrays ("after").
"""
