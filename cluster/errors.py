"""What can go wrong with a cluster as a whole."""

from __future__ import annotations


class ClusterFailed(Exception):
    """A part did not start, or has ended by itself. The message says which, why, and its log."""


class BatchFailed(Exception):
    """A batch cannot begin, or cannot go on. The message says why."""


class ForecastFailed(Exception):
    """A forecast cannot be made of what was given. The message says why, and of a file where."""
