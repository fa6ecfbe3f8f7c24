"""Effect of interruptions on the output of a request. Pure.

A worker names its numerical arithmetic (``WorkerInfo.arithmetic``). The name is empty if the bits
of its results depend on the batch. Otherwise, workers that name the same arithmetic and have the
same fingerprint (weights and settings of the model) compute the same bits in any batch.
Interruptions do not change the output of a request if all its attempts had the same arithmetic and
the name is not empty.
"""

from __future__ import annotations

from zlib import crc32

from everlift.v1 import inference_pb2 as pb
from router.ledger.entry import Tally

#: Arithmetic of a request before its first attempt.
_NONE = 0
#: Arithmetic of a request whose results depended on the batch, or were rounded in several ways.
_VARIES = 1


def arithmetic_with(arithmetic: int, worker: str | None, *, has_output: bool) -> int:
    """Return the number that identifies a request's arithmetic after another attempt begins.

    ``arithmetic`` is this number after the earlier attempts. ``worker`` is the name of the
    arithmetic of the new attempt's worker; None if unknown, which leaves the number unchanged.
    ``has_output`` states whether earlier attempts generated tokens that are kept. The result is
    _VARIES if there are such tokens and the arithmetic changes, or if the name is empty.
    """
    if worker is None:
        return arithmetic
    own = _identifier(worker)
    return own if not has_output or arithmetic == own else _VARIES


def continuation(tally: Tally) -> pb.Continuation.ValueType:
    """Return the effect of a request's migrations and preemptions on its output."""
    if not tally.migrations and not tally.preemptions:
        return pb.CONTINUATION_UNSPECIFIED
    if tally.arithmetic in (_NONE, _VARIES):
        return pb.CONTINUATION_SAME_DISTRIBUTION
    return pb.CONTINUATION_EXACT


def _identifier(name: str) -> int:
    """Return a stable number for a name, different from _NONE; _VARIES for an empty name."""
    return crc32(name.encode()) | 2 if name else _VARIES
