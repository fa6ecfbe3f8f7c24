"""Errors of a cluster as a whole."""

from __future__ import annotations


class ClusterFailed(Exception):
    """A part did not start, or has ended by itself. The message says which, why, and its log."""


class BatchFailed(Exception):
    """A batch cannot begin, or cannot go on. The message says why."""


class WorkloadFailed(Exception):
    """Workload that cannot be generated or read as requested.

    The message says why, and of a file where.
    """


class ForecastFailed(Exception):
    """A forecast cannot be made of what was given. The message says why, and of a file where."""


class BenchFailed(Exception):
    """A load cannot be sent, or reports cannot be compared. The message says why."""
