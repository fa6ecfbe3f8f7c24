"""Tokens sampled by the whole engine equal those of transformers.

The runs include batches, chunks, preemption, drafts and several ranks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from everlift.sampling import TokenLogprobs
from tests.support.worker.llama_support import SIZES, Reference, load_llama, save_llama, warped
from tests.support.worker.sampled_jobs import sampled_jobs
from tests.support.worker.sampled_rank import GUESSING, NUM_BLOCKS, outputs, swapped_jobs
from tests.support.worker.sampling_oracle import is_close, own_logprobs, shaped
from tests.support.worker.sampling_support import admission
from tests.support.worker.torch_engine import Job, TorchEngine
from worker.engine.outcome import SequenceKey
from worker.parallel.group import Group, create_store
from worker.runner.uniform import uniform

ROOT = Path(__file__).parents[3]
PLENTY = 300
EOS = SIZES["eos_token_id"]
#: Time limit of two ranks in seconds, including the start of Python.
TIMEOUT_S = 120

Record = Callable[[str, object], None]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(directory: Path) -> LlamaForCausalLM:
    return load_llama(directory)


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@torch.inference_mode()
def raw_logits(model: LlamaForCausalLM, job: Job, output: Sequence[int]) -> Tensor:
    """Return the logits of prompt and output, [tokens, vocab]."""
    logits: Tensor = model(torch.tensor([[*job.prompt, *output]])).logits[0]
    return logits


def redrawn(model: LlamaForCausalLM, job: Job, output: Sequence[int]) -> Reference:
    """Return the token that transformers would sample after each prefix of ``output``."""
    logits = raw_logits(model, job, output)[len(job.prompt) - 1 :]
    draws = [draw_again(logits[i], job, output[:i]) for i in range(len(output))]
    return Reference([token for token, _ in draws], [margin for _, margin in draws])


def draw_again(logits: Tensor, job: Job, output: Sequence[int]) -> tuple[int, float]:
    """Return the token that is sampled, and its margin.

    The margin of a greedy token is the gap to the second-best score. Otherwise it is the distance
    of the uniform random number to the nearest boundary between tokens.
    """
    sampling = job.sampling
    scores = shaped(logits, admission(sampling, job.prompt, output, stops=[EOS]))
    if sampling.temperature == 0:
        best, second = scores.topk(2).values.tolist()
        return int(scores.argmax()), best - second
    edges = warped(scores[None], sampling)[0].double().softmax(-1).cumsum(-1)
    key = np.array([[sampling.seed], [0], [len(output)]], np.uint64)
    number = torch.from_numpy(uniform(*key))[0]
    return int(torch.searchsorted(edges, number, right=True)), float((edges - number).abs().min())


def near_ties(model: LlamaForCausalLM, jobs: Sequence[Job], *runs: Sequence[Sequence[int]]) -> int:
    """Return the number of outputs that differ from the first run's at a near tie.

    They must not differ anywhere else. The first run's outputs are compared with transformers'.
    """
    found = 0
    for job, first, *others in zip(jobs, *runs, strict=True):
        reference = redrawn(model, job, first)
        found += sum(reference.near_ties(output) for output in (first, *others))
    return found


def test_sampled_tokens_are_independent_of_the_schedule(
    directory: Path, model: LlamaForCausalLM, record_testsuite_property: Record
) -> None:
    jobs = sampled_jobs(SIZES["vocab_size"], EOS)
    alone = [TorchEngine(directory, PLENTY).serve([job])[0] for job in jobs]
    roomy, tight = TorchEngine(directory, PLENTY), TorchEngine(directory, NUM_BLOCKS)
    drafting = TorchEngine(directory, NUM_BLOCKS, speculation=GUESSING)
    runs = [engine.serve(jobs) for engine in (roomy, tight, drafting)]
    assert roomy.preemptions == 0
    assert tight.preemptions > 0
    assert drafting.accepted_drafts > 0
    found = near_ties(model, jobs, alone, *runs)
    record_testsuite_property("near ties, sampling", found)
    assert found <= 1
    assert any(output[-1] == EOS for output in alone)


def test_logprobs_equal_transformers_in_every_schedule(
    directory: Path, model: LlamaForCausalLM
) -> None:
    jobs = sampled_jobs(SIZES["vocab_size"], EOS)
    engine = TorchEngine(directory, NUM_BLOCKS, speculation=GUESSING)
    collected = engine.collect(jobs)
    assert engine.preemptions > 0
    for key, job in zip((SequenceKey(epoch, 0) for epoch in count(1)), jobs, strict=False):
        logits = raw_logits(model, job, collected.tokens[key])
        prompt, output = expected_logprobs(job, logits, collected.tokens[key])
        assert is_close(collected.prompt_logprobs.get(key, []), prompt)
        assert is_close(collected.logprobs.get(key, []), output)


def expected_logprobs(
    job: Job, logits: Tensor, output: Sequence[int]
) -> tuple[list[TokenLogprobs], list[TokenLogprobs]]:
    """Return the log probabilities of prompt and output, where requested."""
    tokens, cut = [*job.prompt, *output], len(job.prompt)
    ask = job.sampling.prompt_logprobs, job.sampling.logprobs
    prompt = range(1, cut) if ask[0] is not None else range(0)
    answer = range(cut, len(tokens)) if ask[1] is not None else range(0)
    return (
        [own_logprobs(logits[i - 1], tokens[i], ask[0] or 0) for i in prompt],
        [own_logprobs(logits[i - 1], tokens[i], ask[1] or 0) for i in answer],
    )


# ranks


@pytest.mark.long
def test_ranks_sample_the_tokens_of_one_rank(
    directory: Path, model: LlamaForCausalLM, record_testsuite_property: Record
) -> None:
    first, second = run_two_ranks(directory)
    alone = outputs(str(directory), Group.single())
    assert first["engine"] == second["engine"]
    assert first["accepted drafts"] > 0
    assert first["blocks swapped in"] == second["blocks swapped in"] > 0
    assert first["swapped"] == second["swapped"]
    assert first["by hand"] == alone["by hand"]
    # Only rank 0 knows the cause of a grammar's failure.
    causes = {"InvalidRequest": "EngineFailed"}
    assert second["by hand"] == [causes.get(str(row), row) for row in first["by hand"]]
    assert first["by hand"].count("InvalidRequest") == 1
    jobs = sampled_jobs(SIZES["vocab_size"], EOS)
    found = near_ties(model, jobs, alone["engine"], first["engine"])
    found += near_ties(model, swapped_jobs(), alone["swapped"], first["swapped"])
    record_testsuite_property("near ties, sampling on two ranks", found)
    assert found <= 1


def run_two_ranks(directory: Path) -> list[dict[str, Any]]:
    """Run two ranks as processes; return their results."""
    _store, address = create_store()
    with ExitStack() as running:
        tasks = [
            {"store": address, "rank": rank, "size": 2, "model": str(directory)}
            for rank in range(2)
        ]
        processes = [running.enter_context(rank_process(json.dumps(task))) for task in tasks]
        results = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes)
    return [json.loads(each) for each in results]


@contextmanager
def rank_process(task: str) -> Iterator[subprocess.Popen[str]]:
    """Run the process of a rank, and kill it on exit if it still runs."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.worker.sampled_rank", task],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'proto'}:{ROOT}", "OMP_WAIT_POLICY": "PASSIVE"},
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()
