"""The router benchmark with a small load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
import pytest

from benchmarks import cores
from benchmarks.clients import Incomplete, connected
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import inference_pb2_grpc

ROOT = Path(__file__).parents[3]


@pytest.mark.long
def test_router_benchmark_measures_streams_and_requests(tmp_path: Path) -> None:
    out = tmp_path / "router.json"
    sizes = ("--many", "8", "--few", "2", "--seconds", "0.2", "--rounds", "1")
    subprocess.run(
        [
            *(sys.executable, "benchmarks/router_cost.py", "--out", out),
            *("--parts", "streams", "requests", *sizes),
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    report = json.loads(out.read_text())
    assert set(report["ratios"]) == {
        "messages_per_s_per_core",
        "tokens_per_s_per_core",
        "rps_vs_floor",
    }
    assert set(report["raw"]) == {
        "streams",
        "few_streams",
        "streams_of_4",
        "hasty_streams",
        "hasty_streams_of_4",
        "requests",
        "requests_floor",
        "few_requests",
        "few_requests_floor",
    }
    figures = [figure for case in report["raw"].values() for figure in case.items()]
    assert all(value > 0 for name, value in figures if name != "core_denied")


class Short(inference_pb2_grpc.InferenceServicer):
    """Server that answers every request with one token, even if more are requested."""

    async def Generate(self, request, context):  # type: ignore[no-untyped-def]
        yield pb.GenerateResponse(token_ids=[1], finish_reason=pb.FINISH_REASON_LENGTH)


async def test_incomplete_stream_is_not_counted() -> None:
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(Short(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with connected(f"127.0.0.1:{port}", 2) as clients:
        await clients.read(pb.GenerateRequest(max_tokens=1))
        with pytest.raises(Incomplete):
            await clients.read(pb.GenerateRequest(max_tokens=2))
        assert clients.answered == 1
    await server.stop(None)


def test_cpu_seconds_include_ended_threads() -> None:
    spent = []

    def work() -> None:
        while time.thread_time() < 0.05:
            pass
        spent.append(time.thread_time())

    before = cores.cpu_seconds(os.getpid())
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert cores.cpu_seconds(os.getpid()) - before >= spent[0]
