"""A plan in sixteen bytes, by which the ranks of a worker see that they do the same. Pure."""

from __future__ import annotations

import hashlib
from array import array

from everlift.blockhash import BLOCK_SIZE
from worker.plan import Plan


def plan_digest(plan: Plan) -> bytes:
    """Equal for equal plans: over the step, its copies, and each row's slot, start, tokens and
    blocks. What is admitted comes from the log that all ranks read.

    Of the blocks, those that lie wholly before the row count where it is admitted: later they are
    as an earlier digest had them, and there may be thousands.
    """
    counts = (plan.step, len(plan.rows), len(plan.saves), len(plan.loads))
    digest = hashlib.blake2b(array("Q", counts).tobytes(), digest_size=16)
    for copy in (*plan.saves, *plan.loads):
        digest.update(array("Q", copy).tobytes())
    admitted = {admission.slot for admission in plan.admissions}
    for row in plan.rows:
        known_blocks = 0 if row.slot in admitted else row.start // BLOCK_SIZE
        shape = (row.slot, row.start, row.samples, row.num_drafts, row.scores_prompt)
        digest.update(array("Q", (*shape, len(row.tokens), len(row.block_table))).tobytes())
        digest.update(array("I", row.tokens).tobytes())
        digest.update(array("I", row.block_table[known_blocks:]).tobytes())
    return digest.digest()
