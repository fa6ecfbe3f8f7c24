"""Tokens of the engine equal those of transformers, for any batching, chunks and preemption."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from everlift.hashes import BLOCK_SIZE
from everlift.sampling import SamplingParams
from tests.support.example_counts import one_in
from tests.support.worker.llama_support import SIZES, generate, load_llama, redraw, save_llama
from tests.support.worker.torch_engine import Job, TorchEngine, greedy_jobs
from tests.support.worker.worker_support import POLICIES
from worker.config import Scheduling
from worker.engine.plan import Plan, RowResult

DEMO_MODEL = Path(__file__).parents[3] / "cluster" / "demo_model"
DEMO_PROMPTS = [
    *(f"count from {n} to {n + 24}:" for n in range(17, 900, 80)),
    "days from monday:",
    "alphabet from c to w:",
    "12 + 30 =",
    "7",
    "count from 1 to 9: 1 2 3 4 5 6 7 8 9\n" * 4 + "count from 21 to 44:",
]
PLENTY = 200
#: KV blocks: enough for each sequence alone, too few for a batch.
TINY = 18

CHECKPOINTS: dict[str, dict[str, Any]] = {
    "untied, grouped heads, several files": {"max_shard_size": "30KB"},
    "tied, ungrouped heads, biases, llama3 rope": {
        "tie_word_embeddings": True,
        "num_key_value_heads": 6,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
}

Record = Callable[[str, object], None]


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def random_prompts() -> list[list[int]]:
    """Return prompts with lengths near the boundaries of blocks and chunks.

    The last four share a prefix with the longest.
    """
    rng = Random(4)
    lengths = [150, 1, 2, 31, 32, 33, 47, 48, 49, 63, 64, 65, 96, 97]
    lengths += [rng.randrange(1, 120) for _ in range(6)]
    prompts = [[rng.randrange(6, SIZES["vocab_size"]) for _ in range(n)] for n in lengths]
    return [*prompts, *(prompts[0][:70] + prompts[i] for i in (1, 3, 6, 10))]


def near_ties_with_generate(
    directory: Path, jobs: Sequence[Job], outputs: Sequence[Sequence[int]]
) -> int:
    """Return the number of outputs that differ from transformers' at a near tie.

    They must not differ anywhere else.
    """
    model = load_llama(directory)
    references = (generate(model, job.prompt, job.max_tokens) for job in jobs)
    return sum(r.near_ties(output) for r, output in zip(references, outputs, strict=True))


@pytest.mark.parametrize("overrides", one_in(2, CHECKPOINTS.values()), ids=CHECKPOINTS)
def test_engine_greedy_tokens_match_generate(
    overrides: dict[str, Any], tmp_path: Path, record_testsuite_property: Record
) -> None:
    directory = save_llama(tmp_path, **overrides)
    jobs = greedy_jobs(random_prompts(), max_tokens=40)
    engine = TorchEngine(directory, num_blocks=TINY)
    outputs = engine.serve(jobs)
    assert engine.preemptions > 0
    assert any(engine.first_position(job) > 0 for job in jobs)
    assert engine.mixed_steps > 0
    assert engine.widest_step > 6
    near_ties = near_ties_with_generate(directory, jobs, outputs)
    record_testsuite_property(f"near ties, {tmp_path.name}", near_ties)
    assert near_ties <= 1


@pytest.mark.parametrize("scheduling", one_in(len(POLICIES), POLICIES.values()), ids=POLICIES)
def test_demo_model_greedy_tokens_match_generate(scheduling: Scheduling) -> None:
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in DEMO_PROMPTS]
    jobs = greedy_jobs(prompts, max_tokens=60)
    engine = TorchEngine(DEMO_MODEL, num_blocks=TINY, scheduling=scheduling)
    outputs = engine.serve(jobs)
    # Magnus sizes its batches by predicted memory, so it need not preempt.
    assert engine.preemptions > 0 or scheduling.policy == "magnus"
    assert near_ties_with_generate(DEMO_MODEL, jobs, outputs) == 0


def test_cached_prefix_is_not_recomputed(tmp_path: Path) -> None:
    directory = save_llama(tmp_path)
    prompt = random_prompts()[0]
    jobs = greedy_jobs([prompt, prompt[:100] + prompt[:9]], max_tokens=20)
    engine = TorchEngine(directory, num_blocks=PLENTY)
    outputs = [engine.serve([job])[0] for job in jobs]
    assert [engine.first_position(job) for job in jobs] == [0, 96]
    assert near_ties_with_generate(directory, jobs, outputs) == 0


def sampled_jobs() -> list[Job]:
    rng = Random(9)
    return [
        Job(
            prompt,
            max_tokens=40,
            sampling=SamplingParams(
                temperature=rng.choice([0.5, 1.0, 1.5]),
                top_p=rng.choice([1.0, 0.9]),
                top_k=rng.choice([0, 20]),
                min_p=rng.choice([0.0, 0.05]),
                seed=rng.getrandbits(64),
            ),
        )
        for prompt in random_prompts()
    ]


def test_seeded_tokens_do_not_depend_on_batch_or_preemption(
    tmp_path: Path, record_testsuite_property: Record
) -> None:
    directory = save_llama(tmp_path)
    jobs = sampled_jobs()
    alone = [TorchEngine(directory, PLENTY).serve([job])[0] for job in jobs]
    roomy, tight = TorchEngine(directory, PLENTY), TorchEngine(directory, TINY)
    in_a_batch, preempted = roomy.serve(jobs), tight.serve(jobs)
    assert roomy.preemptions == 0
    assert tight.preemptions > 0
    model = load_llama(directory)
    near_ties = 0
    for job, first, *others in zip(jobs, alone, in_a_batch, preempted, strict=True):
        drawn = redraw(model, job.prompt, first, job.sampling)
        near_ties += sum(drawn.near_ties(output) for output in (first, *others))
    record_testsuite_property(f"near ties, {tmp_path.name}", near_ties)
    assert near_ties <= 2


def poisoned(engine: TorchEngine) -> TorchEngine:
    """Fill all blocks with NaN, now and whenever a block gets a new owner."""
    runner = engine._runner._runner
    cache, execute = runner._cache.tensor, runner.execute
    cache.fill_(torch.nan)

    def execute_on_what_others_left(plan: Plan) -> list[RowResult]:
        for row in plan.rows:
            positions = range(row.start, row.start + len(row.tokens))
            begun = [row.block_table[at // BLOCK_SIZE] for at in positions if at % BLOCK_SIZE == 0]
            cache[begun] = torch.nan
        return execute(plan)

    runner.execute = execute_on_what_others_left  # type: ignore[method-assign]
    return engine


@pytest.mark.parametrize("num_blocks", [PLENTY, TINY])
def test_freed_block_contents_do_not_leak_between_sequences(
    tmp_path: Path, num_blocks: int
) -> None:
    directory = save_llama(tmp_path)
    jobs = greedy_jobs(random_prompts(), max_tokens=40)
    clean = TorchEngine(directory, num_blocks).serve(jobs)
    engine = poisoned(TorchEngine(directory, num_blocks))
    # The second run uses blocks that the first has freed.
    assert [engine.serve(jobs) for _ in range(2)] == [clean, clean]
    assert (engine.preemptions > 0) == (num_blocks == TINY)
