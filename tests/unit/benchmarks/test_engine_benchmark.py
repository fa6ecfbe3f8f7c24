"""Measurement and evaluation by bench-engine."""

from __future__ import annotations

import json
import os
import select
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks import checkpoints, engine, engine_outputs, engine_system
from benchmarks.bandwidth import Bandwidth
from benchmarks.engine_outputs import equal_share
from benchmarks.engine_system import Job, Request, Result
from benchmarks.prefill_rate import Rate


def _figures(
    tokens_per_s: float, alone_ms: float = 10.0, peak_mib: float = 100.0
) -> dict[str, float]:
    return {
        "tokens_per_s": tokens_per_s,
        "alone_ms_per_token": alone_ms,
        "peak_mib": peak_mib,
    }


@pytest.mark.parametrize("tied", [True, False])
def test_multiplied_bytes_count_only_a_tied_embedding(tied: bool, tmp_path: Path) -> None:
    # A tied embedding is also the output head; an untied one is only looked up.
    directory = checkpoints.ensure("tiny", tmp_path)
    layer = 256 * 256 * 2 + 256 * 128 * 2 + 256 * 688 * 3
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))
    assert checkpoints.multiplied_bytes(directory) == 2 * (4 * layer + tied * 256 * 32000)


def test_checkpoint_with_changed_files_is_regenerated(tmp_path: Path) -> None:
    directory = checkpoints.ensure("tiny", tmp_path)
    (directory / "config.json").write_text("{}")
    assert checkpoints.ensure("tiny", tmp_path) == directory
    assert checkpoints.digest(directory) == checkpoints.CHECKPOINTS["tiny"].digest


def test_engine_ratios_use_the_best_baselines_that_ran(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checkpoints, "find", Path)
    monkeypatch.setattr(checkpoints, "multiplied_bytes", lambda _: 3_000_000)
    small = {
        "everlift": _figures(1000.0, alone_ms=8.0, peak_mib=50.0),
        "vllm_bfloat16": _figures(800.0, peak_mib=200.0),
        "vllm_float32": _figures(700.0, alone_ms=5.0),
        "hf_static_arrival_8": _figures(50.0),
        "hf_static_prompt_16": _figures(100.0),
        "hf_static_output_16": _figures(200.0),
    }
    bandwidths = [Bandwidth(median, best=2e15) for median in (1.0, 3_000_000 / 0.006, 1e15)]
    rates = [Rate(60.0, 100.0), Rate(70.0, 100.0), Rate(90.0, 100.0)]
    assert engine.ratios({"small": small}, bandwidths, rates) == {
        "small_vs_vllm": 1.25,
        "small_alone_vs_vllm": 1.6,
        "small_memory_vs_vllm": 0.25,
        "small_vs_hf_static": 10.0,
        "small_vs_hf_static_oracle": 5.0,
        "small_batch1_of_bandwidth_bound": 0.75,
        "prefill_of_fma_peak": 0.7,
    }
    own = engine.ratios({"/models/own": {"everlift": _figures(300.0)}}, bandwidths)
    assert own == {"own_batch1_of_bandwidth_bound": 0.6}


def test_engine_ratios_compare_quantised_models_with_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "find", Path)
    monkeypatch.setattr(checkpoints, "multiplied_bytes", lambda _: 3_000_000)
    times = {"medium": 40.0, "int8": 24.0, "int4": 14.0}
    found = {name: {"everlift": _figures(100.0, alone_ms=time)} for name, time in times.items()}
    compared = engine.ratios(found, [Bandwidth(median=1e9, best=1e9)])
    assert (compared["w8_alone_vs_bf16"], compared["w4_alone_vs_bf16"]) == (0.6, 0.35)
    del found["medium"]
    assert "w8_alone_vs_bf16" not in engine.ratios(found, [Bandwidth(median=1e9, best=1e9)])


def _vllm_run(refused: set[str]) -> Callable[[str, engine.Setup, Job], Result]:
    def run(name: str, setup: engine.Setup, job: Job) -> Result:
        if name in refused:
            raise RuntimeError(f"{name} ended with status 1")
        return Result(1.0, [[0]], [1.0], 1 << 20, 1.0, 0.0)

    return run


def test_engine_benchmark_leaves_out_vllm_for_formats_it_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine, "job", lambda *_: None)
    names = ("everlift", "vllm_bfloat16", "vllm_float32")
    setups = {name: engine.Setup("", {}) for name in names}
    for refused in ({"vllm_float32"}, {"vllm_bfloat16", "vllm_float32"}):
        monkeypatch.setattr(engine, "run", _vllm_run(refused))
        with pytest.raises(RuntimeError):
            engine.Bench(1, [], setups)._participants("small", ["vllm"])
        bench = engine.Bench(1, [], setups)
        left = [name for name in names[1:] if name not in refused]
        assert bench._participants("int4", ["everlift", "vllm"]) == ["everlift", *left]


