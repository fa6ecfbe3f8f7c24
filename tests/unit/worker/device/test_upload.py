"""Data of a step is uploaded to the device in one copy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from everlift.sampling import SamplingParams
from tests.support.worker.llama_support import SIZES, save_llama
from worker.attention.gpu import GpuAttention
from worker.config import WorkerConfig
from worker.device import upload
from worker.device.upload import Parcel
from worker.engine.plan import UNKNOWN, Admission, Plan, Row, Rows
from worker.model.decoder import Decoder
from worker.parallel.group import Group
from worker.runner import decode_graphs
from worker.runner.build import build_runner
from worker.runner.decode_graphs import DecodeGraphs, Work
from worker.runner.runner import TorchRunner
from worker.runner.sample_by_kernel import sample_by_kernel
from worker.runner.sampled_tokens import LastTokens

CPU = torch.device("cpu")
ARRAYS = [
    np.arange(5, dtype=np.int32),
    np.array([[0.5, np.inf], [-1.0, 3.0]]),
    np.empty(0, np.int64),
    np.array([1 << 40, -7]),
]


def test_parcel_restores_arrays_despite_trailing_data() -> None:
    parcel = Parcel(CPU)
    sent = [parcel.add(array) for array in ARRAYS]
    packed = parcel.packed()
    parcel.unpack(torch.cat((torch.from_numpy(packed), torch.full((9,), 3, dtype=torch.int32))))
    for there, array in zip(sent, ARRAYS, strict=True):
        assert torch.equal(there(), torch.from_numpy(array))
    assert len(packed) % 4 == 0


def test_parcel_aligns_arrays_to_16_bytes() -> None:
    parcel = Parcel(CPU)
    parts = [parcel.add(np.full(size, size, np.int32)) for size in (1, 4, 5)]
    parcel.unpack(torch.from_numpy(parcel.packed()))
    assert [part().storage_offset() for part in parts] == [0, 4, 8]


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TorchRunner]:
    """Yield a runner with the kernels and replayed decode steps of a GPU."""
    if torch.cuda.is_available():
        pytest.skip("kernels compute on a CPU in the interpreter alone")
    monkeypatch.setattr(
        "worker.runner.assembly.choose_attention", lambda cache: GpuAttention(cache, 4)
    )
    monkeypatch.setattr("worker.runner.sampler.choose_sampling_backend", lambda _: sample_by_kernel)
    config = WorkerConfig(
        model=str(save_llama(tmp_path)),
        device="cpu",
        dtype="float32",
        num_blocks=9,
        max_num_seqs=4,
        max_num_batched_tokens=48,
    )
    threads = torch.get_num_threads()
    built = build_runner(config, Group.single())
    model, last = built._model, LastTokens(4, CPU)
    assert isinstance(model, Decoder) and isinstance(built._attention, GpuAttention)
    built._last_tokens = last
    built._graphs = DecodeGraphs(model, built._attention, last, [1], 2, CPU, captured)
    yield built
    torch.set_num_threads(threads)


def captured(work: Work) -> Work:
    work()
    return work


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list of the sizes in bytes of all copies to the device."""
    seen: list[int] = []

    class Sent(Parcel):
        def _unpacked(self) -> list[Tensor]:
            if self._tensors is None:
                packed = torch.from_numpy(self.packed())
                seen.append(packed.nbytes)
                self.unpack(packed)
            return super()._unpacked()

    def upload_into(values: Any, target: Tensor) -> None:
        seen.append(values.nbytes)
        upload.upload_into(values, target)

    def copied(tensor: Tensor, device: torch.device) -> Tensor:
        seen.append(tensor.nbytes)
        return tensor

    for module in ("worker.runner.runner", "worker.attention.gpu"):
        monkeypatch.setattr(f"{module}.Parcel", Sent)
    monkeypatch.setattr(decode_graphs, "upload_into", upload_into)
    monkeypatch.setattr(upload, "_copied", copied)
    return seen


DRAWN = SamplingParams(temperature=0.7, top_p=0.9, seed=3)


def admission(slot: int, num_prompt: int) -> Admission:
    return Admission(slot, (5,) * num_prompt, num_prompt, DRAWN, frozenset(), choice=0)


def test_step_uploads_in_one_copy(runner: TorchRunner, copies: list[int]) -> None:
    first, second = Row(0, (5,) * 20, 0, (4,), True), Row(1, (5,) * 18, 0, (7,), True)
    runner.execute(Plan(0, Rows.of([first]), (admission(0, 20),)))
    copies.clear()
    decode = Row(0, (UNKNOWN,), 20, (4,), True)
    (result,) = runner.execute(Plan(1, Rows.of([decode])))
    assert 0 <= result.tokens[0] < SIZES["vocab_size"] and len(copies) == 1
    copies.clear()
    mixed = [Row(0, (UNKNOWN,), 21, (4,), True), second]
    runner.execute(Plan(2, Rows.of(mixed), (admission(1, 18),)))
    assert len(copies) == 1
