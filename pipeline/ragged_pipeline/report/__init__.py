"""Reports: what is in a dataset, a file or a stream, as one page, as pictures and as numbers.

:func:`report` is the door. Figures are gathered by :mod:`~ragged_pipeline.report.statistics`, batch
by batch, in counters that merge; :mod:`~ragged_pipeline.report.collect` does so in parts, in
several processes. :mod:`~ragged_pipeline.report.sections` turns them into charts,
:mod:`~ragged_pipeline.report.page` into HTML. Needs nothing beyond the core; PNG files need
matplotlib.
"""

from ragged_pipeline.report.api import Report, report

__all__ = ["Report", "report"]
