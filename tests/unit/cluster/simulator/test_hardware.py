"""Speed of modelled workers, compared with published figures of the hardware."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from cluster.config import DEMO_MODEL
from cluster.errors import ForecastFailed
from cluster.simulator.hardware import kind_file
from cluster.simulator.hardware.kind import GPUS, Kind, on_gpus, roofline
from cluster.simulator.hardware.model_size import MODELS, ModelSize
from everlift.hashes import BLOCK_SIZE
from everlift.step_time import Roofline, StepSize

LLAMA_8B = MODELS["llama-3.1-8b"]
LLAMA_70B = MODELS["llama-3.3-70b"]
STEP_TIME = {"overhead_s": 0.001, "weights_s": 0.004, "token_s": 1e-5, "kv_token_s": 1e-8}


def decode(rows: int, context: int = 1024) -> StepSize:
    return StepSize(rows, rows, rows * context, rows * context)


def chunk(tokens: int) -> StepSize:
    return StepSize(1, tokens, tokens, tokens * (tokens + 1) / 2)


def test_model_size_of_llama_8b_matches_published_costs() -> None:
    assert LLAMA_8B.read_bytes == pytest.approx(15.0e9, rel=0.01)
    assert LLAMA_8B.token_flops == pytest.approx(14.0e9, rel=0.01)
    assert LLAMA_8B.pair_flops == 4 * 32 * 4096
    assert LLAMA_8B.kv_token_bytes == 128 << 10


def test_model_size_is_read_from_a_config(tmp_path: Path) -> None:
    demo = ModelSize.of(DEMO_MODEL)
    weights = sum(file.stat().st_size for file in DEMO_MODEL.glob("*.safetensors"))
    assert demo.stored_bytes == pytest.approx(weights, rel=0.01)
    assert (demo.read_bytes, demo.max_model_len) == (demo.stored_bytes, 1024)
    (tmp_path / "config.json").write_text('{"architectures": ["Unheard"], "model_type": "unheard"}')
    with pytest.raises(ForecastFailed, match="Unheard"):
        ModelSize.of(tmp_path)


@pytest.mark.parametrize("rows, milliseconds", [(1, 3.52), (8, 3.73), (64, 5.44)])
def test_roofline_bounds_h200_decoding_by_memory(rows: int, milliseconds: float) -> None:
    """The rates, 4.3 TB/s and 790 TFLOP/s, are those measured for copies and products."""
    bound = roofline(LLAMA_8B, bandwidth=4.3e12, flops=790e12)
    seconds = bound.seconds(decode(rows)) - bound.overhead_s
    assert seconds * 1e3 == pytest.approx(milliseconds, rel=0.04)


def test_roofline_bounds_h200_prefill_by_flops() -> None:
    bound = roofline(LLAMA_8B, bandwidth=4.3e12, flops=790e12)
    seconds = bound.seconds(chunk(8192)) - bound.overhead_s
    assert 8192 / seconds == pytest.approx(46_100, rel=0.1)


def test_h100_decode_time_matches_published_engines() -> None:
    """SGLang takes 7.2 ms, vLLM 7.3, TensorRT-LLM 7.7."""
    h100 = on_gpus(GPUS["h100"], MODELS["qwen3-8b"])
    assert h100.step_time.seconds(decode(1, 1000)) * 1e3 == pytest.approx(7.4, rel=0.12)


def test_kv_cache_gets_the_memory_left_by_weights() -> None:
    tokens = {
        name: int(str(on_gpus(gpu, LLAMA_8B).worker["num_blocks"])) * BLOCK_SIZE
        for name, gpu in GPUS.items()
    }
    assert tokens["h200"] == pytest.approx(845_000, rel=0.01)
    assert tokens["h100"] == tokens["a100"] == pytest.approx(427_000, rel=0.01)
    assert tokens["l4"] == pytest.approx(42_000, rel=0.02)
    assert on_gpus(GPUS["l4"], LLAMA_8B).worker["max_model_len"] == tokens["l4"]


def test_gpu_kind_rejects_weights_larger_than_memory() -> None:
    with pytest.raises(
        ForecastFailed, match=r"h100: the 141 GB of weights of llama-3\.3-70b do not fit"
    ):
        on_gpus(GPUS["h100"], LLAMA_70B)


def test_tensor_parallel_ranks_share_work_and_add_overhead() -> None:
    four, eight = (on_gpus(GPUS["h100"], LLAMA_70B, ranks) for ranks in (4, 8))
    assert (four.name, eight.name) == ("h100x4", "h100x8")
    assert eight.step_time.weights_s == four.step_time.weights_s / 2
    quicker = four.step_time.seconds(decode(64)) / eight.step_time.seconds(decode(64))
    assert 1.4 < quicker < 2.0
    assert eight.step_time.overhead_s > on_gpus(GPUS["h100"], LLAMA_8B).step_time.overhead_s


def write(directory: Path, content: object) -> Path:
    path = directory / "here.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_kind_file_is_read(tmp_path: Path) -> None:
    worker = {"num_blocks": 7, "max_model_len": 99}
    path = write(tmp_path, {"step_time": STEP_TIME, "worker": worker, "machine": {"cores": 2}})
    assert kind_file.read(path) == Kind("here", Roofline(**STEP_TIME), worker)


@pytest.mark.parametrize(
    "content, said",
    [
        ("{", "is not JSON"),
        ([], "must have a section step_time"),
        ({}, "must have a section step_time"),
        ({"step_time": {"weights_s": 1}}, "_s: must be set"),
        ({"step_time": STEP_TIME | {"wait_s": 1}}, "step_time.wait_s: unknown key"),
        ({"step_time": STEP_TIME | {"row_s": "x"}}, "step_time.row_s: must be a number"),
        ({"step_time": STEP_TIME | {"row_s": -1e-9}}, "all values must be finite"),
        ({"step_time": dict.fromkeys(STEP_TIME, 0.0)}, "must be above 0"),
        ({"step_time": STEP_TIME, "worker": 3}, "must have a section step_time"),
    ],
)
def test_kind_file_is_rejected_with_the_cause(tmp_path: Path, content: object, said: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(ForecastFailed) as failure:
        kind_file.read(path)
    assert said in str(failure.value) and str(path) in str(failure.value)


def test_kind_file_round_trips_a_preset(tmp_path: Path) -> None:
    preset = on_gpus(GPUS["l4"], LLAMA_8B)
    path = write(tmp_path, {"step_time": asdict(preset.step_time), "worker": preset.worker})
    assert kind_file.read(path).step_time == preset.step_time
