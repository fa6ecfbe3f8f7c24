"""Differences of plans that a digest detects."""

from __future__ import annotations

from dataclasses import replace

import pytest

from everlift.sampling import SamplingParams
from worker.engine.plan import Admission, BlockCopy, Plan, Row, Rows, plan_digest

DECODE = Row(slot=0, tokens=(7,), start=70, block_table=(4, 5, 6), samples=True)
ADMITTED = Row(slot=1, tokens=(8, 9), start=64, block_table=(4, 5, 9), samples=True)
ADMISSION = Admission(1, (*range(64), 8, 9), 66, SamplingParams(), frozenset(), 0)
PLAN = Plan(3, Rows.of([DECODE, ADMITTED]), (ADMISSION,), (BlockCopy(1, 0),), (BlockCopy(9, 2),))


def test_plan_digest_is_equal_for_equal_plans() -> None:
    assert plan_digest(PLAN) == plan_digest(
        replace(PLAN, rows=Rows.of([replace(DECODE), ADMITTED]))
    )


@pytest.mark.parametrize(
    "other",
    [
        replace(PLAN, step=4),
        replace(PLAN, rows=Rows.of([DECODE])),
        replace(PLAN, rows=Rows.of([ADMITTED, DECODE])),
        replace(PLAN, saves=(BlockCopy(1, 1),)),
        replace(PLAN, saves=(), loads=(*PLAN.saves, *PLAN.loads)),
        replace(PLAN, loads=(BlockCopy(8, 2),)),
    ],
)
def test_plan_digest_differs_for_different_plans(other: Plan) -> None:
    assert plan_digest(other) != plan_digest(PLAN)


@pytest.mark.parametrize(
    "other",
    [
        replace(DECODE, slot=2),
        replace(DECODE, start=71),
        replace(DECODE, tokens=(6,)),
        replace(DECODE, tokens=(7, 7)),
        replace(DECODE, tokens=(7, 7), num_drafts=1),
        replace(DECODE, samples=False),
        replace(DECODE, scores_prompt=True),
        replace(DECODE, block_table=(4, 5, 7)),
    ],
)
def test_plan_digest_differs_for_different_rows(other: Row) -> None:
    assert plan_digest(replace(PLAN, rows=Rows.of([other, ADMITTED]))) != plan_digest(PLAN)


def test_plan_digest_includes_prefix_blocks_once() -> None:
    elsewhere = replace(PLAN, rows=Rows.of([DECODE, replace(ADMITTED, block_table=(4, 3, 9))]))
    assert plan_digest(elsewhere) != plan_digest(PLAN)
    later = replace(PLAN, rows=Rows.of([replace(DECODE, block_table=(4, 3, 6)), ADMITTED]))
    assert plan_digest(later) == plan_digest(PLAN), "different in the step that took block 3"
