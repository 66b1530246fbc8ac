"""Reports: what is in a dataset, a file or a stream, as one page, as pictures and as numbers.

:func:`report` is the door. :mod:`~ragged_pipeline.reports.statistics` gathers figures batch by
batch, in counters that merge; :mod:`~ragged_pipeline.reports.collect` does so in parts, in several
processes. :mod:`~ragged_pipeline.reports.sections` turns them into charts,
:mod:`~ragged_pipeline.reports.page` into HTML. Needs nothing beyond the core; PNG files need
matplotlib.
"""

from ragged_pipeline.reports.api import Report, report

__all__ = ["Report", "report"]
