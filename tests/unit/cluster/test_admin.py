"""Calls of operators to a cluster, and the answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner, Result

from cluster.cli import app
from everlift import AsyncClient
from everlift.adapters import parse_adapters
from everlift.errors import InvalidRequest, LedgerUnavailable, UnknownWorker, Unreachable
from everlift.v1 import inference_pb2, inference_pb2_grpc, session_pb2
from router.api.adapters import Adapters
from router.api.grpc.admin_server import AdminServer
from router.auth.caller import OPEN
from router.config import RouterConfig
from router.leader.policy_store import RuntimePolicy
from router.ledger.base import LoadReport
from router.ledger.memory.memory import MemoryLedger
from router.requests.served_models import ServedModels
from router.requests.tokenizer import ServedModel
from tests.support.ledger.ledgers import Clock
from tests.support.router.restored_logging import restored_logging

GONE = "127.0.0.1:1"
CONFIG = RouterConfig(model="fake", max_queued=7)


@dataclass
class Link:
    info: session_pb2.WorkerInfo
    is_up: bool = True
    state: session_pb2.WorkerState = field(
        default_factory=lambda: session_pb2.WorkerState(num_running=3, blocks_used=10)
    )
    adapters: session_pb2.LoadedAdapters = field(default_factory=session_pb2.LoadedAdapters)

    async def check_adapter(self, source: str) -> session_pb2.CheckAdapterResponse:
        """Accept every path below /adapters."""
        if "=/adapters/" not in source:
            return session_pb2.CheckAdapterResponse(error=f"{source} lies elsewhere")
        return session_pb2.CheckAdapterResponse(source=source, digest="digest")

    def change_adapters(self, load: session_pb2.AdapterLoad | None, unload: Sequence[str]) -> None:
        kept = [it for it in self.adapters.adapters if it.digest not in unload]
        self.adapters = session_pb2.LoadedAdapters(adapters=kept)
        if load is not None:
            self.adapters.adapters.add(name=load.source.partition("=")[0], digest=load.digest)


@dataclass
class RecordedSessions:
    links: list[Link]
    drained: list[str] = field(default_factory=list)

    def drain(self, worker_id: str) -> int:
        self.drained.append(worker_id)
        return 3


class FailingLedger(MemoryLedger):
    """Ledger that can be unavailable."""

    is_away = False

    async def load(self) -> LoadReport | None:
        if self.is_away:
            raise LedgerUnavailable("away")
        return await super().load()


class Emptying(inference_pb2_grpc.InferenceServicer):
    """Status in which worker abc has one sequence fewer at each query."""

    def __init__(self, sessions: RecordedSessions) -> None:
        self._sessions = sessions
        self.left = 4

    async def GetStatus(self, request: object, context: object) -> inference_pb2.GetStatusResponse:
        self.left = max(self.left - 1, 0)
        worker = inference_pb2.WorkerStatus(
            worker_id="abc", alive=True, num_running=self.left, draining=self.left < 3
        )
        return inference_pb2.GetStatusResponse(workers=[worker])


@dataclass
class Router:
    address: str
    sessions: RecordedSessions
    status: Emptying
    ledger: FailingLedger
    clock: Clock


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    names = ["abc", "abd", "x"]
    sessions = RecordedSessions(
        [
            Link(
                session_pb2.WorkerInfo(
                    worker_id=name, model="fake", max_num_seqs=8, num_blocks=100, adapter_slots=2
                )
            )
            for name in names
        ]
    )
    sessions.links[2].is_up = False
    server, status = grpc.aio.server(), Emptying(sessions)
    clock = Clock()
    ledger = FailingLedger(clock)
    model = ServedModel.load("fake")
    model.set_adapters(parse_adapters(["given=org/given"]))
    models = ServedModels([model])
    runtime_policy = RuntimePolicy(CONFIG, ledger, (), (), [models])
    links: Any = sessions
    adapters = Adapters(models, runtime_policy, links)
    admin = AdminServer(
        links, runtime_policy, ledger, lambda _: None, adapters, models, lambda _: False
    )
    server.add_generic_rpc_handlers((admin.handlers(OPEN),))
    inference_pb2_grpc.add_InferenceServicer_to_server(status, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield Router(f"127.0.0.1:{port}", sessions, status, ledger, clock)
    await server.stop(None)


@pytest.fixture
async def operator(router: Router) -> AsyncIterator[AsyncClient]:
    async with AsyncClient([GONE, router.address]) as operator:
        yield operator


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with restored_logging():
        yield


async def test_drain_accepts_a_unique_id_prefix(router: Router, operator: AsyncClient) -> None:
    answer = await operator.drain("abc")
    assert (answer.worker_id, answer.num_running) == ("abc", 3)
    assert router.sessions.drained == ["abc"]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("ab", "the id 'ab' is ambiguous: it may be abc, abd"),
        ("x", "no worker with the id 'x' is connected"),
    ],
)
async def test_drain_rejects_unknown_and_ambiguous_workers(
    operator: AsyncClient, name: str, why: str
) -> None:
    with pytest.raises(UnknownWorker, match=why):
        await operator.drain(name)


async def test_drain_reports_unreachable_routers() -> None:
    async with AsyncClient([GONE], retry_s=0) as operator:
        with pytest.raises(Unreachable):
            await operator.drain("abc")


async def run(*arguments: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, arguments)


async def test_drain_command_waits_until_the_worker_is_empty(router: Router) -> None:
    result = await run("drain", "abc", "--wait", "--address", router.address)
    assert result.stdout == "abc is draining: it returns 3 sequences\nabc has no requests left\n"
    assert router.status.left == 0


async def test_drain_command_prints_the_error(router: Router) -> None:
    result = await run("drain", "ab", "--address", router.address)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "is ambiguous" in result.stderr


# adapters


async def test_adapter_commands_load_list_and_unload(router: Router) -> None:
    async def adapter(*options: str) -> str:
        result = await run("adapter", *options, "--address", router.address)
        return result.output

    given = f"{'given':<20} configured in memory of 0 workers  org/given\n"
    assert await adapter("list") == given
    assert await adapter("load", "sql=/adapters/sql") == "sql is served from /adapters/sql\n"
    loaded = f"{'sql':<20} loaded     in memory of 2 workers  /adapters/sql\n"
    assert await adapter("list") == given + loaded
    assert [*(await router.ledger.policy()).values] == ["adapter sql"]
    assert await adapter("unload", "sql") == "sql is not served any more\n"
    assert await adapter("list") == given
    for options, cause in (
        (("load", "sql=/etc"), "sql=/etc lies elsewhere"),
        (("load", "sql"), "NAME=SOURCE must be NAME=DIRECTORY"),
        (("load", "given=/adapters/x"), "belongs to a model or to an adapter of the settings"),
        (("load", "fake=/adapters/x"), "belongs to a model"),
        (("unload", "given"), "is in the settings of the cluster: remove it there"),
        (("unload", "none"), "no adapter 'none' is loaded"),
    ):
        assert cause in " ".join((await adapter(*options)).split())


async def test_new_version_of_an_adapter_unloads_the_old_one(
    router: Router, operator: AsyncClient
) -> None:
    await operator.load_adapter("sql", "/adapters/one")
    link = router.sessions.links[0]
    link.adapters.adapters.add(name="other", digest="other")
    link.adapters.adapters[0].digest = "older"
    await router.ledger.set_policy(
        {"adapter sql": '{"model": "fake", "source": "sql=/adapters/one", "digest": "older"}'}
    )
    await operator.load_adapter("y", "/adapters/y")  # the router reads the ledger
    await operator.load_adapter("sql", "/adapters/two")
    assert {it.digest for it in link.adapters.adapters} == {"other", "digest"}


# the policy of queue and engines


async def test_policy_command_sets_shows_and_resets_values(router: Router) -> None:
    async def policy(*options: str) -> str:
        result = await run("policy", *options, "--address", router.address)
        assert result.exit_code == 0, result.output
        return result.stdout

    configured = await policy()
    assert configured == (
        "order          fifo        configured\n"
        "max queued     7           configured\n"
        "queue ttl      0.0         configured\n"
        "refuse late    false       configured\n"
        "undated due    60.0        configured\n"
        "ageing factor  1.5         configured\n"
        "starvation     0.0         configured\n"
        "class floor    0.05        configured\n"
        "fair share     true        configured\n"
        "tpot target    0.0         configured\n"
        "engine policy  default     configured\n"
    )
    await policy("--order", "deadline", "--undated-due", "30")
    await policy("--queue-ttl", "2", "--refuse-late", "on", "--tpot-target", "0.05")
    await policy("--engine-policy", "continuous")
    changed = await policy("--max-queued", "500", "--fair-share", "off", "--class-floor", "0")
    assert changed == (
        "order          deadline    set\n"
        "max queued     500         set\n"
        "queue ttl      2.0         set\n"
        "refuse late    true        set\n"
        "undated due    30.0        set\n"
        "ageing factor  1.5         configured\n"
        "starvation     0.0         configured\n"
        "class floor    0.0         set\n"
        "fair share     false       set\n"
        "tpot target    0.05        set\n"
        "engine policy  continuous  set\n"
    )
    assert (await router.ledger.policy()).values["order"] == "deadline"
    assert await policy() == changed
    options = ("order", "undated-due", "max-queued", "fair-share", "class-floor")
    options += ("queue-ttl", "refuse-late", "tpot-target", "engine-policy")
    taken_back = [text for name in options for text in (f"--{name}", "default")]
    assert await policy(*taken_back) == configured


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"order": "lifo"}, "fifo, deadline, shortest, ranked, hrrn, attained, not 'lifo'"),
        ({"ageing_factor": -1.0}, "ageing_factor must be at least 0, not -1"),
        ({"engine_policy": "magnum"}, "not 'magnum'; did you mean magnus?"),
        ({"max_queued": 5, "reset": ["heartbeat"]}, "heartbeat: must be one of order, max_queued"),
    ],
)
async def test_set_policy_rejects_invalid_values(
    router: Router, operator: AsyncClient, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(InvalidRequest, match=why):
        await operator.set_policy(**changes)
    assert (await router.ledger.policy()).version == 0


@pytest.mark.parametrize(
    "option", ["--max-queued=-5", "--ageing-factor=long", "--order=lifo", "--engine-policy=lifo"]
)
async def test_policy_command_rejects_invalid_options_in_one_line(
    router: Router, option: str
) -> None:
    result = await run("policy", option, "--address", router.address)
    assert (result.exit_code, result.stdout) == (1, "")
    assert len(result.stderr.splitlines()) == 1


# capacity


async def lead(router: Router) -> None:
    """Store a load report of a leader."""
    await router.ledger.lead("leader", "here:1", 5, 60.0)
    load = session_pb2.ClusterLoad(
        term=5, queued=2, queued_tokens=900, worker_rate=150.0, wait_s=3.0
    )
    await router.ledger.put_load(load)


async def test_measure_running_needs_earlier_requests(router: Router, tmp_path: Path) -> None:
    file = tmp_path / "ours.json"
    result = await run("measure", str(file), "--running", "--address", router.address)
    assert (result.exit_code, file.exists()) == (1, False)
    assert "send some requests" in result.stderr


async def test_capacity_command_shows_workers_and_the_leaders_queue(router: Router) -> None:
    await lead(router)
    result = await run("capacity", "--json", "--address", router.address)
    answer = json.loads(result.stdout)
    (kind,) = answer.pop("kinds")
    assert (kind["workers"], kind["num_blocks"], "step_time" in kind) == (2, 100, False)
    assert answer == {
        "workers": 2,
        "slots": 16,
        "slots_used": 6,
        "blocks": 200,
        "blocks_used": 20,
        "tokens_per_s": 300.0,
        "queued": 2,
        "queued_tokens": 900,
        "wait_s": 3.0,
    }
    shown = await run("capacity", "--address", router.address)
    rows = [" ".join(line.split()) for line in shown.stdout.splitlines()]
    for row in (
        "workers 2",
        "sequences 6 16",
        "KV cache, tokens 640 6400",
        "throughput when full, tokens/s 300",
        "queued requests 2",
        "queued work, tokens 900",
        "wait in the queue, s 3.0",
    ):
        assert row in rows


async def test_capacity_without_a_ledger_shows_only_workers(router: Router) -> None:
    await lead(router)
    router.ledger.is_away = True
    answer = json.loads((await run("capacity", "--json", "--address", router.address)).stdout)
    assert (answer["slots"], answer["slots_used"], answer["queued"]) == (16, 6, 0)
    assert "wait_s" not in answer


async def test_capacity_ignores_stale_leader_figures(router: Router) -> None:
    await lead(router)
    router.clock.now += 10
    result = await run("capacity", "--json", "--address", router.address)
    answer = json.loads(result.stdout)
    assert (answer["slots"], answer["queued"]) == (16, 0)
    assert "wait_s" not in answer
    shown = await run("capacity", "--address", router.address)
    rows = [" ".join(line.split()) for line in shown.stdout.splitlines()]
    assert "throughput when full, tokens/s not known" in rows
    assert "wait in the queue, s not known" in rows
