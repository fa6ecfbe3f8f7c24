"""Arithmetic that a rank announces."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.config import DEMO_MODEL
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
    fields = {"device": "cpu", "dtype": "float32", **fields}
    config = WorkerConfig(model=str(DEMO_MODEL), **fields)  # type: ignore[arg-type]
    assert bool(_arithmetic(config)) == is_named


@pytest.mark.parametrize("architecture", ["GPT2LMHeadModel", "Olmo2ForCausalLM"])
def test_arithmetic_of_transformers_modules_is_not_named(architecture: str, tmp_path: Path) -> None:
    """Products by torch are not batch-invariant."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    config = WorkerConfig(model=str(tmp_path), device="cpu", dtype="float32")
    assert _arithmetic(config) == ""


def test_dtype_names_what_changes_results() -> None:
    """All workers of a model must announce the same dtype."""
    config = WorkerConfig(model="m", device="cpu", dtype="float32")
    assert _dtype(config) == "torch.float32"
    assert _dtype(replace(config, kv_cache_dtype="fp8")) == "torch.float32, fp8 KV cache"
    assert _dtype(replace(config, quantization="int8")) == "torch.float32, int8"


def test_arithmetic_depends_on_number_of_ranks() -> None:
    one = WorkerConfig(model=str(DEMO_MODEL), device="cpu")
    two = replace(one, tensor_parallel=2)
    assert _arithmetic(one) != _arithmetic(two)
