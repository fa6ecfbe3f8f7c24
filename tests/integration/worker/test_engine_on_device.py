"""Properties of the engine on any device.

The device is the GPU if there is one, else the CPU, with Triton's interpreter for kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from everlift.hashes import BLOCK_SIZE
from everlift.sampling import Grammar, GrammarKind, SamplingParams
from tests.integration.worker.test_parallel import on_ranks
from tests.support.example_counts import long
from tests.support.worker.llama_support import SIZES, generate, load_llama, save_llama
from tests.support.worker.no_waits import no_waits
from tests.support.worker.torch_engine import Job, TorchEngine, greedy_jobs, served_ahead
from worker.attention.gpu import GpuAttention
from worker.config import WorkerConfig
from worker.device.device import choose_device
from worker.device.upload import Parcel
from worker.engine.plan import Admission, Plan, Row, Rows
from worker.model.decoder import Decoder
from worker.parallel import collectives
from worker.parallel.group import Group
from worker.runner.build import build_runner
from worker.runner.decode_graphs import DecodeGraphs, Work
from worker.runner.runner import TorchRunner, TorchStep
from worker.runner.sampled_tokens import LastTokens
from worker.runner.swap import SwapCost
from worker.runner.token_mask import CompiledGrammar, TokenMask

DEVICE = choose_device("auto")
ON_GPU = DEVICE.type == "cuda"
#: Half-precision type: Triton's interpreter does not multiply bf16 matrices.
HALF = "bfloat16" if ON_GPU else "float16"
#: Allowed relative error of logits in this type; bf16 has three mantissa bits fewer than fp16.
NEAR = 0.02 if ON_GPU else 0.01
DEMO_MODEL = Path(__file__).parents[3] / "cluster" / "demo_model"
PLENTY, FEW = 200, 18
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"))


def random_jobs(lengths: Sequence[int], max_tokens: int) -> list[Job]:
    rng = Random(4)
    prompts = [[rng.randrange(6, SIZES["vocab_size"]) for _ in range(n)] for n in lengths]
    return greedy_jobs(prompts, max_tokens)


def demo_jobs(max_tokens: int) -> list[Job]:
    """Return jobs whose tokens the demo model predicts with certainty."""
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    texts = [f"count from {n} to {n + 40}:" for n in (17, 340, 650)]
    return greedy_jobs([tokenizer.encode(text).ids for text in texts], max_tokens)


def config(directory: Path, dtype: str, num_blocks: int, ranks: int = 1) -> WorkerConfig:
    return WorkerConfig(
        model=str(directory),
        device=DEVICE.type,
        dtype=dtype,
        num_threads=None if ON_GPU else 1,
        num_blocks=num_blocks,
        max_num_seqs=16,
        max_num_batched_tokens=48,
        tensor_parallel=ranks,
    )


def ahead(runner: TorchRunner) -> TorchRunner:
    """Launch the runner's steps before the previous ones are committed, on a CPU as well."""
    if runner._last_tokens is None:
        runner._last_tokens = LastTokens(16, runner.device)
    return runner


def built(directory: Path, dtype: str, num_blocks: int) -> TorchRunner:
    return ahead(build_runner(config(directory, dtype, num_blocks), Group.single()))


def serve(runner: TorchRunner, directory: Path, jobs: Sequence[Job]) -> list[list[int]]:
    same = config(directory, "float32", runner.num_blocks)
    return served_ahead(runner, same, jobs, [SIZES["eos_token_id"]])


# contents of blocks


@pytest.mark.parametrize("num_blocks", [PLENTY, FEW])
def test_reused_blocks_filled_with_nan_do_not_affect_tokens(
    directory: Path, num_blocks: int
) -> None:
    jobs = random_jobs((33, 2, 20, 64, 7, 100), 40)
    expected = serve(built(directory, "float32", num_blocks), directory, jobs)
    poisoned = built(directory, "float32", num_blocks)
    poison_what_is_begun(poisoned)
    assert serve(poisoned, directory, jobs) == expected


def poison_what_is_begun(runner: TorchRunner) -> None:
    """Fill a block with NaN when its next owner first writes to it."""
    launch = runner._launch

    def poisoning(plan: Plan) -> TorchStep:
        begun = plan.rows.blocks[plan.rows.positions % BLOCK_SIZE == 0]
        chosen = torch.from_numpy(begun).long().to(runner.device)
        runner._cache.tensor.index_fill_(0, chosen, torch.nan)
        return launch(plan)

    runner._launch = poisoning  # type: ignore[method-assign]


@pytest.mark.parametrize("is_ahead", [long(False), True])
def test_swapped_blocks_return_from_the_host_unchanged(
    directory: Path, monkeypatch: pytest.MonkeyPatch, is_ahead: bool
) -> None:
    monkeypatch.setattr(SwapCost, "pays", property(lambda _: True))
    jobs = random_jobs((80, 66, 94, 62, 40, 97, 70), 90)
    engine = TorchEngine(
        directory, FEW - 6, ahead=is_ahead, device=DEVICE.type, preemption="swap", swap_mib=1
    )
    outputs = engine.serve(jobs)
    assert engine.counters.blocks_swapped_out > 2
    assert engine.counters.blocks_swapped_in > 2
    model = load_llama(directory)
    for job, output in zip(jobs, outputs, strict=True):
        generate(model, job.prompt, job.max_tokens).near_ties(output)


