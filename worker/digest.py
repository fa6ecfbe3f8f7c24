"""A plan in sixteen bytes, by which the ranks of a worker see that they do the same. Pure."""

from __future__ import annotations

import hashlib
from array import array

from worker.plan import Plan


def plan_digest(plan: Plan) -> bytes:
    """Equal for equal plans: over the step, and each row's slot, start, tokens and blocks."""
    digest = hashlib.blake2b(array("Q", (plan.step, len(plan.rows))).tobytes(), digest_size=16)
    for row in plan.rows:
        shape = (row.slot, row.start, row.samples, row.choice, row.seed_position)
        digest.update(array("Q", (*shape, len(row.tokens), len(row.block_table))).tobytes())
        digest.update(array("I", row.tokens).tobytes())
        digest.update(array("I", row.block_table).tobytes())
        digest.update(repr(row.sampling).encode())
    return digest.digest()
