"""Recorded workloads: formats of their files, and errors of invalid ones."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path

import pytest

from cluster.errors import WorkloadFailed
from cluster.simulator.workloads.arrivals import Arrival
from cluster.simulator.workloads.traces.trace import Trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:17:46.6805900,879,5000
"""
#: Format of the later traces.
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:01.009930+00:00,2399,6
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,API log
60,ChatGPT,0,12,12,API log
118.5,GPT-4,417,276,693,API log
"""
MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 48]},
    {"timestamp": 3000, "input_length": 1024, "output_length": 26, "hash_ids": [46, 49]},
    {"timestamp": 3000, "input_length": 9, "output_length": 3, "hash_ids": [50]},
]


def written(directory: Path, text: str | list[dict[str, object]]) -> Path:
    path = directory / "trace"
    path.write_text(text if isinstance(text, str) else "".join(f"{json.dumps(x)}\n" for x in text))
    return path


def read(path: Path, **how: float) -> list[Arrival]:
    return list(Trace(path, **how).arrivals())


def test_trace_reads_azure_format(tmp_path: Path) -> None:
    first, second, third = read(written(tmp_path, AZURE))
    assert first == Arrival(0.0, 374, 44, 4096)
    assert second.at == pytest.approx(4.314579, abs=1e-5)
    assert (third.at, third.output_tokens, third.max_tokens) == (120.0, 5000, 5000)


def test_trace_reads_azure_2024_format(tmp_path: Path) -> None:
    assert [each.at for each in read(written(tmp_path, AZURE_2024))] == [0.0, 1.0]


def test_trace_reads_burstgpt_without_failed_requests(tmp_path: Path) -> None:
    first, second = read(written(tmp_path, BURSTGPT))
    assert first == Arrival(0.0, 472, 18, 4096, application="Conversation log")
    assert second == Arrival(113.5, 417, 276, 4096, application="API log")


def test_trace_reads_mooncake_with_whole_blocks(tmp_path: Path) -> None:
    first, second, third = read(written(tmp_path, MOONCAKE))
    assert first == Arrival(0.0, 1100, 52, 4096, prefix=(46, 47), prefix_part_tokens=512)
    assert (second.at, second.prefix) == (3.0, (46, 49))
    assert (third.at, third.prefix) == (3.0, ())


@pytest.mark.parametrize("text", [AZURE, BURSTGPT, "".join(f"{json.dumps(x)}\n" for x in MOONCAKE)])
def test_trace_ignores_empty_lines_and_crlf(tmp_path: Path, text: str) -> None:
    expected = read(written(tmp_path, text))
    path = tmp_path / "other"
    path.write_bytes(text.replace("\n", "\r\n\r\n").encode() + b"\r\n")
    assert read(path) == expected


def test_trace_window_can_be_sped_up(tmp_path: Path) -> None:
    path = written(tmp_path, BURSTGPT.replace(",0,1087", ",9,1087"))
    (only,) = read(path, begin_s=40.0, end_s=100.0, speed=2.0)
    assert (only.at, only.prompt_tokens) == (0.0, 1087)
    assert [each.at for each in read(path, begin_s=30.0, speed=2.0)] == [5.0, 41.75]


@pytest.mark.parametrize("begin_s, end_s", [(1.0, 2.0), (500.0, inf)])
def test_trace_window_without_requests_is_rejected(
    tmp_path: Path, begin_s: float, end_s: float
) -> None:
    path = written(tmp_path, BURSTGPT)
    with pytest.raises(WorkloadFailed, match="no request from"):
        read(path, begin_s=begin_s, end_s=end_s)


@pytest.mark.parametrize("how", [{"begin_s": 3.0, "end_s": 3.0}, {"speed": 0.0}, {"begin_s": -1.0}])
def test_trace_window_with_invalid_bounds_is_rejected(
    tmp_path: Path, how: dict[str, float]
) -> None:
    with pytest.raises(WorkloadFailed):
        read(written(tmp_path, AZURE), **how)


@pytest.mark.parametrize(
    "old, new, said",
    [
        ("396,109", "396.5,109", ":3: ContextTokens must be a whole number, not '396.5'"),
        ("396,109", "0,109", ":3: ContextTokens must be at least 1, not 0"),
        ("396,109", "9,100000000000", ":3: GeneratedTokens must be at most 2147483647, not 1"),
        ("396,109", "396", ":3: GeneratedTokens is missing"),
        ("2023-11-16 18:17", "yesterday", ":4: TIMESTAMP must be a date and a time"),
        ("2023-11-16 18:17", "2023-11-16 18:14", ":4: arrives 64.3"),
        ("ContextTokens", "Context", ":1: unknown format"),
        ("879", "8\x009", ":4: "),
        (AZURE, "", ":1: unknown format"),
    ],
)
def test_trace_names_the_malformed_csv_line(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = written(tmp_path, AZURE.replace(old, new))
    with pytest.raises(WorkloadFailed) as failure:
        read(path)
    assert f"{path}{said}" in str(failure.value)


@pytest.mark.parametrize(
    "line, said",
    [
        ("{", "is not JSON"),
        ("[1]", "must be an object of named fields"),
        ("[" * 100_000, "is not JSON"),
        ('{"timestamp": NaN, "input_length": 1, "output_length": 1}', "timestamp must be a number"),
        ('{"timestamp": 1, "input_length": true, "output_length": 1}', "input_length must be a"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1}', "hash_ids is missing"),
        (
            '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": ["a"]}',
            "hash_ids must be a list of whole numbers",
        ),
    ],
)
def test_trace_names_the_malformed_json_line(tmp_path: Path, line: str, said: str) -> None:
    path = written(tmp_path, f"{json.dumps(MOONCAKE[0])}\n{line}\n")
    with pytest.raises(WorkloadFailed) as failure:
        read(path)
    assert str(failure.value).startswith(f"{path}:2: {said}")


def test_trace_rejects_missing_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(WorkloadFailed, match="No such file"):
        read(tmp_path / "none")
    path = tmp_path / "picture"
    path.write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(WorkloadFailed, match="is not UTF-8 text"):
        read(path)


def test_trace_is_read_lazily(tmp_path: Path) -> None:
    path = written(tmp_path, f"{AZURE}not a line\n")
    arrivals = Trace(path).arrivals()
    assert [next(arrivals).prompt_tokens for _ in range(3)] == [374, 396, 879]
    with pytest.raises(WorkloadFailed):
        next(arrivals)
