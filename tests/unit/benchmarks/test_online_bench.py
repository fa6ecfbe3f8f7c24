"""Evaluation of answers and of processes' CPU time by the end-to-end benchmark."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.online.online_bench import WORKLOAD, ratios
from benchmarks.online.online_load import Answer, figures, load, percentile
from benchmarks.online.online_parts import Process, cpu_seconds_by_part, descendants

REQUESTS = [
    {"id": 0, "prompt": [1, 2, 1], "max_tokens": 3},
    {"id": 1, "prompt": [9], "max_tokens": 5},
]


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    path = tmp_path / "workload.json"
    path.write_text(json.dumps({"requests": REQUESTS}))
    return path


def test_load_longer_than_its_workload_repeats_it(workload: Path) -> None:
    requests = load(workload, 5, 0.0, seed=0, vocab_size=10)
    assert [request.max_tokens for request in requests] == [3, 5, 3, 5, 3]
    assert [len(request.prompt) for request in requests] == [3, 1, 3, 1, 3]
    assert all(request.due == 0.0 for request in requests)


def test_prompts_keep_repetition_pattern_with_new_tokens(workload: Path) -> None:
    requests = load(workload, 400, 0.0, seed=0, vocab_size=1000)
    long = [request.prompt for request in requests if len(request.prompt) == 3]
    assert all(first == last and 0 < first < 1000 for first, _, last in long)
    assert len({prompt[0] for prompt in long}) > 150


def test_online_load_is_reproducible_by_seed(workload: Path) -> None:
    same = load(workload, 20, 4.0, seed=3, vocab_size=1000)
    assert load(workload, 20, 4.0, seed=3, vocab_size=1000) == same
    assert load(workload, 20, 4.0, seed=4, vocab_size=1000) != same


def test_arrival_gaps_are_exponential_at_the_requested_rate(workload: Path) -> None:
    requests = load(workload, 4000, 8.0, seed=0, vocab_size=10)
    gaps = [after.due - before.due for before, after in itertools.pairwise(requests)]
    mean = sum(gaps) / len(gaps)
    spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert mean == pytest.approx(1 / 8, rel=0.1)
    assert spread == pytest.approx(1 / 8, rel=0.1), "as wide as its mean: exponential"


def test_percentile_is_an_observed_value() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert percentile(values, 99) == 99.0
    assert percentile(values, 100) == 100.0
    assert percentile([7.0], 99) == 7.0
    assert percentile([1.0, 2.0], 50) == 1.0


def test_figures_of_answers_have_rates_and_percentiles() -> None:
    answers = [
        Answer(due=1.0, first_token=1.5, last_token=3.5, tokens=5),
        Answer(due=2.0, first_token=3.0, last_token=4.0, tokens=2),
        Answer(due=2.0, first_token=3.5, last_token=3.5, tokens=1),
    ]
    assert figures(answers) == {
        "tokens_per_s": 2.0,
        "requests_per_s": 0.75,
        "ttft_p50_ms": 1000.0,
        "ttft_p99_ms": 1500.0,
        "tpot_p50_ms": 750.0,
        "tpot_p99_ms": 1000.0,
        "e2e_p50_ms": 2000.0,
        "e2e_p99_ms": 2500.0,
    }


def _system(
    tokens_per_s: float, ttft: tuple[float, float], tpot: tuple[float, float]
) -> dict[str, dict[str, float]]:
    """Return a system's figures; each 99th percentile is the square of the 50th."""
    loads = {
        case: {
            "ttft_p50_ms": first,
            "ttft_p99_ms": first**2,
            "tpot_p50_ms": later,
            "tpot_p99_ms": later**2,
        }
        for case, first, later in zip(("60", "90"), ttft, tpot, strict=True)
    }
    return {"saturation": {"tokens_per_s": tokens_per_s}, **loads}


def test_workload_file_exists() -> None:
    assert WORKLOAD.is_file()


def test_online_ratios_are_those_of_the_worse_rate() -> None:
    found = {
        "vllm": _system(800.0, (100.0, 200.0), (10.0, 40.0)),
        "everlift": _system(1000.0, (50.0, 150.0), (9.0, 20.0)),
        "ray_llm_best": _system(500.0, (200.0, 400.0), (20.0, 80.0)),
    }
    assert ratios(found) == {
        "tok_s_vs_vllm_serve": 1.25,
        "ttft_p50_vs_vllm_serve": 0.75,
        "ttft_p99_vs_vllm_serve": 0.5625,
        "tpot_p50_vs_vllm_serve": 0.9,
        "tpot_p99_vs_vllm_serve": pytest.approx(0.81),
    }
    found["everlift_ray"] = {"saturation": {"tokens_per_s": 750.0}}
    assert "tok_s_vs_ray_serve_llm_best" not in ratios(found), "it was not measured to the end"
    found["everlift_ray"] = _system(750.0, (100.0, 100.0), (20.0, 20.0))
    assert ratios(found)["tok_s_vs_ray_serve_llm_best"] == 1.5
    assert ratios(found)["ttft_p50_vs_ray_serve_llm_best"] == 0.5


def test_serving_overhead_is_core_time_per_token() -> None:
    found = {
        "offline": {"saturation": {"core_ms": 2.0}},
        "everlift": {"saturation": {"core_ms": 2.25}},
    }
    assert ratios(found) == {"added_core_ms_per_token": 0.25}


# Program whose main thread waits while a second thread computes; it has a child process.
WORKS = """
import subprocess, sys, threading, time
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
def work():
    until = time.thread_time() + 0.2
    while time.thread_time() < until:
        pass
thread = threading.Thread(target=work)
thread.start()
thread.join()
print(flush=True)
input()
child.communicate()
"""


def test_cpu_time_is_attributed_by_process_and_thread() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        (child,) = descendants(process.pid)
        assert child.command == f"{sys.executable} -c input() "

        def parts(each: Process) -> tuple[str, str]:
            return ("works", "waits") if each.pid == process.pid else ("others", "others")

        seconds = cpu_seconds_by_part(os.getpid(), parts)
        process.stdin.close()
    assert seconds["works"] >= 0.2
    assert seconds["waits"] > 0
    assert seconds["others"] > 0