# ranks


def test_ranks_sharing_a_device_make_the_tokens_of_one_rank(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks use gloo, because NCCL does not allow them to share a GPU."""
    monkeypatch.setattr(collectives, "init_collectives", lambda *_: None)
    jobs = random_jobs((33, 2, 20), 20)
    expected = serve(built(directory, "float32", PLENTY), directory, jobs)

    def act(group: Group) -> list[list[int]]:
        runner = ahead(build_runner(config(directory, "float32", PLENTY, ranks=2), group))
        return serve(runner, directory, jobs)

    assert on_ranks(2, act, device=DEVICE) == [expected, expected]


# captured decoding


@dataclass
class Decoding:
    """A runner with kernels and captured decoding, in half precision."""

    runner: TorchRunner

    @classmethod
    def of(cls, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Decoding:
        if not ON_GPU:
            attention = lambda cache: GpuAttention(cache, 4)  # noqa: E731
            monkeypatch.setattr("worker.runner.assembly.choose_attention", attention)
        runner = built(directory, HALF, PLENTY)
        if runner._graphs is None:
            runner._graphs = called_again(runner)
        return cls(runner)

    @torch.inference_mode()
    def last_logits(self, prompt: Sequence[int]) -> Tensor:
        """Return the logits after ``prompt``, [vocab]; a captured step computes the last token."""
        table, runner = tuple(range(9, 0, -1)), self.runner
        before = Rows.of([Row(0, tuple(prompt[:-1]), 0, table, False)])
        runner._forward(before, np.array([0]), Parcel(runner.device))
        last = Rows.of([Row(0, (prompt[-1],), len(prompt) - 1, table, True)])
        assert runner._graphs is not None and runner._graphs.bucket(last)
        logits = runner._model.logits(runner._graphs.run(last, Parcel(runner.device)))
        assert logits is not None
        return logits[0].cpu()


def called_again(runner: TorchRunner) -> DecodeGraphs:
    model, attention, last = runner._model, runner._attention, runner._last_tokens
    assert isinstance(model, Decoder) and isinstance(attention, GpuAttention) and last is not None

    def capture(work: Work) -> Work:
        work()
        return work

    return DecodeGraphs(model, attention, last, [1, 4], 9, runner.device, capture)


# Padding rows contain uninitialised memory.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_captured_decoding_in_half_precision_is_near_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    decoding = Decoding.of(DEMO_MODEL, monkeypatch)
    model = load_llama(DEMO_MODEL).to(getattr(torch, HALF)).float()
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    for count in (1, 20, 60) if ON_GPU else (1,):
        prompt = tokenizer.encode(f"count from {count} to {2 * count}:" + " 17" * count).ids
        logits = decoding.last_logits(prompt)
        with torch.inference_mode():
            right = model(torch.tensor([prompt])).logits[0, -1]
        assert logits.isfinite().all()
        assert (logits - right).norm() <= NEAR * right.norm()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_captured_decoding_in_half_precision_equals_eager_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jobs = demo_jobs(60 if ON_GPU else 3)
    replaying = Decoding.of(DEMO_MODEL, monkeypatch).runner
    eager = Decoding.of(DEMO_MODEL, monkeypatch).runner
    eager._graphs = None
    assert serve(replaying, DEMO_MODEL, jobs) == serve(eager, DEMO_MODEL, jobs)


# synchronisation with the device


class Even:
    """Grammar, and its own matcher, that allows tokens with even ids only."""

    def matcher(self, stop_token_ids: frozenset[int], output: Sequence[int]) -> TokenMask:
        return self

    def is_ready(self) -> bool:
        return True

    def mask(self, drafts: Sequence[int], into: Tensor, waiting_since: float) -> int:
        into.fill_(0x55555555)
        return len(drafts)

    def accept(self, tokens: Sequence[int]) -> None:
        pass


def test_sampling_steps_never_synchronise_with_the_device(
    directory: Path,
) -> None:
    """The tokens of the previous step are awaited by an event, which torch does not count."""
    runner = built(directory, "float32", FEW)
    asked = [
        SamplingParams(seed=1, logprobs=3),
        SamplingParams(seed=2, logit_bias=((7, 4.0), (9, -100.0))),
        SamplingParams(seed=3, min_tokens=5, repetition_penalty=1.2),
    ]
    jobs = [Job([6 + i] * 20, 12, sampling) for i, sampling in enumerate(asked)]
    with no_waits():
        serve(runner, directory, jobs)
    with no_waits():
        drawn = draw_with(runner, Even())
    assert all(token % 2 == 0 for token in drawn)


def draw_with(runner: TorchRunner, grammar: CompiledGrammar) -> list[int]:
    """Return four tokens of one sequence, sampled in four steps."""
    sampling = SamplingParams(seed=4, grammar=Grammar(GrammarKind.REGEX, ("x*",)))
    admission = Admission(0, (8, 9), 2, sampling, frozenset(), choice=0, grammar=grammar)
    rows = [Row(0, (8, 9), 0, (3,), True), *(Row(0, (8,), n, (3,), True) for n in (2, 3, 4))]
    steps = []
    for number, each in enumerate(rows):
        step = runner._launch(Plan(number, Rows.of([each]), (admission,) if not number else ()))
        step.sample()
        steps.append(step.results())
    return [result.tokens[0] for (result,) in steps]
