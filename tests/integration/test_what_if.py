"""What a request would have taken under another policy, asked of a cluster and its ledger."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cluster.config import Config, load
from cluster.errors import ForecastFailed
from cluster.explain import replayed
from cluster.explain.simulator import ProcessSimulator
from cluster.forecast import history
from cluster.forecast import surroundings as around
from cluster.forecast.history import surroundings
from cluster.processes import ProcessCluster
from everlift.client import AsyncClient
from everlift.errors import LedgerUnavailable, UnknownRequest
from everlift.v1 import admin_pb2
from router.config import RouterConfig
from router.gateway.what_if import Question
from router.ledger.config import LedgerConfig
from tests.http_client import get
from tests.in_process import Cluster, cluster, receive, until
from tests.made_up_simulator import MadeUpSimulator

PROMPT = [5, 6, 7]


async def ask(parts: Cluster, *names: str) -> None:
    """All at once."""
    async with AsyncClient(parts.address) as client:
        await asyncio.gather(*(receive(client, PROMPT, 30, request_id=name) for name in names))


async def test_around_a_request_is_who_was_there_with_it() -> None:
    async with cluster(workers=1) as parts:
        await ask(parts, "before")
        await ask(parts, "r", "beside")
        there = await surroundings(parts.ledger, "r")
        names = {past.request_id for past in there.requests}
        assert {"r", "beside"} <= names
        own = there.requests[there.own]
        assert own.request_id == "r"
        assert 0 < own.worker_s < own.total_s and own.other_s > 0
        assert own.queued_s + own.way_s + own.worker_s + own.other_s == pytest.approx(own.total_s)
        assert min(arrival.at for arrival in there.arrivals) == 0.0
        assert len(there.arrivals) == len(there.choices) == len(names)


async def test_the_last_moment_without_anybody_is_where_it_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(around, "_ENOUGH", 2)
    async with cluster(workers=1) as parts:
        for names in (("a",), ("b",), ("c", "d"), ("r",)):
            await ask(parts, *names)
        there = await surroundings(parts.ledger, "r")
        assert {past.request_id for past in there.requests} == {"c", "d", "r"}
        monkeypatch.setattr(history, "_MOST", 0)
        with pytest.raises(ForecastFailed, match="more than 0 requests"):
            await surroundings(parts.ledger, "r")


async def test_only_what_finished_has_something_to_compare_with() -> None:
    async with cluster(workers=1) as parts:
        with pytest.raises(UnknownRequest):
            await surroundings(parts.ledger, "r")
        [held] = parts.hold()
        going = asyncio.create_task(ask(parts, "r"))
        while not held.num_requests:
            await asyncio.sleep(0.01)
        with pytest.raises(ForecastFailed, match="it is running: only what finished"):
            await surroundings(parts.ledger, "r")
        held.release()
        await going


async def test_of_many_tokens_workers_of_any_policy_are_simulated_in_a_few_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """These know one policy."""
    monkeypatch.setattr(replayed, "_MAX_EXACT_TOKENS", 0)
    kind = admin_pb2.WorkerKind(
        workers=1,
        num_blocks=100,
        max_model_len=1024,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        step_time=admin_pb2.StepTimeModel(overhead_s=0.01),
        engine_policy="static",
    )
    async with cluster(workers=1) as parts:
        await ask(parts, "r")
        question = Question("r", {"fifo": RouterConfig()}, [kind])
        estimates = await replayed.estimated(parts.ledger, question)
    assert estimates.num_requests == 1 and estimates.seconds["fifo"] > 0


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Two at a time, and steps that take a while."""
    settings = (
        *("model=fake", "worker.fake.step_time=0.003", "worker.max_num_seqs=2"),
        *("router.port=0", "router.http_port=0", "router.drain=0.2"),
    )
    return load(None, {}, [*settings, f"state_dir={tmp_path}"])


async def learn(client: AsyncClient) -> None:
    """Of steps, so much that they can be simulated."""
    while not any(kind.HasField("step_time") for kind in (await client.capacity()).kinds):
        names = [f"r{number}" for number in range(12)]
        await asyncio.gather(*(receive(client, PROMPT, 30, request_id=name) for name in names))
        for name in names[:-1]:
            await client.forget(name)


async def test_a_cluster_estimates_it_in_a_process_of_its_own(config: Config) -> None:
    async with ProcessCluster(config) as parts, AsyncClient(parts.address) as client:
        await learn(client)
        told = (
            await client.explain("r11", what_if=["shortest patience=3", "fifo"])
        ).counterfactuals
        assert [(it.policy, it.actual) for it in told] == [
            ("fifo", True),
            ("shortest patience=3", False),
        ]
        for it in told:
            assert it.seconds > 0 and it.error >= 0 and it.requests > 0 and not it.cause


async def test_it_is_asked_for_over_http() -> None:
    async with cluster(1, 1, simulator=MadeUpSimulator()) as parts:
        await ask(parts, "r")
        address, path = parts.routers[0].http_address, "/v1/requests/r/explanation"
        plain = await get(address, path)
        assert plain.json["counterfactuals"] == []
        answer = await get(address, f"{path}?what_if=hrrn,fifo&what_if=deadline")
        others = {"error": 0.183, "requests": 1234}
        assert answer.json["counterfactuals"] == [
            {"policy": "fifo", "actual": True, "seconds": 1.5, "cause": "", **others},
            {"policy": "hrrn", "actual": False, "seconds": 1.5, "cause": "", **others},
            {
                "policy": "deadline",
                "actual": False,
                "cause": "by estimate it would not have come to its end",
                **others,
            },
        ]
        refused = await get(address, f"{path}?what_if=lifo")
        assert (refused.status, refused.error[0]) == (400, "invalid_request")


async def test_who_goes_is_simulated_for_no_more() -> None:
    simulator = MadeUpSimulator()
    simulator.may_answer.clear()
    async with cluster(1, 1, simulator=simulator) as parts:
        await ask(parts, "r")
        path = "/v1/requests/r/explanation?what_if=hrrn"
        asking = asyncio.create_task(get(parts.routers[0].http_address, path))
        await until(lambda: simulator.running)
        asking.cancel()
        await until(lambda: not simulator.running)


async def test_a_simulation_that_is_given_up_leaves_no_process() -> None:
    """As conftest.py sees."""
    away = LedgerConfig(url="redis://127.0.0.1:1/0", timeout=60.0)
    question = Question("r", {"fifo": RouterConfig(model="fake")}, [])
    simulator = ProcessSimulator(away)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await simulator.estimates(question)


async def test_what_ends_a_simulation_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By it, and by nothing that lies where the router runs."""
    (tmp_path / "cluster.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    away = LedgerConfig(url="redis://127.0.0.1:1/0", timeout=0.1)
    question = Question("r", {"fifo": RouterConfig(model="fake")}, [])
    with pytest.raises(LedgerUnavailable):
        await ProcessSimulator(away).estimates(question)
