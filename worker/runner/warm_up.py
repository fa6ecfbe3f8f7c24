"""Steps that a GPU computes at start, to compile all kernels before the first request. Pure.

A Triton kernel is compiled at the first launch of each of its variants. This takes seconds: all
sequences would wait, and the watchdog would declare the worker stuck. The warm-up steps launch all
variants of the attention kernels that any number and length of rows can need (attention/tiles.py),
and all other kernels of a step.
"""

from __future__ import annotations

from collections.abc import Iterator

from everlift.sampling import SamplingParams
from worker.attention.tiles import FEW
from worker.engine.plan import Admission, Plan, Row, Rows


def warm_up_plans(
    max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int
) -> Iterator[Plan]:
    """Yield the plans of the warm-up steps.

    FEW is the most new tokens with which a row has narrow tiles (attention/tiles.py). Batches of 1,
    2, 4, ... rows up to the largest number are combined with 1, 2, 4, ... tokens per row up to FEW.
    The largest batch is combined with every number of tokens up to FEW. Some rows have fewer tokens
    if all together would exceed ``max_num_batched_tokens``; no row exceeds ``max_model_len``.

    The last plan is a chunk of more than FEW tokens, if the limits allow, and samples a token in
    slot 0. All rows write to block 0 only.
    """
    budget, longest = max_num_batched_tokens, min(FEW, max_model_len)
    most_rows = min(max_num_seqs, budget)
    batches = {(1,) * size for size in _doubled(most_rows)}
    if budget > 1:
        # Rows of two or more tokens: every power of two of rows with every power of two of tokens,
        # and the largest number of rows with every number of tokens.
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
    """Return the numbers of tokens of ``num_rows`` rows, at most ``budget`` in total.

    The greatest possible number of rows have ``count`` tokens each, one row has the remainder, and
    the others have one token. ``count`` must be at least 2, and ``budget`` at least ``num_rows``.
    """
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
