"""Cleanup after `everlift demo`, and its report of requests that were not completed."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from cluster import demo
from cluster.cli import app
from cluster.config import Config
from cluster.demo.load import Load
from cluster.demo.prompts import counting_tasks
from cluster.demo.run import describe
from cluster.errors import ClusterFailed
from cluster.ray.ray_cluster import RayCluster
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import inference_pb2_grpc
from tests.support.router.restored_logging import restored_logging


async def test_failed_ray_start_leaves_no_ledger_and_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = RayCluster(Config(model="fake", state_dir=tmp_path / "state"))
    scratch = tmp_path / "everlift-ray-1"

    def fail() -> None:
        assert cluster._ledger.pid
        scratch.mkdir()
        cluster._scratch = scratch
        raise ClusterFailed("no Ray")

    monkeypatch.setattr(cluster, "_start_ray", fail)
    monkeypatch.setattr(cluster, "_stop_ray", lambda: None)
    with pytest.raises(ClusterFailed, match="no Ray"):
        await cluster.start()
    assert (cluster._ledger.pid, scratch.exists()) == (0, False)


@pytest.fixture
def of_others() -> Iterator[None]:
    """Signal handler that makes an unhandled SIGTERM fail one test instead of ending the run."""

    def refuse(number: int, frame: object) -> None:
        raise AssertionError(number)

    before = signal.signal(signal.SIGTERM, refuse), signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGTERM, before[0])
    signal.signal(signal.SIGINT, before[1])


@pytest.mark.usefixtures("of_others")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_demo_ended_by_a_signal_leaves_no_directory(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Starting:
        def __init__(self, config: Config, **options: Any) -> None:
            self._state_dir = config.state_dir

        async def start(self) -> None:
            assert self._state_dir.parent == tmp_path
            os.kill(os.getpid(), number)
            await asyncio.Event().wait()

    monkeypatch.setattr(demo, "ProcessCluster", Starting)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with restored_logging():
        result = CliRunner().invoke(
            app, ["demo", "--model", "demo", "--no-ray", "--picture", str(tmp_path / "x.png")]
        )
    assert isinstance(result.exception, SystemExit) and result.exit_code == 1
    assert not list(tmp_path.iterdir())


class Refusing(inference_pb2_grpc.InferenceServicer):
    """Server that answers ``capacity`` requests with two tokens and rejects all others."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity

    async def Generate(
        self,
        request: pb.GenerateRequest,
        context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse],
    ) -> AsyncIterator[pb.GenerateResponse]:
        self._capacity -= 1
        if self._capacity < 0:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no capacity left")
        yield pb.GenerateResponse(
            request_id="r", token_ids=[1, 2], finish_reason=pb.FINISH_REASON_STOP
        )

    async def GetRequest(self, request: pb.GetRequestRequest, context: object) -> Any:
        assert request.request_id == "r"
        return pb.GetRequestResponse(output_tokens=2)


@pytest.mark.parametrize("capacity", [0, 1, 2])
async def test_demo_load_counts_rejected_requests_as_not_completed(capacity: int) -> None:
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(Refusing(capacity), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    load = Load(f"127.0.0.1:{port}", counting_tasks(3, 1))
    try:
        await load.run()
    finally:
        await server.stop(None)
    summary = load.summary()
    assert (summary["requests"], summary["completed"]) == (3, capacity)
    assert (summary["output_tokens"], summary["tokens_lost"]) == (2 * capacity, 0)
    assert (summary["ttft_ms"]["p50"] is None) == (capacity == 0)
    assert describe(summary).row_count == 9
