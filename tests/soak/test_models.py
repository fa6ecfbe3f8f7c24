"""Random checkpoints in engines with random limits, until the soak's duration has passed.

Logits and tokens are compared with those of transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from random import Random
from shutil import rmtree

import pytest
import torch
from transformers import PreTrainedModel

from tests.soak.duration import rounds
from tests.support.worker.decoder_steps import Step, SteppedDecoder
from tests.support.worker.families import (
    CHECKPOINTS,
    MAX_POSITION,
    VOCAB,
    Checkpoint,
    all_logits,
    greedy,
    load_family,
    save_family,
)
from tests.support.worker.torch_engine import TorchEngine, greedy_jobs
from worker.config import Speculation

pytestmark = [pytest.mark.soak, pytest.mark.timeout(0)]
#: Approximate limit of the hidden size: in wider models with these random weights, rounding errors
#: reach 1e-4.
WIDEST = 96
#: Rounding decides near ties of logits; more than one per this many sequences would be an error.
SEQUENCES_PER_NEAR_TIE = 50

Record = Callable[[str, object], None]


def random_checkpoint(rng: Random) -> Checkpoint:
    """Return a family's checkpoint with random depth and widths."""
    base = CHECKPOINTS[rng.choice([*CHECKPOINTS])]
    kv_heads = rng.randint(1, 3)
    sizes = dict(base.sizes)
    if "layer_types" not in sizes and base.model_type != "gemma3":
        sizes["num_hidden_layers"] = rng.randint(1, 5)
    sizes["intermediate_size"] = rng.randint(20, 120)
    sizes["vocab_size"] = VOCAB + rng.randint(0, 60)
    if sizes.get("sliding_window"):
        sizes["sliding_window"] = rng.randint(2, 90)
    heads = kv_heads * rng.randint(1, 3)
    # In some configurations the head size is the hidden size divided by the number of heads.
    if base.model_type in ("phi3", "olmoe"):
        sizes["hidden_size"] = heads * base.head_dim
    else:
        sizes["hidden_size"] = heads * rng.randint(2, max(2, WIDEST // heads))
    return replace(base, heads=heads, kv_heads=kv_heads, sizes=sizes)


def random_prompts(rng: Random) -> list[list[int]]:
    """Return random prompts, some with common prefixes, and one that repeats itself."""
    made = [[rng.randrange(6, VOCAB) for _ in range(rng.randint(1, 90))] for _ in range(8)]
    alike = [rng.choice(made)[:64] + rng.choice(made)[:40] for _ in range(4)]
    return [*made, *alike, rng.choice(made)[:30] * 3]


def random_steps(rng: Random, lengths: list[int]) -> list[Step]:
    """Return steps that compute all tokens of all sequences, in chunks of random sizes."""
    left = dict(enumerate(lengths))
    steps: list[Step] = []
    while left:
        step = []
        for which in rng.sample([*left], rng.randint(1, len(left))):
            count = min(left[which], rng.choice([1, 1, 7, 33, 100]))
            step.append((which, count))
            left[which] -= count
            if not left[which]:
                del left[which]
        steps.append(step)
    return steps


def test_random_models_match_transformers_in_random_engines(
    tmp_path: Path, record_testsuite_property: Record
) -> None:
    torch.set_num_threads(1)
    models = sequences = near_ties = 0
    for number in rounds():
        rng = Random(number)
        directory = save_family(tmp_path / str(number), random_checkpoint(rng))
        reference = load_family(directory)
        prompts = random_prompts(rng)
        check_logits(rng, directory, prompts, reference)
        jobs = greedy_jobs(prompts, max_tokens=rng.randint(8, 60))
        for job, output in zip(jobs, random_engine(rng, directory).serve(jobs), strict=True):
            near_ties += greedy(reference, job.prompt, output).near_ties(output)
        sequences += len(jobs)
        models += 1
        rmtree(directory)
    for name in ("models", "sequences", "near_ties"):
        record_testsuite_property(name, locals()[name])
    print(f"\n{models} models, {sequences} sequences, {near_ties} near ties")
    assert near_ties <= 1 + sequences // SEQUENCES_PER_NEAR_TIE


def check_logits(
    rng: Random, directory: Path, prompts: list[list[int]], reference: PreTrainedModel
) -> None:
    """Check that the logits differ from those of transformers by at most 3e-4 or rounding errors.

    The tolerance is 3e-4, or three times the error of transformers itself against double precision
    if that is larger. That error is the largest of all prompts: with unstable models, rounding may
    affect a position much in one implementation and little in the other.
    """
    steps = random_steps(rng, [len(prompt) for prompt in prompts])
    logits = SteppedDecoder(directory, MAX_POSITION).logits(prompts, steps)
    assert logits is not None
    exact_model = deepcopy(reference).double()
    wanted = [all_logits(reference, prompt) for prompt in prompts]
    exact = [all_logits(exact_model, prompt) for prompt in prompts]
    rounding = max(float((a - b).abs().max()) for a, b in zip(wanted, exact, strict=True))
    bound = max(3e-4, 3 * rounding)
    for ours, theirs in zip(logits, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=bound, rtol=0)


def random_engine(rng: Random, directory: Path) -> TorchEngine:
    return TorchEngine(
        directory,
        num_blocks=rng.choice([9, 12, 20, 100]),
        preemption=rng.choice(["recompute", "swap"]),
        swap_mib=1,
        speculation=Speculation(num_draft_tokens=rng.choice([0, 0, 1, 4])),
    )
