"""Requests of a load, their due times and their prompts."""

from __future__ import annotations

import json
from itertools import islice, pairwise
from math import inf
from pathlib import Path
from random import Random
from statistics import fmean, pstdev

import pytest

from cluster.bench.load import REQUESTS, Load, TokenPrompts, WordPrompts, arrival_times
from cluster.bench.target import load_tokenizer
from cluster.config import DEMO_MODEL
from cluster.errors import BenchFailed, WorkloadFailed
from cluster.simulator.workloads.arrivals import Arrival

PROMPTS = TokenPrompts(vocab_size=100, seed=0)


def gaps(rate: float, burstiness: float) -> list[float]:
    times = list(islice(arrival_times(rate, burstiness, Random(1)), 20_000))
    return [after - before for before, after in pairwise(times)]


# arrival times


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_are_gamma_distributed_by_burstiness(burstiness: float) -> None:
    found = gaps(8.0, burstiness)
    assert fmean(found) == pytest.approx(1 / 8, rel=0.05)
    assert pstdev(found) / fmean(found) == pytest.approx(burstiness**-0.5, rel=0.05)


def test_gaps_are_constant_without_burstiness() -> None:
    assert gaps(8.0, inf) == pytest.approx([1 / 8] * 19_999)


def test_times_at_an_infinite_rate_are_all_zero() -> None:
    assert list(islice(arrival_times(inf, 1.0, Random(1)), 3)) == [0.0] * 3


# selected requests


def test_load_defaults_to_equal_requests_all_due_at_once() -> None:
    requests = Load(input_tokens=9, output_tokens=5).all_requests(PROMPTS)
    assert len(requests) == REQUESTS
    assert {(each.due, len(each.prompt), each.max_tokens) for each in requests} == {(0.0, 9, 5)}
    assert len({each.prompt for each in requests}) == REQUESTS


def test_load_by_rate_and_duration_bounds_its_requests() -> None:
    requests = Load(rate=20.0, duration_s=50.0).all_requests(PROMPTS)
    assert len(requests) == pytest.approx(1000, rel=0.15)
    assert requests[-1].due < 50.0
    assert len(Load(rate=20.0, duration_s=50.0, requests=7).all_requests(PROMPTS)) == 7


def test_bench_load_is_reproducible_by_seed() -> None:
    load = Load(["chat"], rate=2.0, requests=20, longest_input=50)
    assert load.all_requests(PROMPTS) == load.all_requests(PROMPTS)
    other = Load(["chat"], rate=2.0, requests=20, longest_input=50, seed=1)
    assert load.all_requests(PROMPTS) != other.all_requests(PROMPTS)


def test_workload_keeps_its_own_rate_unless_one_is_set() -> None:
    own = Load(["azure-conversation"], is_steady=True, requests=500, longest_input=10)
    assert own.all_requests(PROMPTS)[-1].due == pytest.approx(500 / 5.53, rel=0.2)
    faster = Load(["azure-conversation"], requests=500, longest_input=10, rate=50.0)
    assert faster.all_requests(PROMPTS)[-1].due == pytest.approx(10, rel=0.2)
    assert [each.max_tokens for each in own.all_requests(PROMPTS)] == [
        each.max_tokens for each in faster.all_requests(PROMPTS)
    ], "which requests come does not depend on when they come"


def test_load_lengths_are_cut_to_the_models_limits() -> None:
    load = Load(["chat"], rate=1.0, requests=200, longest_input=64, longest_output=32)
    requests = load.all_requests(PROMPTS)
    assert max(len(each.prompt) for each in requests) == 64
    assert max(each.max_tokens for each in requests) == 32


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 1000 * i, "input_length": 1030, "output_length": 5 + i, "hash_ids": [7, i]}
        for i in range(10)
    ]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def test_bench_trace_keeps_recorded_times_and_lengths(trace: Path) -> None:
    requests = Load(trace=trace, begin_s=2.0, speed=2.0).all_requests(PROMPTS)
    assert [each.due for each in requests] == [number / 2 for number in range(8)]
    assert [each.max_tokens for each in requests] == [7 + number for number in range(8)]
    assert len(Load(trace=trace, duration_s=3.0).all_requests(PROMPTS)) == 3
    assert len(Load(trace=trace, requests=4).all_requests(PROMPTS)) == 4


def test_bench_trace_is_replayed_at_another_rate(trace: Path) -> None:
    requests = Load(trace=trace, rate=4.0, burstiness=inf).all_requests(PROMPTS)
    assert [each.due for each in requests] == [(number + 1) / 4 for number in range(10)]


def test_prompts_share_the_prefixes_of_their_trace(trace: Path) -> None:
    first, second, *_ = (each.prompt for each in Load(trace=trace).all_requests(PROMPTS))
    assert first[:512] == second[:512]
    assert first[512:544] != second[512:544]
    assert len(first) == len(second) == 1030


@pytest.mark.parametrize(
    "said",
    [
        {"workloads": ["chat"], "trace": Path("x")},
        {"speed": 2.0},
        {"burstiness": 0.5},
        {"workloads": ["chat", "reasoning"]},
        {"rate": 0.0},
        {"rate": 1.0, "burstiness": 0.0},
        {"rate": 1.0, "duration_s": 0.0},
        {"duration_s": 5.0},
        {"rate": inf, "duration_s": 5.0},
        {"workloads": ["gossip"]},
    ],
)
def test_bench_load_rejects_invalid_options(said: dict[str, object]) -> None:
    with pytest.raises((BenchFailed, WorkloadFailed)):
        Load(**said).all_requests(PROMPTS)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "said, has_arrival_times",
    [
        ({}, False),
        ({"rate": inf}, False),
        ({"rate": 2.0}, True),
        ({"workloads": ["chat"]}, True),
        ({"workloads": ["chat"], "rate": inf}, False),
    ],
)
def test_has_arrival_times_needs_a_rate_or_a_workload(
    said: dict[str, object], has_arrival_times: bool
) -> None:
    assert Load(**said).has_arrival_times == has_arrival_times  # type: ignore[arg-type]


# prompts


def test_id_prompts_exclude_the_first_token_of_the_vocabulary() -> None:
    ids, tokens = PROMPTS.prompt(Arrival(0.0, 5000, 1, 1), 0)
    assert (min(ids), max(ids), tokens) == (1, 99, 5000)


def test_word_prompts_have_one_word_per_token() -> None:
    text, tokens = WordPrompts(None, 0).prompt(Arrival(0.0, 40, 1, 1), 0)
    assert (len(text.split()), tokens) == (40, 40)


def test_word_prompts_with_a_tokenizer_have_exact_length() -> None:
    tokenizer = load_tokenizer(DEMO_MODEL)
    text, tokens = WordPrompts(tokenizer, 0).prompt(Arrival(0.0, 40, 1, 1), 0)
    assert tokens == len(tokenizer.encode(text, add_special_tokens=False).ids)
    assert tokens == pytest.approx(40, abs=1), "the cut may fall within a word"


def test_tokenizer_directory_without_one_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(BenchFailed, match="--tokenizer"):
        load_tokenizer(tmp_path)
