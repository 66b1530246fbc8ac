"""Processes: one server, or one store with several processes that talk HTTP."""
