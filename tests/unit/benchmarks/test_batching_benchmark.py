"""Evaluation and replay of requests by bench-batching, in virtual time."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

import pytest

from benchmarks import batching
from benchmarks.batching_engines import Virtual
from benchmarks.batching_player import Player, Request, RunResult
from benchmarks.batching_virtual import VirtualRunner
from benchmarks.scheduling import scheduling
from everlift.step_time import Roofline
from tests.support.worker.worker_support import limits
from worker.config import Scheduling

A_SECOND = Roofline(overhead_s=1.0, weights_s=0.0, token_s=0.0, kv_token_s=0.0)


def play(
    requests: Sequence[Request], scheduling: Scheduling, enough: int | None = None
) -> RunResult:
    bounds = limits(num_blocks=40, max_num_seqs=2, scheduling=scheduling)
    runner = VirtualRunner(bounds.num_blocks, A_SECOND)
    return Player(runner, bounds, runner.clock, runner.sleep).play(requests, enough)


def test_static_batch_wastes_slots_of_shorter_outputs() -> None:
    requests = [Request(3, output) for output in (2, 8) * 6]
    static = play(requests, batching.STATIC, enough=20)
    assert (static.steps, static.output_tokens, static.useful_share) == (16, 20, 20 / 32)
    continuous = play(requests, batching.CONTINUOUS, enough=20)
    assert (continuous.steps, continuous.output_tokens, continuous.useful_share) == (10, 20, 1.0)
    assert continuous.tokens_per_s / static.tokens_per_s == 1.6


def test_token_times_are_the_ends_of_their_steps() -> None:
    played = play([Request(3, 3, at=5.0), Request(3, 2, at=6.5)], batching.CONTINUOUS)
    first, second = played.streams
    assert (first.times, second.times) == ([6.0, 7.0, 8.0], [8.0, 9.0])
    assert played.ttfts() == [1.0, 1.5]
    assert played.gaps() == [1.0, 1.0, 1.0]
    assert played.seconds == 9.0


def test_continuous_batching_gain_grows_with_length_variance() -> None:
    bench = Virtual()
    config = bench.config(8)
    ratio = {}
    for name in ("mixed", "equal", "skewed"):
        runner = bench.runner(config)
        scale = batching.Scale(output=8)
        found = batching.compare(bench, runner, config, batching.MIXES[name], scale, seed=0)
        ratio[name] = found["continuous_vs_static_tokens_per_s"]
        assert found["magnus_useful_share"] >= found["static_useful_share"]
    assert ratio["mixed"] > 2 and ratio["skewed"] > 2
    assert ratio["equal"] == pytest.approx(1.0, abs=0.05)


@pytest.mark.long
def test_short_prompts_first_and_slai_improve_ttft() -> None:
    scale = batching.Scale(requests=200, loads=(1.1,), slots=64, budget=128)
    [policies] = batching.deadlines(Virtual(), scale, rounds=1).values()
    ttft_s = {name: figures["ttft_p50_s"] for name, figures in policies.items()}
    assert ttft_s["continuous"] < 0.7 * ttft_s["arrival"]
    assert ttft_s["slai"] < ttft_s["continuous"]
    assert policies["slai"]["missed_share"] == 0


@pytest.mark.long
def test_chunked_prefill_halves_p999_time_between_tokens() -> None:
    scale = batching.Scale(requests=200, chunk=256)
    found = batching.chunks(Virtual(), scale, rounds=1)
    assert found["on"]["tbt_p999_s"] < 0.5 * found["off"]["tbt_p999_s"]


def figures(ttft: float, missed: float = 0.0) -> dict[str, float]:
    return {"ttft_p50_s": ttft, "missed_share": missed}


@pytest.mark.parametrize(
    ("served", "expected"),
    [
        ([figures(0.1), figures(0.4), figures(0.6)], 0.9),
        ([figures(0.1), figures(0.1, missed=0.02), figures(0.1)], 0.7),
        ([figures(0.6), figures(0.1), figures(0.1)], 0.0),
        ([figures(0.1)] * 3, 1.1),
    ],
)
def test_capacity_is_the_largest_load_within_the_slo(
    served: Sequence[dict[str, float]], expected: float
) -> None:
    found = {str(load): {"slai": each} for load, each in zip((0.7, 0.9, 1.1), served, strict=True)}
    assert batching.capacity(found, "slai") == expected


@pytest.mark.long
def test_bench_scheduling_includes_virtual_batching_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = batching.Scale(sizes=(4,), output=8, requests=60, loads=(0.7,), chunk=512, slots=32)
    monkeypatch.setattr(batching, "VIRTUAL", tiny)
    part = scheduling.PARTS["batching_virtual"](Namespace())
    ratios = part["ratios"]
    assert all(name.startswith("virtual_") for name in ratios)
    assert ratios["virtual_continuous_vs_static_skewed_4"] > 1
    assert ratios["virtual_continuous_vs_static_equal_4"] == pytest.approx(1, abs=0.05)
    assert "virtual_chunks_tbt_p999_off_over_on" in ratios
    assert "virtual_slai_ttft_p50_vs_default_0.7" in ratios
    assert part["settings"]["scale"]["sizes"] == (4,)
