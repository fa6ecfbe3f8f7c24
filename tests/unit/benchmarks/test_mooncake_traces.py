"""Generated traces in Mooncake's format, and their statistics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.locality_workloads import recorded_trace
from benchmarks.mooncake_traces import BLOCK_TOKENS, SHAPES, Request, Statistics, write
from cluster.simulator.workloads.traces.trace import Trace

#: Published numbers of requests in an hour, mean input and output lengths, and cache ratios.
PUBLISHED = {
    "conversation": Statistics(12_031, 12_035, 343, 0.40),
    "toolagent": Statistics(23_608, 8_596, 182, 0.59),
}


@pytest.mark.parametrize("name", SHAPES)
def test_trace_has_the_published_statistics(name: str) -> None:
    published = PUBLISHED[name]
    requests = [*SHAPES[name].requests(published.requests / 3600, 1800.0, seed=1)]
    found = Statistics.of(requests)
    assert found.requests * 2 == pytest.approx(published.requests, rel=0.1)
    assert found.input_length == pytest.approx(published.input_length, rel=0.1)
    assert found.output_length == pytest.approx(published.output_length, rel=0.1)
    assert found.cache_ratio == pytest.approx(published.cache_ratio, abs=0.05)


@pytest.mark.parametrize("name", SHAPES)
def test_trace_is_sorted_and_has_an_id_for_each_block(name: str) -> None:
    requests = [*SHAPES[name].requests(2.0, 300.0, seed=3)]
    times = [it.at for it in requests]
    assert times == sorted(times) and 0 <= times[0] < 10 and 290 < times[-1] < 300
    for request in requests:
        assert len(request.hash_ids) == -(-request.input_length // BLOCK_TOKENS)
        assert len({*request.hash_ids}) == len(request.hash_ids)


def test_trace_names_depend_on_all_blocks_before() -> None:
    before: dict[int, tuple[int, ...]] = {}
    for request in SHAPES["toolagent"].requests(2.0, 300.0, seed=1):
        for index, block in enumerate(request.hash_ids):
            assert before.setdefault(block, request.hash_ids[:index]) == request.hash_ids[:index]


def test_trace_depends_on_the_seed_alone() -> None:
    shape = SHAPES["conversation"]
    assert [*shape.requests(2.0, 60.0, 1)] == [*shape.requests(2.0, 60.0, 1)]
    assert [*shape.requests(2.0, 60.0, 1)] != [*shape.requests(2.0, 60.0, 2)]


def test_written_trace_is_read_as_the_simulator_reads_it(tmp_path: Path) -> None:
    requests = [Request(0.25, 1100, 52, (46, 47, 2353)), Request(30.5, 512, 26, (46,))]
    path = write(iter(requests), tmp_path / "trace.jsonl")
    assert json.loads(path.read_text().splitlines()[0]) == {
        "timestamp": 250,
        "input_length": 1100,
        "output_length": 52,
        "hash_ids": [46, 47, 2353],
    }
    first, second = Trace(path).arrivals()
    assert (first.prompt_tokens, first.output_tokens, first.prefix) == (1100, 52, (46, 47))
    assert (second.at, second.prefix, second.prefix_part_tokens) == (30.25, (46,), BLOCK_TOKENS)


def test_recorded_trace_is_replayed_at_the_given_rate(tmp_path: Path) -> None:
    path = write(SHAPES["conversation"].requests(2.0, 200.0, 1), tmp_path / "trace.jsonl")
    arrivals = recorded_trace(path)(8.0, 1, 25.0).arrivals
    assert len(arrivals) == pytest.approx(200, rel=0.25)
    assert arrivals[-1].at < 25.0
