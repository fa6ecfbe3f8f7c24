"""Greedy tokens of every family in an engine equal those of transformers.

The runs include chunks, prefix-cache hits and preemption.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
import torch

from everlift.end_tokens import end_token_ids
from tests.support.example_counts import one_in
from tests.support.worker.families import (
    CHECKPOINTS,
    VOCAB,
    Checkpoint,
    greedy,
    load_family,
    save_family,
)
from tests.support.worker.torch_engine import TorchEngine, greedy_jobs

#: KV blocks: enough for each sequence alone, too few for a batch.
TINY = 9

Record = Callable[[str, object], None]


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("checkpoint", one_in(3, CHECKPOINTS.values()), ids=CHECKPOINTS)
def test_family_greedy_tokens_match_transformers(
    checkpoint: Checkpoint, tmp_path: Path, record_testsuite_property: Record
) -> None:
    directory = save_family(tmp_path, checkpoint)
    stops = end_token_ids(directory)
    jobs = greedy_jobs(prompts(), max_tokens=24)
    engine = TorchEngine(directory, num_blocks=TINY)
    outputs = engine.serve(jobs)
    assert engine.preemptions > 0
    assert any(engine.first_position(job) > 0 for job in jobs)
    assert engine.mixed_steps > 0
    model = load_family(directory)
    near_ties = 0
    for job, output in zip(jobs, outputs, strict=True):
        near_ties += greedy(model, job.prompt, output).near_ties(output)
        assert len(output) == job.max_tokens or output[-1] in stops
    record_testsuite_property(f"near ties, {tmp_path.name}", near_ties)
    assert near_ties <= 1


def prompts() -> list[list[int]]:
    """Return prompts with lengths near the boundaries of blocks and chunks.

    The last two share a prefix with the longest.
    """
    rng = Random(4)
    lengths = (120, 1, 31, 33, 49, 64, 90)
    made = [[rng.randrange(6, VOCAB) for _ in range(length)] for length in lengths]
    return [*made, made[0][:70], made[0][:64] + made[2]]
