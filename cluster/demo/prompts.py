"""What the demo asks: tasks of mixed lengths, each with exactly one right answer."""

from __future__ import annotations

from random import Random

from cluster.demo import tasks
from cluster.demo.tasks import Example

#: The stream that the demo shows as it grows.
SHOWN = Example(
    "count", "count from 17 to 130:", "".join(f" {number}" for number in range(17, 131))
)
#: Kinds of the other requests, long and short answers in turn.
_KINDS = (
    "long_count",
    "json",
    "long_count",
    "alphabet",
    "long_count",
    "days",
    "count_by",
    "repeat",
)
_LINES_BEFORE = (0, 0, 2, 0, 5)


def mixed(count: int, seed: int) -> list[Example]:
    """``count`` tasks, SHOWN first. Some are asked after solved lines, so that prompts differ in
    length as well as answers."""
    rng = Random(seed)
    picked = [SHOWN]
    while len(picked) < count:
        kind = _KINDS[len(picked) % len(_KINDS)]
        example = next(tasks.stream(kind, rng, held_out=True))
        before = _LINES_BEFORE[len(picked) % len(_LINES_BEFORE)]
        lines = [next(tasks.stream("count", rng)) for _ in range(before)]
        picked.append(tasks.after_lines(lines, example))
    return picked
