"""Rank that samples, as a process: python -m tests.support.worker.sampled_rank TASK.

TASK is JSON: {"store", "rank", "size", "model"}. The rank prints JSON: the engine's tokens of each
of sampled_jobs(), the results of the rows of two hand-made steps, and tokens of an engine that
swaps.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from everlift.end_tokens import end_token_ids
from everlift.errors import InvalidRequest
from everlift.sampling import Grammar, GrammarKind, SamplingParams
from tests.support.worker.sampled_jobs import sampled_jobs
from tests.support.worker.sampling_support import FakeGrammar, FakeMatcher, admission
from tests.support.worker.torch_engine import Job, TorchEngine, greedy_jobs
from worker.config import Speculation, WorkerConfig
from worker.engine.plan import Admission, Plan, Row, RowResult, Rows
from worker.model.huggingface.families import read_spec
from worker.parallel.group import Group, init_group, join_store
from worker.runner.build import build_runner

#: Fewer blocks than the sequences of a batch grow into, but enough for each alone.
NUM_BLOCKS = 12
GUESSING = Speculation(num_draft_tokens=4, min_match=1)
PROMPT = tuple(range(20, 60))
GRAMMAR = Grammar(GrammarKind.REGEX, ("as the fake grammars say",))


class Refusing(FakeGrammar):
    """Grammar that cannot follow any sequence."""

    def matcher(self, stop_token_ids: frozenset[int], output: Sequence[int]) -> FakeMatcher:
        raise InvalidRequest("not of the grammar")


def main(task: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    store = join_store(task["store"])
    group = init_group(store, task["rank"], task["size"], torch.device("cpu"), "127.0.0.1")
    result = outputs(task["model"], group)
    group.barrier()
    group.close()
    return result


def outputs(model: str, group: Group) -> dict[str, Any]:
    spec = read_spec(model)
    engine = TorchEngine(Path(model), NUM_BLOCKS, group, speculation=GUESSING)
    return {
        "engine": engine.serve(sampled_jobs(spec.vocab_size, *end_token_ids(Path(model)))),
        "accepted drafts": engine.accepted_drafts,
        "by hand": steps_by_hand(model, group),
        **swapped(model, group),
    }


def swapped(model: str, group: Group) -> dict[str, Any]:
    """Return tokens of sequences that exceed the cache and are swapped to host memory and back."""
    engine = TorchEngine(Path(model), 8, group, preemption="swap", swap_mib=1)
    tokens = engine.serve(swapped_jobs())
    return {"swapped": tokens, "blocks swapped in": engine.counters.blocks_swapped_in}


def swapped_jobs() -> list[Job]:
    prompts = [[first + i % 39 for i in range(40)] for first in (20, 60, 100, 140)]
    return greedy_jobs(prompts, max_tokens=90)


def steps_by_hand(model: str, group: Group) -> list[list[int] | str]:
    """Return each row's tokens, or the class of its error.

    The rows have drafts, prompts to score, a grammar, and one that fails.
    """
    config = WorkerConfig(model, device="cpu", dtype="float32", num_threads=1, num_blocks=8)
    runner = build_runner(config, group)
    prefill = (
        _row(0, PROMPT),
        _row(1, PROMPT[:25], samples=False, scores_prompt=True),
        _row(2, PROMPT[:10]),
        _row(3, PROMPT[:5]),
    )
    first = runner.execute(Plan(1, Rows.of(prefill), tuple(_admissions(group.rank))))
    (drawn,), (even,) = first[0].tokens, first[2].tokens
    decode = (
        _row(0, (drawn, 33, 44), len(PROMPT), num_drafts=2),
        _row(1, PROMPT[25:], 25, scores_prompt=True),
        _row(2, (even, 22, 23, 24), 10, num_drafts=3),
    )
    second = runner.execute(Plan(2, Rows.of(decode)))
    return [_tokens_or_error(result) for result in (*first, *second)]


def _admissions(rank: int) -> Iterable[Admission]:
    """Yield the admissions of the rows; only rank 0 has grammars."""
    even = FakeGrammar(lambda output: range(0, 200, 2)) if rank == 0 else None
    refusing = Refusing(lambda output: ()) if rank == 0 else None
    yield admission(SamplingParams(seed=3, frequency_penalty=0.4, logprobs=1), PROMPT)
    yield admission(SamplingParams(seed=4, prompt_logprobs=2), PROMPT, slot=1)
    yield admission(SamplingParams(seed=5, grammar=GRAMMAR), PROMPT[:10], slot=2, grammar=even)
    yield admission(SamplingParams(grammar=GRAMMAR), PROMPT[:5], slot=3, grammar=refusing)


def _row(slot: int, tokens: Sequence[int], start: int = 0, **more: Any) -> Row:
    blocks = (2 * slot, 2 * slot + 1)
    return Row(slot, tuple(tokens), start, blocks, samples=more.pop("samples", True), **more)


def _tokens_or_error(result: RowResult) -> list[int] | str:
    return type(result.error).__name__ if result.error is not None else [*result.tokens]


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
