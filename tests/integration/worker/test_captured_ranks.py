"""Capture of decode steps by several ranks, on CPUs, where calls replace captures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integration.worker.test_parallel import on_ranks
from tests.support.worker.families import CHECKPOINTS, save_family
from tests.support.worker.llama_support import save_llama
from worker.config import WorkerConfig
from worker.device.kv_cache import KVCache
from worker.model import dummy
from worker.model.decoder import Decoder
from worker.model.huggingface.families import read_spec
from worker.model.layers import Placement
from worker.parallel.group import Group
from worker.runner import assembly
from worker.runner.assembly import Assembly, LoadedModel
from worker.runner.decode_graphs import DecodeGraphs, Work
from worker.runner.sampled_tokens import LastTokens

CPU = torch.device("cpu")


class Looking:
    """Attention and DecodingBackend that returns its query."""

    def prepare(self, rows: object, parcel: object) -> Looking:
        return self

    def decoding(self, *tensors: Tensor) -> Looking:
        return self

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        pass

    def attend(self, layer: int, query: Tensor, form: object) -> Tensor:
        return query


class Noted(Group):
    """Wrapper of ``group`` that records the collectives."""

    def __init__(self, group: Group, on_device: bool = True) -> None:
        self.rank, self.size, self.on_device = group.rank, group.size, on_device
        self.made: list[tuple[Any, ...]] = []
        self._group = group

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.made.append(("all_reduce", *tensor.shape))
        return self._group.all_reduce(tensor)

    def gather_to_first(self, shard: Tensor) -> Tensor | None:
        self.made.append(("gather_to_first", *shard.shape))
        return self._group.gather_to_first(shard)

    def broadcast(self, tensor: Tensor) -> Tensor:
        self.made.append(("broadcast", *tensor.shape))
        return self._group.broadcast(tensor)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("model"))


def capture(model: Path, group: Group, attention: object) -> DecodeGraphs | None:
    spec, place = read_spec(model), Placement(group, torch.float32, CPU)
    decoder = Decoder(spec, 64, place)
    dummy.fill(decoder)
    loaded = LoadedModel(decoder, spec.vocab_size, 64, (1, 1, 4), 0)
    cache = KVCache(4, 1, 1, 4, torch.float32, CPU)
    config = WorkerConfig(model=str(model), max_num_seqs=6)
    backend: Any = attention
    return Assembly(config, loaded, place, cache, backend, LastTokens(6, CPU)).capture()


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace a capture by two calls of the work, which CudaGraphs also makes."""

    def call(work: Work) -> Work:
        work()
        work()
        return work

    monkeypatch.setattr(assembly, "CudaGraphs", lambda: call)


@pytest.mark.usefixtures("called")
def test_capture_records_the_same_collectives_on_all_ranks(model: Path) -> None:
    def act(group: Group) -> list[tuple[Any, ...]]:
        noted = Noted(group)
        assert capture(model, noted, Looking()) is not None
        return noted.made

    first, second = on_ranks(2, act)
    assert first == second
    agreed, *sums = first
    hidden, layers = read_spec(model).hidden_size, read_spec(model).num_layers
    assert agreed == ("all_reduce", 1)
    of_a_step = 1 + 2 * layers  # one for the embedding, and two for each layer
    assert sums == [
        ("all_reduce", bucket, hidden) for bucket in (6, 4, 2, 1) for _ in range(2 * of_a_step)
    ]


@pytest.mark.usefixtures("called")
@pytest.mark.parametrize(
    ("on_device", "attentions"),
    [(False, [Looking(), Looking()]), (True, [Looking(), object()]), (True, [object(), Looking()])],
    ids=["through the host", "rank 1 cannot", "rank 0 cannot"],
)
def test_capture_is_skipped_on_all_ranks_if_one_cannot(
    model: Path, on_device: bool, attentions: list[object]
) -> None:
    def act(group: Group) -> tuple[object, int]:
        noted = Noted(group, on_device)
        return capture(model, noted, attentions[group.rank]), len(noted.made)

    assert on_ranks(2, act) == [(None, 1)] * 2


@pytest.mark.usefixtures("called")
def test_capture_runs_on_a_single_rank(model: Path) -> None:
    assert capture(model, Group.single(), Looking()) is not None


@pytest.mark.usefixtures("called")
def test_capture_is_skipped_for_mixtures_of_experts(tmp_path: Path) -> None:
    model = save_family(tmp_path, CHECKPOINTS["mixtral, window"])
    assert capture(model, Group.single(), Looking()) is None
