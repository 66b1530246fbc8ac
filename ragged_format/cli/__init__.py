"""The command ``ragged``: one module per command, and a registry for those of other packages.

:func:`main` is the script. A command of another package is an entry point of the group
``ragged_format.commands``; see :mod:`ragged_format.cli.plugins`.
"""

from ragged_format.cli.app import app, main
from ragged_format.cli.output import Json, Output

__all__ = ["Json", "Output", "app", "main"]
