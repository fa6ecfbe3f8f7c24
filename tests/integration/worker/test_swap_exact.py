"""KV blocks that are swapped to host memory and back, with drafts, keep transformers' tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
import torch

from tests.support.worker.llama_support import SIZES, generate, load_llama, save_llama
from tests.support.worker.torch_engine import TorchEngine, greedy_jobs
from worker.config import Speculation

#: KV blocks: enough for each sequence alone, too few for a batch.
TINY = 12


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def prompts() -> list[list[int]]:
    """Return prompts with repetitions, for drafts; the last two share a prefix with the first."""
    rng = Random(7)
    made = [[rng.randrange(6, SIZES["vocab_size"]) for _ in range(n)] for n in (40, 33, 47, 31, 20)]
    made = [prompt * 2 for prompt in made]
    return [*made, made[0][:64] + made[1], made[0][:70]]


def test_swap_and_drafts_keep_the_tokens_of_transformers(
    tmp_path: Path, record_testsuite_property: Callable[[str, object], None]
) -> None:
    directory = save_llama(tmp_path)
    jobs = greedy_jobs(prompts(), max_tokens=90)
    engine = TorchEngine(
        directory, TINY, preemption="swap", swap_mib=1, speculation=Speculation(num_draft_tokens=3)
    )
    outputs = engine.serve(jobs)
    counters = engine.counters
    assert counters.blocks_swapped_out > 2
    assert counters.blocks_swapped_in > 2
    assert counters.draft_tokens > 0
    model = load_llama(directory)
    references = [generate(model, job.prompt, job.max_tokens) for job in jobs]
    near_ties = sum(r.near_ties(out) for r, out in zip(references, outputs, strict=True))
    record_testsuite_property("near ties with swap", near_ties)
