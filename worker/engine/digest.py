"""A plan in sixteen bytes, by which the ranks of a worker see that they do the same. Pure."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from itertools import chain

from everlift.blockhash import BLOCK_SIZE
from worker.engine.plan import Plan, RowResult


def plan_digest(plan: Plan, landed: Iterable[RowResult] = ()) -> bytes:
    """Equal for equal plans: over the step, its copies, and each row's slot, start, tokens and
    blocks; and for equal tokens of ``landed``. What is admitted comes from the log that all ranks
    read.

    Of the blocks, those that lie wholly before the row count where it is admitted: later they are
    as an earlier digest had them, and there may be thousands.
    """
    rows = plan.rows
    counts = (plan.step, len(rows), len(plan.saves), len(plan.loads))
    digest = hashlib.blake2b(array("Q", counts).tobytes(), digest_size=16)
    for copy in (*plan.saves, *plan.loads):
        digest.update(array("Q", copy).tobytes())
    columns = (rows.slots, rows.starts, rows.counts, rows.num_drafts, rows.tokens)
    for column in (*columns, rows.samples, rows.scores_prompt, rows.blocks):
        digest.update(column.tobytes())
    admitted = {admission.slot for admission in plan.admissions}
    for slot, start in zip(rows.slots.tolist(), rows.starts.tolist(), strict=True):
        if slot in admitted:
            digest.update(rows.tables[slot, : start // BLOCK_SIZE].tobytes())
    digest.update(array("q", chain.from_iterable(each.tokens for each in landed)).tobytes())
    return digest.digest()
