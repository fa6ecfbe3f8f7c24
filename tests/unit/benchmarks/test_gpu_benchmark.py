"""bench-gpu with small shapes, and its arithmetic."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from random import Random

import pytest
import torch

from benchmarks.gpu import gpu, gpu_kernels, gpu_parts
from benchmarks.gpu.gpu_shapes import SHAPES, Ceiling
from worker.model.huggingface.families import read_spec

LLAMA, TINY = SHAPES["llama-8b"], SHAPES["tiny"]


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_llama_shape_has_8_billion_parameters() -> None:
    embedding = LLAMA.vocab * LLAMA.hidden
    assert 8.0e9 < LLAMA.matmul_params + embedding < 8.1e9
    assert LLAMA.kv_bytes == 128 << 10


def test_decode_bounds_match_published_h200_times() -> None:
    """The bounds for 4.3 TB/s and 790 TF/s are 3.52 ms, 5.44 ms and 12.7 ms."""
    ceiling = Ceiling(4.3e12, 790e12)
    bounds = [LLAMA.decode_bound_s(batch, 1024, ceiling) * 1e3 for batch in (1, 64, 256)]
    assert bounds == pytest.approx([3.52, 5.44, 12.7], rel=0.02)
    assert LLAMA.prefill_flops(1024) / 1024 == pytest.approx(14.2e9, rel=0.01)


def test_shapes_of_experts_have_published_sizes() -> None:
    """Qwen3-30B-A3B has 30.5 billion parameters, gpt-oss-20b 20.9; 3.3 and 3.6 are active."""
    for name, total, active in (("qwen3-30b-a3b", 30.5e9, 3.3e9), ("gpt-oss-20b", 20.9e9, 3.6e9)):
        shape = SHAPES[name]
        embedding = shape.vocab * shape.hidden
        experts = shape.experts
        assert experts is not None
        rest = (experts.number - experts.top_k) * shape.layers * 3 * shape.hidden
        stored = shape.matmul_params + rest * experts.intermediate + embedding
        assert stored == pytest.approx(total, rel=0.01)
        held = shape.matmul_params + (embedding if name.startswith("qwen") else 0)
        assert held == pytest.approx(active, rel=0.03)


def test_weight_bytes_grow_with_the_experts_that_are_chosen() -> None:
    shape = SHAPES["gpt-oss-20b"]
    one, few, many = (shape.weight_bytes(batch) for batch in (1, 8, 1000))
    experts = 24 * 3 * 2880**2 * (0.5 + 2 / 32)
    assert few - one == pytest.approx((32 * (1 - (7 / 8) ** 8) - 4) * experts)
    assert many - one == pytest.approx(28 * experts)
    fp8, bf16 = SHAPES["llama-8b-fp8"].weight_bytes(1), LLAMA.weight_bytes(1)
    assert fp8 < 0.54 * bf16


@pytest.mark.parametrize("name", SHAPES)
def test_shape_is_one_that_workers_run(name: str, tmp_path: Path) -> None:
    shape = SHAPES[name]
    (tmp_path / "config.json").write_text(json.dumps(shape.config))
    spec = read_spec(tmp_path)
    assert (spec.weight_format is not None) == (shape.weights != "bf16")
    experts, expected = spec.layers[0].experts, shape.experts
    sizes = experts and (experts.number, experts.top_k, experts.intermediate_size)
    assert sizes == expected
    assert {layer.window for layer in spec.layers} == {None, shape.window}


def test_engine_parts_leave_out_other_shapes() -> None:
    planned = [(part.function, part.shape) for part in gpu.engine_parts("gpt-oss-20b")]
    assert planned == [(name, "gpt-oss-20b") for name in ("ceilings", "engine", "idle")]


def test_covered_counts_overlapping_spans_once() -> None:
    assert gpu_parts.covered_length([(0, 3), (1, 2), (2, 5), (7, 8)]) == 6


def test_gpu_ratios_are_shares_of_the_bound() -> None:
    ceiling = {"bandwidth": 4e12, "flops": 8e14}
    bound = LLAMA.decode_bound_s(8, 1000, Ceiling(**ceiling))
    engine = {
        "context": 1000,
        "decode_s": {"8": 2 * bound},
        "prefill_s": {"100": 1.0, "1000": 4 * LLAMA.prefill_flops(1000) / 8e14},
        "mix_tok_s": 900.0,
    }
    raw = {
        "ceilings": ceiling,
        "engine": engine,
        "idle": {"1": {"idle": 0.1, "busy_s": 0.9}, "8": {"idle": 0.02, "busy_s": 1.9}},
        "transformers_continuous": {"tok_s": 300.0},
    }
    assert gpu.ratios(raw, LLAMA, TINY) == pytest.approx(
        {
            "decode_b8": 0.5,
            "prefill_mfu_100": LLAMA.prefill_flops(100) / 8e14,
            "prefill_mfu_1000": 0.25,
            "prefill_mfu": 0.25,
            "idle_share": 0.1,
            "idle_share_unwatched": 1 - 1.9 / (2 * bound),
            "tok_s_vs_hf_continuous": 3.0,
        }
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is no small one then")
def test_gpu_engine_part_measures_decode_mix_and_idle_shares() -> None:
    first, *_, found = map(json.dumps, gpu_parts.engine(TINY))
    assert json.loads(first)["decode_s"].keys() == {"1"}, "each figure is reported when it is there"
    assert {*json.loads(found)["decode_s"]} == {"1", "4"} and json.loads(found)["mix_tok_s"] > 0
    *_, idle = gpu_parts.idle(TINY)
    assert idle.keys() == {"1", "4"} and all(0 <= batch["idle"] < 1 for batch in idle.values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is no small one then")
def test_kernels_part_measures_every_kernel_against_torch() -> None:
    *_, found = gpu_kernels.kernels(TINY)
    kinds = ("attention", "sum_and_norm", "turn_and_place", "gate_and_multiply", "draw_rows")
    assert {name.split(",")[0].split()[0] for name in found} == {*kinds}
    for times in found.values():
        assert times.keys() in ({"ours_s", "torch_s", "bytes"}, {"ours_s", "sdpa_s", "bytes"})
        assert all(value > 0 for value in times.values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is no small one then")
def test_kernel_failure_keeps_figures_of_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(gpu_kernels, "sum_and_norm", fail)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", fail)
    *_, found = gpu_kernels.kernels(TINY)
    norms = {name for name in found if name.startswith("sum_and_norm")}
    assert all("no kernel image" in found[name]["failed"] for name in norms)
    others = found.keys() - norms
    assert all(found[name]["ours_s"] > 0 for name in others)
    shares = gpu_kernels.bandwidth_shares(found, 1e9)
    assert norms and shares.keys() == {f"bandwidth, {name}" for name in others}


def test_kernel_share_is_relative_to_copy_bandwidth() -> None:
    found = {"sum_and_norm 1": {"ours_s": 2e-6, "torch_s": 1.0, "bytes": 4e6}}
    assert gpu_kernels.bandwidth_shares(found, 4e12) == {
        "bandwidth, sum_and_norm 1": pytest.approx(0.5)
    }


def test_lengths_have_the_requested_mean_and_are_bounded() -> None:
    lengths = gpu_parts.lengths(Random(1), 20)
    assert sum(lengths) / len(lengths) == pytest.approx(20, rel=0.1)
    assert 1 <= min(lengths) and max(lengths) <= gpu_parts.MOST


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="it is no small one then")
def test_transformers_part_reports_attention_and_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """transformers keeps these settings in a copy of the given configuration."""
    from transformers.generation import configuration_utils as generation

    # Its annotations name the class that is replaced, so it is imported before.
    import_module("transformers.generation.continuous_batching")
    few = partial(generation.ContinuousBatchingConfig, num_blocks=64, max_batch_tokens=64)
    monkeypatch.setattr(generation, "ContinuousBatchingConfig", few)
    [found] = gpu_parts.transformers_continuous(TINY)
    assert found["tok_s"] > 0
    assert found["attention"].endswith("sdpa") and found["graphs"] == "(False, False)"


#: Program that replaces the Python which runs a part.
PART = """#!/bin/sh
[ "$3" = late ] && exec sleep 60
[ "$3" = broken ] && exit 1
echo '{"tok_s": 3}'
[ "$3" = halfway ] && printf '{"tok_s": 3, "more' && exit 1
echo noise
"""


def test_gpu_benchmark_part_fails_alone_with_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(PART)
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    names = ("late", "broken", "halfway", "works", "not begun")
    limits = {"late": 0.01, "not begun": 0.0}
    planned = [gpu.Part(name, name, "tiny", limits.get(name, 30.0)) for name in names]
    *_, found = gpu.run_parts(planned, time.monotonic() + 60)
    assert found.raw == {"halfway": {"tok_s": 3}, "works": {"tok_s": 3}}
    assert found.failed.keys() == {*names} - {"works"}
    assert "exceeded" in found.failed["late"] and "no time" in found.failed["not begun"]
    assert [*found.took_s] == [*names]
    assert gpu.ratios(found.raw, LLAMA, TINY) == {}


def test_gpu_ratios_include_partial_results_of_a_failed_part() -> None:
    ceilings = {"bandwidth": 4e12, "flops": 8e14}
    engine = {"context": 1000, "decode_s": {"1": 1.0}, "prefill_s": {}}
    idle = {"1": {"idle": 0.1, "busy_s": 0.9}, "8": {"idle": 0.02, "busy_s": 1.9}}
    raw = {"ceilings": ceilings, "engine": engine, "idle": idle}
    raw["transformers_continuous"] = {"tok_s": 300.0}
    found = gpu.ratios(raw, LLAMA, TINY)
    assert found.keys() == {"decode_b1", "idle_share", "idle_share_unwatched"}
