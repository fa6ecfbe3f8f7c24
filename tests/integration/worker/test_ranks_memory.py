"""Out-of-memory errors of one of several ranks, at any point of a step.

All ranks continue with smaller steps and generate the same tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from functools import wraps
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from everlift.sampling import SamplingParams
from tests.integration.worker.test_captured_ranks import Looking
from tests.integration.worker.test_parallel import gloo, on_ranks
from tests.support.example_counts import long, one_in
from tests.support.worker.families import CHECKPOINTS, save_family
from tests.support.worker.llama_support import SIZES, save_llama
from tests.support.worker.torch_engine import Job, TorchEngine, outputs
from tests.support.worker.worker_support import Collected
from worker.config import Speculation
from worker.model import dummy
from worker.model.decoder import Decoder
from worker.model.huggingface.families import read_spec
from worker.model.layers import ColumnLinear, Placement, RmsNorm, RowLinear, VocabTable
from worker.parallel import group as group_module
from worker.parallel.group import Group, _CollectiveGroup, _SharedMemoryGroup
from worker.parallel.stand_in import StandIn
from worker.runner.build import optimize_for_cpu
from worker.runner.runner import TorchRunner
from worker.runner.sampler import Sampler

__all__ = ["gloo"]

NUM_BLOCKS = 16
#: Methods before and after which a step may run out of memory.
WHERE: list[tuple[type, str]] = [
    (TorchRunner, "_copy_blocks"),
    (Sampler, "admit"),
    (VocabTable, "lookup"),
    (RmsNorm, "__call__"),
    (ColumnLinear, "__call__"),
    (RowLinear, "__call__"),
    (VocabTable, "logits"),
    (Sampler, "launch"),
    *(
        (group, name)
        for group in (_CollectiveGroup, _SharedMemoryGroup)
        for name in ("all_reduce", "gather_to_first", "broadcast")
    ),
]
#: The parts of a step.
PARTS = "_start_step", "_sample", "_collect_results"


class Shortage(threading.local):
    """Out-of-memory errors at chosen points of this thread's steps."""

    def __init__(self) -> None:
        self.is_in_step = False
        self.begin(set())

    def begin(self, points: set[int]) -> None:
        self._points = points
        self.passed = self.met = 0

    def pass_by(self) -> None:
        if not self.is_in_step:
            return
        self.passed += 1
        if self.passed in self._points:
            self.met += 1
            raise torch.OutOfMemoryError("CUDA out of memory")

    @contextmanager
    def step(self):  # type: ignore[no-untyped-def]
        self.is_in_step = True
        try:
            yield
        finally:
            self.is_in_step = False


@pytest.fixture
def shortage(monkeypatch: pytest.MonkeyPatch) -> Shortage:
    here = Shortage()

    def with_points(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def passing(*args: Any, **kwargs: Any) -> Any:
            here.pass_by()
            result = method(*args, **kwargs)
            here.pass_by()
            return result

        return passing

    # Run the plain stack, as on a GPU, where memory can run out.
    monkeypatch.setattr("worker.runner.build.choose_stack", lambda plain, *_: plain)
    for owner, name in WHERE:
        monkeypatch.setattr(owner, name, with_points(getattr(owner, name)))
    for name in PARTS:
        within = here.step()(getattr(TorchRunner, name))
        monkeypatch.setattr(TorchRunner, name, within)
    # Limits the wait for a rank that does not take part in a collective.
    monkeypatch.setattr(group_module, "TIMEOUT", timedelta(seconds=20))
    return here


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("model"), num_key_value_heads=2)


def jobs(seed: int, lengths: tuple[int, ...], max_tokens: int, **sampling: Any) -> list[Job]:
    """Return jobs with random prompts, which differ between seeds."""
    rng = Random(seed)
    prompts = [[rng.randrange(6, SIZES["vocab_size"]) for _ in range(n)] for n in lengths]
    return [
        Job(prompt, max_tokens, SamplingParams(temperature=0.0, seed=100 * seed + i, **sampling))
        for i, prompt in enumerate(prompts)
    ]


@pytest.fixture(params=["shared memory", pytest.param("gloo", marks=pytest.mark.long)])
def way(request: pytest.FixtureRequest) -> str:
    if request.param == "gloo":
        request.getfixturevalue("gloo")
    return str(request.param)


@pytest.fixture(
    params=[11, pytest.param(1, marks=pytest.mark.long)], ids=["some points", "all points"]
)
def every(request: pytest.FixtureRequest) -> int:
    """Number n, if one in n of the points is tested."""
    return int(request.param)


