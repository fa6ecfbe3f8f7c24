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
from worker.engine.plan import Admission, Plan, Row, Rows


def warm_up_plans(
    max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int
) -> Iterator[Plan]:
    """Yield the plans, which write to block 0; the last one draws a token in slot 0."""
    budget, longest = max_num_batched_tokens, min(FEW, max_model_len)
    most_rows = min(max_num_seqs, budget)
    batches = {(1,) * size for size in _doubled(most_rows)}
    if budget > 1:
        # Of two tokens at the least, in one tile each or in more and more of them.
        most_rows = min(most_rows, budget - 1)
        batches.update(
            _batch(size, count, budget)
            for size in _doubled(most_rows)
            for count in _doubled(longest)
            if count > 1
        )
        batches.update(_batch(most_rows, count, budget) for count in range(2, longest + 1))
    for counts in sorted(batches):
        yield _plan([_row(slot, count) for slot, count in enumerate(counts)])
    longer = _row(0, min(FEW + 1, max_model_len, max_num_batched_tokens), samples=True)
    yield _plan([longer], Admission(0, longer.tokens, 1, SamplingParams(), frozenset(), choice=0))


def _doubled(most: int) -> list[int]:
    return sorted({*(1 << i for i in range(most.bit_length())), most})


def _batch(num_rows: int, count: int, budget: int) -> tuple[int, ...]:
    """Return as many rows of ``count`` tokens (at least 2) as fit, a rest, and single tokens."""
    spare = budget - num_rows
    num_long = min(num_rows, spare // (count - 1))
    others = [1] * (num_rows - num_long)
    if others:
        others[0] += spare - num_long * (count - 1)
    return (count,) * num_long + tuple(others)


def _row(slot: int, count: int, samples: bool = False) -> Row:
    return Row(slot, (0,) * count, 0, (0,), samples)


def _plan(rows: list[Row], *admissions: Admission) -> Plan:
    return Plan(0, Rows.of(rows), admissions)
