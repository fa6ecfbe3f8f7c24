"""Sequences that together use every feature of a sampler."""

from __future__ import annotations

from itertools import pairwise
from random import Random

from everlift.sampling import SamplingParams
from tests.support.worker.torch_engine import Job


def sampled_jobs(vocab: int, eos: int) -> list[Job]:
    """Return jobs with different random sampling parameters and, for TorchEngine, seeds."""
    return [_job(Random(i), vocab, eos) for i in range(20)]


def _job(rng: Random, vocab: int, eos: int) -> Job:
    prompt = [rng.randrange(6, vocab) for _ in range(rng.choice([1, 7, 31, 32, 33, 50, 97]))]
    return Job(prompt, 30 - rng.randrange(7), _sampling(rng, vocab, eos))


def _sampling(rng: Random, vocab: int, eos: int) -> SamplingParams:
    ids = rng.sample(range(vocab), rng.choice([0, 0, 1, 30]))
    # Few tokens, so that the banned pairs of them would often occur.
    few = tuple(rng.sample(range(vocab), 6))
    return SamplingParams(
        temperature=rng.choice([0.0, 0.5, 1.0, 1.5]),
        top_p=rng.choice([1.0, 0.9]),
        top_k=rng.choice([0, 20]),
        min_p=rng.choice([0.0, 0.05]),
        seed=rng.getrandbits(64),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3, 0.8]),
        presence_penalty=rng.choice([0.0, 0.0, 0.6, -0.4]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.3, -0.3]),
        # A bias on ``eos`` may end the sequence early, which min_tokens then prevents.
        logit_bias=tuple(sorted((i, rng.uniform(-3, 3)) for i in {*ids, eos})),
        min_tokens=rng.choice([0, 0, 10, 30]),
        logprobs=rng.choice([None, 0, 3]),
        prompt_logprobs=rng.choice([None, None, 2]),
        allowed_token_ids=rng.choice([(), (), few]),
        banned_sequences=tuple(pairwise(few)),
    )
