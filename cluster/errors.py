"""Errors of a cluster as a whole."""

from __future__ import annotations


class ClusterFailed(Exception):
    """A part of the cluster did not start, or has ended by itself.

    The message names the part, the cause and the log of the part.
    """


class BatchFailed(Exception):
    """A batch cannot start or continue. The message is the cause."""


class WorkloadFailed(Exception):
    """A workload cannot be generated or read as requested.

    The message is the cause, with the position in the file if a file is wrong.
    """


class ForecastFailed(Exception):
    """A forecast cannot be computed from the given inputs.

    The message is the cause, with the position in the file if a file is wrong.
    """


class BenchFailed(Exception):
    """A load cannot be sent, or reports cannot be compared. The message is the cause."""
