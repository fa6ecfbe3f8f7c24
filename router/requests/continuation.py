"""Effect of interruptions on the output of a request. Pure.

The results of a worker have the same bits in any batch if its ``arithmetic`` has a name. If all
attempts of a request had the same arithmetic, the output is that of an uninterrupted request.
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
    """Return the arithmetic of a request after another attempt begins.

    ``arithmetic`` is that of the earlier attempts. ``worker`` is that of the attempt's worker, None
    if unknown. ``has_output`` is whether earlier attempts generated tokens that are kept.
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
