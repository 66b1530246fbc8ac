"""Adapters between engines or trainers and the format, one module each."""
