"""Prompts of the demo's small model: tasks of mixed lengths, each with exactly one right answer."""

from __future__ import annotations

from random import Random

from cluster.demo import tasks
from cluster.demo.load import Task
from cluster.demo.tasks import Example
from everlift.v1 import inference_pb2 as pb

#: The stream that the demo shows as it grows.
SHOWN = Example(
    "count", "count from 17 to 200:", "".join(f" {number}" for number in range(17, 201))
)
#: Kinds of the other requests, long and short answers in turn, with the number of solved lines
#: that stand before the question.
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
    """Return ``count`` requests whose right answer is known."""
    return [
        Task(
            shown=example.prompt,
            request=pb.GenerateRequest(text=example.prompt, sampling=pb.Sampling(temperature=0.0)),
            expected=example.answer,
        )
        for example in mixed(count, seed)
    ]


def mixed(count: int, seed: int) -> list[Example]:
    """Return ``count`` tasks that the model was not trained on, SHOWN first."""
    rng = Random(seed)
    picked = [SHOWN]
    while len(picked) < count:
        kind, lines_before = _MIX[len(picked) % len(_MIX)]
        example = next(tasks.stream(kind, rng, held_out=True))
        lines = [next(tasks.stream("count", rng)) for _ in range(lines_before)]
        picked.append(tasks.after_lines(lines, example))
    return picked
