"""What operators tell a cluster, and how they are answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner, Result

from cluster.cli import app
from cluster.operating import Operator, operating
from everlift.errors import UnknownWorker, Unreachable
from everlift.v1 import inference_pb2, inference_pb2_grpc, session_pb2
from router.gateway.admin_server import AdminServer
from router.gateway.door import OPEN
from tests.restored_logging import restored_logging

GONE = "127.0.0.1:1"


@dataclass
class Link:
    info: session_pb2.WorkerInfo
    is_up: bool = True


@dataclass
class RecordedSessions:
    links: list[Link]
    drained: list[str] = field(default_factory=list)

    def drain(self, worker_id: str) -> int:
        self.drained.append(worker_id)
        return 3


class Emptying(inference_pb2_grpc.InferenceServicer):
    """A status in which worker ab has fewer sequences each time that one looks."""

    def __init__(self, sessions: RecordedSessions) -> None:
        self._sessions = sessions
        self.left = 4

    async def GetStatus(self, request: object, context: object) -> inference_pb2.GetStatusResponse:
        self.left -= 1
        worker = inference_pb2.WorkerStatus(
            worker_id="abc", alive=True, num_running=self.left, draining=self.left < 3
        )
        return inference_pb2.GetStatusResponse(workers=[worker])


@dataclass
class Router:
    address: str
    sessions: RecordedSessions
    status: Emptying


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    names = ["abc", "abd", "x"]
    sessions = RecordedSessions([Link(session_pb2.WorkerInfo(worker_id=name)) for name in names])
    sessions.links[2].is_up = False
    server, status = grpc.aio.server(), Emptying(sessions)
    server.add_generic_rpc_handlers((AdminServer(sessions).handlers(OPEN),))  # type: ignore[arg-type]
    inference_pb2_grpc.add_InferenceServicer_to_server(status, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield Router(f"127.0.0.1:{port}", sessions, status)
    await server.stop(None)


@pytest.fixture
async def operator(router: Router) -> AsyncIterator[Operator]:
    async with operating([GONE, router.address]) as operator:
        yield operator


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with restored_logging():
        yield


async def test_a_worker_is_drained_by_a_beginning_of_its_id(
    router: Router, operator: Operator
) -> None:
    answer = await operator.drain("abc")
    assert (answer.worker_id, answer.num_running) == ("abc", 3)
    assert router.sessions.drained == ["abc"]


@pytest.mark.parametrize(("name", "why"), [("ab", "may mean abc, abd"), ("x", "no worker 'x'")])
async def test_one_that_is_not_known_or_not_the_only_one_is_told(
    operator: Operator, name: str, why: str
) -> None:
    with pytest.raises(UnknownWorker, match=why):
        await operator.drain(name)


async def test_where_no_router_answers_that_is_told() -> None:
    async with operating([GONE]) as operator:
        with pytest.raises(Unreachable):
            await operator.drain("abc")


async def run(*arguments: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, arguments)


async def test_the_command_waits_until_the_worker_has_nothing(router: Router) -> None:
    result = await run("drain", "abc", "--wait", "--address", router.address)
    assert result.stdout == "abc hands back 3 sequences\nabc is empty\n"
    assert router.status.left == 0


async def test_the_command_says_what_went_wrong(router: Router) -> None:
    result = await run("drain", "ab", "--address", router.address)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "may mean" in result.stderr
