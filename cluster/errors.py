"""Errors of a cluster as a whole."""

from __future__ import annotations


class ClusterFailed(Exception):
    """Raised if a cluster, or a command that needs one, cannot start or continue.

    The message is the cause. If a part of the cluster failed, the message also names that part
    and its log.
    """


class BatchFailed(Exception):
    """Raised if a batch cannot start or continue. The message is the cause."""


class VerificationFailed(Exception):
    """Raised if ``everlift verify`` cannot carry out its checks of an OpenAI endpoint.

    The message is the cause. An output that is lost or changed by a broken connection or a
    killed process is a result of the checks, and does not raise this error.
    """


class WorkloadFailed(Exception):
    """Raised if a workload (requests to send or simulate) cannot be generated or read.

    The message is the cause, with the position in the file if a file is wrong.
    """


class ForecastFailed(Exception):
    """Raised if a forecast (a simulation's result) cannot be computed from the given inputs.

    The message is the cause, with the position in the file if a file is wrong.
    """


class BenchFailed(Exception):
    """Raised if a benchmark cannot send its load, or if reports cannot be compared.

    The message is the cause.
    """
