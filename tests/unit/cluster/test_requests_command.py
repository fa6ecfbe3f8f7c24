"""``everlift requests`` against a router that pages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner, Result

from cluster.cli import app
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import inference_pb2_grpc
from tests.support.router.restored_logging import restored_logging


class Listing(inference_pb2_grpc.InferenceServicer):
    """Listing of five requests, two per page; the first page is empty."""

    def __init__(self) -> None:
        self.asked: list[pb.ListRequestsRequest] = []

    async def GetStatus(self, request: object, context: object) -> pb.GetStatusResponse:
        return pb.GetStatusResponse()

    async def ListRequests(
        self, request: pb.ListRequestsRequest, context: object
    ) -> pb.ListRequestsResponse:
        self.asked.append(request)
        if not request.page_token:
            return pb.ListRequestsResponse(next_page_token="0")
        start = int(request.page_token)
        stop = min(start + 2, start + request.page_size, 5)
        found = [
            pb.RequestSummary(
                request_id=f"r{number}",
                state=pb.REQUEST_STATE_FAILED,
                arrived=1e9,
                attempts=2,
                output_tokens=30,
                error_slug="no_worker",
            )
            for number in range(start, stop)
        ]
        more = str(stop) if stop < 5 else ""
        return pb.ListRequestsResponse(requests=found, next_page_token=more)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with restored_logging():
        yield


@pytest.fixture
async def listing(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Listing]:
    server, listing = grpc.aio.server(), Listing()
    inference_pb2_grpc.add_InferenceServicer_to_server(listing, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    monkeypatch.setenv("EVERLIFT_ADDRESS", f"127.0.0.1:{port}")
    yield listing
    await server.stop(None)


async def run(*arguments: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, ["requests", *arguments])


async def test_requests_command_joins_pages_in_one_table(listing: Listing) -> None:
    result = await run()
    assert result.exit_code == 0, result.output
    for number in range(5):
        assert f"r{number}" in result.stdout
    assert [it.page_size for it in listing.asked] == [100, 100, 98, 96]
    assert not listing.asked[0].HasField("tenant")


async def test_requests_command_prints_one_json_line_per_request(listing: Listing) -> None:
    result = await run("--json", "--limit", "3", "--tenant", "", "--state", "failed")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert lines[0] == {
        "request_id": "r0",
        "state": "failed",
        "arrived": 1e9,
        "attempts": 2,
        "output_tokens": 30,
        "error_slug": "no_worker",
    }
    assert [line["request_id"] for line in lines] == ["r0", "r1", "r2"]
    assert listing.asked[0].tenant == "" and listing.asked[0].HasField("tenant")
    assert list(listing.asked[0].states) == [pb.REQUEST_STATE_FAILED]


async def test_requests_command_rejects_an_unknown_state(listing: Listing) -> None:
    result = await run("--state", "lost")
    assert result.exit_code == 1
    assert "--state must be one of queued, running," in result.stderr
