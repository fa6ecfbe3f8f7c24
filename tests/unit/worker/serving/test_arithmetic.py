"""Arithmetic that a rank announces."""

from __future__ import annotations

from dataclasses import replace

import pytest

from worker.config import WorkerConfig
from worker.serving.rank import _arithmetic, _dtype


@pytest.mark.parametrize(
    ("fields", "is_named"),
    [
        ({}, True),
        ({"tensor_parallel": 2}, True),
        # Sums of more than two ranks depend on their order.
        ({"tensor_parallel": 4}, False),
        ({"dtype": "float16"}, False),
        ({"engine": "vllm"}, False),
    ],
)
def test_arithmetic_is_named_if_no_batch_changes_results(
    fields: dict[str, object], is_named: bool
) -> None:
    config = WorkerConfig(model="m", **{"device": "cpu", "dtype": "float32", **fields})  # type: ignore[arg-type]
    assert bool(_arithmetic(config)) == is_named


def test_dtype_names_what_changes_results() -> None:
    """Workers of one model must announce the same."""
    config = WorkerConfig(model="m", device="cpu", dtype="float32")
    assert _dtype(config) == "torch.float32"
    assert _dtype(replace(config, kv_cache_dtype="fp8")) == "torch.float32, fp8 KV cache"
    assert _dtype(replace(config, quantization="int8")) == "torch.float32, int8"


def test_arithmetic_depends_on_number_of_ranks() -> None:
    one = WorkerConfig(model="m", device="cpu")
    two = WorkerConfig(model="m", device="cpu", tensor_parallel=2)
    assert _arithmetic(one) != _arithmetic(two)
