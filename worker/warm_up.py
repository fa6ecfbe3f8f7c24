"""The steps that a GPU computes before anybody waits for one. Pure.

A kernel in Triton is compiled when it is launched for the first time in some form: seconds in which
all sequences would stand still, and after which a watchdog would give the worker up. These steps
launch all forms that attention has for rows of any number and length (attention/tiles.py), and all
else that a step launches.
"""

from __future__ import annotations

from collections.abc import Iterator

from everlift.sampling import SamplingParams
from worker.attention.tiles import FEW
from worker.plan import Admission, Plan, Row, Rows


def warm_up_plans(
    max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int
) -> Iterator[Plan]:
    """All write to block 0. The last one draws a token, in slot 0."""
    sizes = {1 << i for i in range(max_num_seqs.bit_length())}
    for size in sorted({*sizes, max_num_seqs}):
        # Decoding; short rows of one tile each; short rows of as many tiles as they can have.
        for count in (1, 2, FEW):
            if count <= max_model_len and size * count <= max_num_batched_tokens:
                yield _plan([_row(slot, count) for slot in range(size)])
    longer = _row(0, min(FEW + 1, max_model_len, max_num_batched_tokens), samples=True)
    yield _plan([longer], Admission(0, longer.tokens, 1, SamplingParams(), frozenset(), choice=0))


def _row(slot: int, count: int, samples: bool = False) -> Row:
    return Row(slot, (0,) * count, 0, (0,), samples)


def _plan(rows: list[Row], *admissions: Admission) -> Plan:
    return Plan(0, Rows.of(rows), admissions)
