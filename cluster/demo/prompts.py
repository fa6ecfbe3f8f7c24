"""Prompts for the demo's small model: tasks of mixed lengths with exactly one right answer."""

from __future__ import annotations

from random import Random

from cluster.demo import tasks
from cluster.demo.load import Task
from cluster.demo.tasks import Example
from everlift.v1 import inference_pb2 as pb

#: Task whose output the demo displays while it is generated.
SHOWN = Example(
    "count", "count from 17 to 200:", "".join(f" {number}" for number in range(17, 201))
)
#: Kinds of the other tasks, alternately with a long and a short answer. The number says how many
#: solved tasks precede the question in the prompt, one per line.
_MIX = (
    ("long_count", 0),
    ("json", 2),
    ("long_count", 0),
    ("alphabet", 5),
    ("long_count", 0),
    ("days", 1),
    ("long_count", 0),
    ("repeat", 4),
)


def counting_tasks(count: int, seed: int) -> list[Task]:
    """Return ``count`` requests for the small model, with their right answers as expected texts."""
    return [
        Task(
            shown=example.prompt,
            request=pb.GenerateRequest(text=example.prompt, sampling=pb.Sampling(temperature=0.0)),
            expected=example.answer,
        )
        for example in mixed(count, seed)
    ]


def mixed(count: int, seed: int) -> list[Example]:
    """Return ``count`` examples: the fixed example SHOWN, then random ones.

    The question of each random example is held out from training; the solved tasks that may precede
    the question are not. Equal arguments return equal lists.
    """
    rng = Random(seed)
    picked = [SHOWN]
    while len(picked) < count:
        kind, lines_before = _MIX[len(picked) % len(_MIX)]
        example = next(tasks.stream(kind, rng, held_out=True))
        lines = [next(tasks.stream("count", rng)) for _ in range(lines_before)]
        picked.append(tasks.after_lines(lines, example))
    return picked
