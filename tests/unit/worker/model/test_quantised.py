"""Quantised checkpoints: logits of the weights that their formats define, on 1, 2 and 4 ranks."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

from tests.support.worker.decoder_steps import Step, SteppedDecoder
from tests.support.worker.families import all_logits, load_family
from tests.support.worker.llama_support import SIZES, save_llama
from tests.support.worker.quantised_files import FORMATS, save_quantised
from worker.model.stack import CompiledStack
from worker.parallel.group import Group

LENGTHS = (40, 9, 23)


@pytest.fixture(params=FORMATS, scope="module")
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Directories of a model with dequantised weights, and of the same model in one format."""
    root = tmp_path_factory.mktemp("model")
    # AWQ and GPTQ need sizes that are multiples of 8.
    plain = save_llama(root / "plain", intermediate_size=104, num_hidden_layers=2)
    return [plain, save_quantised(plain, root / "quantised", FORMATS[request.param])]


@pytest.fixture(scope="module")
def expected(files: list[Path]) -> list[Tensor]:
    model = load_family(files[0])
    return [all_logits(model, sequence) for sequence in sequences()]


def sequences() -> list[list[int]]:
    rng = Random(1)
    return [[rng.randrange(6, SIZES["vocab_size"]) for _ in range(length)] for length in LENGTHS]


#: All tokens at once; in chunks; one by one at the end; decodes and chunks in one step.
STEPS: list[list[Step]] = [
    [list(enumerate(LENGTHS))],
    [[(i, min(13, n - at)) for i, n in enumerate(LENGTHS) if at < n] for at in range(0, 40, 13)],
    [[(i, n - 4) for i, n in enumerate(LENGTHS)], *([(0, 1), (1, 1), (2, 1)] for _ in range(4))],
    [[(0, 12), (1, 8)], [(1, 1), (0, 28), (2, 22)], [(2, 1)]],
]


def test_quantised_logits_match_dequantised(files: list[Path], expected: list[Tensor]) -> None:
    decoder = SteppedDecoder(files[1], 64)
    assert isinstance(decoder.decoder.stack, CompiledStack)
    for steps in STEPS:
        check(decoder.logits(sequences(), steps), expected)


@pytest.mark.parametrize("size", [2, 4])
def test_quantised_ranks_match_dequantised(
    size: int, files: list[Path], expected: list[Tensor]
) -> None:
    meeting = Meeting(size)
    with ThreadPoolExecutor(size) as ranks:
        logits = ranks.map(
            lambda rank: SteppedDecoder(files[1], 64, ThreadRank(rank, meeting)).logits(
                sequences(), STEPS[3]
            ),
            range(size),
        )
        check(next(logits), expected)


def check(logits: list[Tensor] | None, expected: list[Tensor]) -> None:
    assert logits is not None
    for got, wanted in zip(logits, expected, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)


class Meeting:
    """Ranks in threads of this process, which meet in each collective."""

    def __init__(self, size: int) -> None:
        self.parts: list[Tensor | None] = [None] * size
        self.barrier = threading.Barrier(size, timeout=60)

    def exchange(self, rank: int, part: Tensor) -> list[Tensor]:
        self.parts[rank] = part.clone()
        self.barrier.wait()
        parts = [part for part in self.parts if part is not None]
        self.barrier.wait()
        return parts


class ThreadRank(Group):
    on_device = False

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.size = rank, len(meeting.parts)
        self._meeting = meeting

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(torch.stack(self._meeting.exchange(self.rank, tensor)).sum(0))

    def gather_to_first(self, shard: Tensor) -> Tensor | None:
        parts = self._meeting.exchange(self.rank, shard)
        return torch.cat(parts, dim=-1) if self.rank == 0 else None
