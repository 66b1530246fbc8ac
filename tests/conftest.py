"""Hypothesis profiles, chosen by the environment variable ``RAGGED_HYPOTHESIS_PROFILE``."""

import os

from hypothesis import HealthCheck, settings

# No deadline: the first call of an example pays for imports and caches, and machines differ.
settings.register_profile("fast", deadline=None, max_examples=25)
# The same examples in every run, so that a red build is red again on the next machine.
settings.register_profile("ci", deadline=None, max_examples=50, derandomize=True)
settings.register_profile(
    "soak",
    deadline=None,
    max_examples=5_000,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("RAGGED_HYPOTHESIS_PROFILE", "fast"))
