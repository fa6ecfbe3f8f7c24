"""All fuzzing targets, and their shares of the cases of a campaign."""

from __future__ import annotations

from math import ceil
from random import Random

from tests.fuzz import chat, native, uploads, web
from tests.fuzz.mutation import case
from tests.fuzz.target import Target

TARGETS: tuple[Target, ...] = (
    *native.TARGETS,
    *web.TARGETS,
    *uploads.TARGETS,
    *chat.TARGETS,
)


def by_name(name: str) -> Target:
    return next(target for target in TARGETS if target.name == name)


def shares(num_cases: int) -> dict[str, int]:
    """Return the number of cases by target; the sum is at least ``num_cases``."""
    whole = sum(target.weight for target in TARGETS)
    return {target.name: ceil(num_cases * target.weight / whole) for target in TARGETS}


def numbered(target: Target, seed: int, number: int) -> bytes:
    """Return a case, which depends only on its target, seed and number."""
    return case(Random(f"{seed}/{target.name}/{number}"), target.seeds, target.reshape)
