"""The commands ``ragged serve``, ``push`` and ``tail``."""