@pytest.mark.parametrize("ahead", [False, True], ids=["executed", "launched ahead"])
@pytest.mark.parametrize("unlucky", [long(0), 1])
@pytest.mark.parametrize("scored", [None, 1], ids=["plain", "prompts' log probabilities"])
def test_memory_shortage_on_a_rank_keeps_all_tokens(
    unlucky: int,
    ahead: bool,
    scored: int | None,
    model: Path,
    shortage: Shortage,
    way: str,
    every: int,
) -> None:
    def each(point: int) -> list[Job]:
        return jobs(point, (3, 5), 3, prompt_logprobs=scored)

    def act(group: Group) -> dict[int, Collected]:
        engine = TorchEngine(model, NUM_BLOCKS, group, ahead)
        shortage.begin(set())
        collected = {0: engine.collect(each(0))}
        passed = torch.tensor([shortage.passed if group.rank == unlucky else 0])
        for point in range(1, 1 + int(group.all_reduce(passed)), every):
            shortage.begin({point} if group.rank == unlucky else set())
            collected[point] = engine.collect(each(point))
            assert shortage.met == (group.rank == unlucky)
        return collected

    first, second = on_ranks(2, act)
    assert first.keys() == second.keys() and max(first) > 60
    alone = TorchEngine(model, NUM_BLOCKS)
    for point, collected in first.items():
        expected = alone.serve(each(point))
        assert outputs(collected, each(point)) == expected
        assert outputs(second[point], each(point)) == expected


@pytest.mark.parametrize("ahead", [False, True], ids=["executed", "launched ahead"])
@pytest.mark.parametrize("seed", range(3))
def test_repeated_memory_shortage_keeps_ranks_consistent(
    seed: int, ahead: bool, model: Path, shortage: Shortage
) -> None:
    drafts = {} if ahead else {"speculation": Speculation(num_draft_tokens=2)}
    work = jobs(seed, (3, 60, 31, 12, 5, 90), 12)

    def act(group: Group) -> tuple[Collected, int]:
        rng = Random(f"{seed} {group.rank}")
        engine = TorchEngine(model, NUM_BLOCKS, group, ahead, **drafts)
        shortage.begin({point for point in range(1, 5000) if rng.random() < 0.002})
        return engine.collect(work), shortage.met

    (first, met), (second, met_too) = on_ranks(2, act)
    assert met + met_too
    assert first.tokens == second.tokens
    assert first.errors == second.errors
    ended = {key for key, cause in first.errors.items() if cause == "out of memory"}
    expected = TorchEngine(model, NUM_BLOCKS).collect(work).tokens
    for key, tokens in first.tokens.items():
        assert tokens == expected[key][: len(tokens)]
        assert key in ended or (first.errors[key], tokens) == ("", expected[key])
    assert len(ended) < len(work)


class Noted(Group):
    """Group of rank 0 of two, which records its collectives."""

    size = 2

    def __init__(self) -> None:
        self.made: list[tuple[str, tuple[int, ...], torch.dtype]] = []

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.made.append(("sum", tuple(tensor.shape), tensor.dtype))
        return tensor

    def gather_to_first(self, shard: Tensor) -> Tensor:
        self.made.append(("gather", tuple(shard.shape), shard.dtype))
        return torch.cat((shard, shard), dim=-1)


@pytest.mark.parametrize("dtype", [long(torch.float32), torch.bfloat16])
@pytest.mark.parametrize("family", one_in(2, CHECKPOINTS))
def test_decoder_collectives_match_its_declared_exchange(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    spec, group = read_spec(save_family(tmp_path, CHECKPOINTS[family])), Noted()
    decoder = Decoder(spec, 64, Placement(group, dtype, torch.device("cpu")))
    dummy.fill(decoder)
    optimize_for_cpu(decoder, spec, dtype)
    attention: Any = Looking()
    with torch.inference_mode():
        hidden = decoder.forward(torch.tensor([1, 2, 3]), torch.arange(3), attention)
        decoder.logits(hidden[:2])
    said = StandIn(group, decoder.exchanged, 3, 2, 1, torch.device("cpu"))
    *sums, logits = group.made
    assert sums == [("sum", sum_.shape, sum_.dtype) for sum_ in said.forward(3)]
    gather = said.logits(2)
    assert logits == ("gather", gather.shape, gather.dtype)
