"""How many sequences may run at once so that none gets its tokens too slowly. Pure.

A sequence gets a token a step (time per output token, TPOT), so that steps must not take longer
than one wants to wait for it. They do the longer the more rows they have: of those of late, each
row's mean share is known, prompts' chunks counted in, and a step of n rows is taken for n such
shares.
"""

from __future__ import annotations

from everlift.step_time import StepSize, StepTime


def batch_of(num_rows: int, row: StepSize) -> StepSize:
    """So many rows of which each has this share."""
    return StepSize(*(num_rows * share for share in row))


def largest_batch(step_time: StepTime, row: StepSize, tpot_s: float, at_most: int) -> int:
    """The most rows, of ``at_most``, whose step takes no longer than ``tpot_s``; one at the least.
    A step of more rows must not take less. O(log at_most)."""
    fits, too_many = 1, at_most + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if step_time.seconds(batch_of(middle, row)) <= tpot_s:
            fits = middle
        else:
            too_many = middle
    return fits
