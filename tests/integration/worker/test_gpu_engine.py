"""The engine's GPU features on a CPU keep the tokens.

These are steps that are launched ahead, kernels in Triton's interpreter, and replayed decoding.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import torch
from tokenizers import Tokenizer

from tests.support.worker.llama_support import SIZES, save_llama
from tests.support.worker.sampled_jobs import sampled_jobs
from tests.support.worker.torch_engine import TorchEngine, greedy_jobs
from worker.attention.gpu import GpuAttention
from worker.model.decoder import Decoder
from worker.model.kernel_pointwise import KernelPointwise
from worker.runner.decode_graphs import DecodeGraphs
from worker.runner.sample_by_kernel import sample_by_kernel

DEMO_MODEL = Path(__file__).parents[3] / "cluster" / "demo_model"
PLENTY, TINY = 200, 18


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("num_blocks", [PLENTY, TINY])
def test_launch_ahead_keeps_greedy_tokens(num_blocks: int) -> None:
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    texts = [f"count from {n} to {n + 24}:" for n in range(17, 900, 80)]
    jobs = greedy_jobs([tokenizer.encode(text).ids for text in texts], max_tokens=60)
    expected = TorchEngine(DEMO_MODEL, num_blocks).serve(jobs)
    ahead = TorchEngine(DEMO_MODEL, num_blocks, ahead=True)
    assert ahead.serve(jobs) == expected
    assert (ahead.preemptions > 0) == (num_blocks == TINY)


@pytest.mark.parametrize("num_blocks", [PLENTY, TINY])
def test_launch_ahead_keeps_sampled_tokens_and_logprobs(tmp_path: Path, num_blocks: int) -> None:
    directory = save_llama(tmp_path)
    jobs = sampled_jobs(SIZES["vocab_size"], SIZES["eos_token_id"])
    plain = TorchEngine(directory, num_blocks).collect(jobs)
    ahead = TorchEngine(directory, num_blocks, ahead=True).collect(jobs)
    assert ahead.tokens == plain.tokens
    assert ahead.stops == plain.stops
    assert {key: len(logprobs) for key, logprobs in ahead.prompt_logprobs.items()} == {
        key: len(logprobs) for key, logprobs in plain.prompt_logprobs.items()
    }


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted on a CPU alone")
# Padding rows contain uninitialised memory.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_kernels_and_replayed_decoding_keep_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save_llama(tmp_path)
    rng = Random(4)
    prompts = [[rng.randrange(6, SIZES["vocab_size"]) for _ in range(n)] for n in (33, 2, 20)]
    jobs = greedy_jobs(prompts, max_tokens=5)
    expected = TorchEngine(directory, PLENTY).serve(jobs)
    monkeypatch.setattr(
        "worker.runner.assembly.choose_attention", lambda cache: GpuAttention(cache, 4)
    )
    monkeypatch.setattr("worker.runner.build.choose_pointwise", lambda *_: KernelPointwise())
    monkeypatch.setattr("worker.runner.sampler.choose_sampling_backend", lambda _: sample_by_kernel)
    eager = TorchEngine(directory, PLENTY, ahead=True)
    replaying = TorchEngine(directory, PLENTY, ahead=True)
    replayed = replay_decoding(replaying)
    assert eager.serve(jobs) == expected
    assert replaying.serve(jobs) == expected
    assert {3, 1} <= {*replayed}


def replay_decoding(engine: TorchEngine) -> list[int]:
    """Let decode steps be replayed; return a list that receives their numbers of rows."""
    runner, replayed = engine._runner._runner, []
    model, last_tokens = runner._model, runner._last_tokens
    assert isinstance(model, Decoder) and last_tokens is not None
    graphs = DecodeGraphs(
        model, runner._attention, last_tokens, [1, 4], 8, runner.device, lambda work: work
    )
    run = graphs.run
    graphs.run = lambda rows, parcel: replayed.append(len(rows)) or run(rows, parcel)
    runner._graphs = graphs
    return replayed
