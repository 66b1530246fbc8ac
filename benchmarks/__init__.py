"""Timed comparisons with the peers, and the sizes, that the project promises; see the docs page.

``python -m benchmarks [NAME …]`` runs them; ``docs/benchmarks.md`` says how each figure is made.
"""