@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_checkpoint_has_exact_symmetric_weights(
    bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = checkpoints._quantised(checkpoints.CHECKPOINTS["tiny"].config, bits)
    config |= {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
    checkpoints._write(tmp_path / "model", config)
    weights = checkpoints.dequantised(tmp_path / "model")
    shape = {name: tuple(weight.shape) for name, weight in weights.items()}
    assert shape["model.layers.0.mlp.down_proj.weight"] == (256, 512)
    assert shape["model.layers.0.self_attn.k_proj.weight"] == (128, 256)
    weight = weights["model.layers.0.mlp.down_proj.weight"].float()
    codes = weight / checkpoints._SCALES[bits]
    assert codes.equal(codes.round()) and codes.abs().max() == 2 ** (bits - 1) - 1
    assert abs(codes.mean()) < 0.02 * codes.std()
    assert 0.8 * checkpoints.STD < weight.std() < 1.2 * checkpoints.STD
    reference = engine_outputs._reference(tmp_path / "model").state_dict()
    assert all(reference[name].equal(each.float()) for name, each in weights.items())
    stored = checkpoints.multiplied_bytes(tmp_path / "model")
    layer = 256 * 256 * 2 + 256 * 128 * 2 + 256 * 512 * 3
    assert stored == pytest.approx(layer * bits / 8 + 2 * 256 * 32000, rel=0.002)


def test_multiplied_bytes_count_the_experts_of_one_token(tmp_path: Path) -> None:
    config = checkpoints.CHECKPOINTS["moe"].config | {
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 1,
        "vocab_size": 300,
    }
    checkpoints._write(tmp_path / "model", config)
    attention = 2 * 64 * 64 * (16 + 4)
    experts = 8 * 3 * 64 * 32 + 64 * 64
    parameters = attention + experts + 300 * 64
    assert checkpoints.multiplied_bytes(tmp_path / "model") == 2 * parameters


def test_engine_workload_is_complete_and_disjoint_from_warm_up() -> None:
    batch = engine.requests()
    assert sum(len(request.prompt) for request in batch) == 12_244
    assert sum(request.max_tokens for request in batch) == 8_478
    job = engine.job("tiny", {}, 2, batch)
    warm = {tuple(request.prompt[:8]) for request in job.warm_up}
    assert warm.isdisjoint(tuple(request.prompt[:8]) for request in batch)


class _Scripted:
    """Engine whose calls take a second, plus one for each output token."""

    def __init__(self) -> None:
        self.now = 0.0
        self.is_closed = False

    def generate(self, requests: Sequence[Request]) -> list[list[int]]:
        self.now += 1.0 + sum(request.max_tokens for request in requests)
        return [[0] * request.max_tokens for request in requests]

    def close(self) -> None:
        self.is_closed = True


def test_batch_seconds_and_single_token_time_are_separate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    system = _Scripted()
    monkeypatch.setattr(engine_system.time, "perf_counter", lambda: system.now)
    job = Job(
        model="",
        threads=1,
        settings={},
        warm_up=[Request([1], 4)],
        batch=[Request([1], 2), Request([2], 3)],
        alone=[(Request([3], 1), Request([4], 11))],
    )
    result = engine_system.measure(job, lambda _: system)
    assert (result.start_s, result.seconds, result.alone_ms) == (5.0, 6.0, [1000.0])
    assert engine.tokens_per_s(result) == pytest.approx(5 / 6)
    assert result.peak_bytes > 1 << 20
    assert system.is_closed


def test_engine_figures_are_medians_with_maximum_others_share() -> None:
    def result(seconds: float, others: float) -> Result:
        return Result(seconds, [[0] * 6], [seconds], 1 << 20, 1.0, others)

    found = engine.figures([result(1.0, 0.0), result(2.0, 0.3), result(3.0, 0.1)])
    assert found["tokens_per_s"] == 3.0
    assert found["alone_ms_per_token"] == 2.0
    assert found["others"] == 0.3


def test_engine_run_failure_names_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "LOGS", tmp_path)
    job = Job("tiny", 1, {}, [], [], [])
    with pytest.raises(RuntimeError, match=r"nobody ended with status 1: see .*tiny-nobody.log"):
        engine.run("nobody", engine.Setup("no_such_engine", {}), job)
    assert "no_such_engine" in (tmp_path / "tiny-nobody.log").read_text()


def test_engine_run_ends_descendant_processes(tmp_path: Path) -> None:
    script = "import subprocess as s; print(s.Popen(['sleep', '1000']).pid, flush=True)"
    log = tmp_path / "log"
    with log.open("w") as output:
        engine._run(["python3", "-c", script], dict(os.environ), output.fileno())
    with suppress(ProcessLookupError):
        ended, _, _ = select.select([os.pidfd_open(int(log.read_text()))], [], [], 30.0)
        assert ended


def test_equal_share_counts_identical_sequences() -> None:
    assert equal_share([[1, 2], [3]], [[1, 2], [4]]) == 0.5
