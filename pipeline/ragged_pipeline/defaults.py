"""Sizes that functions and commands have in common; here, so that commands import nothing else."""

__all__ = ["CONVERT_BYTES", "MEMORY", "TASK_BYTES"]

# Bytes of input, uncompressed, that one task reads; each task makes one shard.
TASK_BYTES = 256 << 20
# The same of JSON and of other files of other systems.
CONVERT_BYTES = 64 << 20
# Anonymous memory of all processes of a job together.
MEMORY = 2 << 30
