"""Killed, frozen, slow and failing worker processes."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from cluster.config import DEMO_MODEL, Config
from everlift.client.client import AsyncClient
from everlift.errors import AttemptsExhausted, EverliftError, InvalidRequest
from everlift.v1 import inference_pb2 as pb
from router.config import RouterConfig
from tests.chaos.support import Cluster, Load, config, paused, report, running, until
from tests.support import in_process
from tests.support.router import retrying
from worker.config import FakeModel, WorkerConfig
from worker.engine.plan import Plan, RowResult
from worker.runner.fake_runner import FakeRunner
from worker.serving.rank import Rank


@pytest.mark.long
@pytest.mark.parametrize(
    "tokens_before",
    [pytest.param(0, marks=pytest.mark.long), 30, pytest.param(200, marks=pytest.mark.long)],
)
async def test_killed_worker_streams_continue_elsewhere(tmp_path: Path, tokens_before: int) -> None:
    """The worker is killed during the prefill (0), in the middle, or near the end of outputs."""
    fake = FakeModel(step_time=0.008, token_time=0.0 if tokens_before else 0.0003)
    async with (
        running(config(tmp_path, fake=fake)) as cluster,
        Load(
            cluster.addresses, 24, seed=tokens_before, fake=fake, max_tokens=300, plain=True
        ) as load,
    ):
        await started(cluster, load, tokens_before)
        since = time.time()
        await cluster.kill_worker(0)
        await load.finish()
        load.check()
        assert load.moved
        report(f"worker killed after {tokens_before} tokens", cluster, load, since)
        await cluster.idle()


async def started(cluster: Cluster, load: Load, tokens: int) -> None:
    """Wait until half of all streams have ``tokens`` tokens; if 0, until worker 0 has a request."""
    if tokens:
        await load.until(tokens)
    else:
        victim = cluster.workers[0].worker_id
        await until(lambda: victim in {event.get("worker_id") for event in dispatches(cluster)})


def dispatches(cluster: Cluster) -> list[dict[str, Any]]:
    return [event for event in cluster.events() if event["event"] == "dispatched"]


@pytest.mark.long
async def test_resumed_worker_is_fenced(tmp_path: Path) -> None:
    """Late frames of migrated requests change nothing, and the worker's blocks become free."""
    fake = FakeModel(step_time=0.01)
    async with (
        running(config(tmp_path, fake=fake, router={"worker_silence": 1.0})) as cluster,
        Load(cluster.addresses, 24, fake=fake, max_tokens=300, plain=True) as load,
    ):
        await load.until(20)
        frozen = cluster.workers[0].worker_id
        on_it = {s.request_id for s in load.streams} & await requests_at(cluster, frozen, load)
        since = time.time()
        with paused(cluster.workers[0].pids):
            await until(lambda: len(gone_on(load, since)) >= len(on_it))
        await load.finish()
        load.check()
        report("worker frozen", cluster, load, since)
        await until(lambda: is_alive(cluster, frozen))
        await cluster.idle()
        async with retrying.client(cluster.address) as client:
            for stream in load.moved:
                known = await client.get_request(stream.request_id)
                assert (known.state, known.attempts) == (pb.REQUEST_STATE_FINISHED, 2)
                assert known.output_tokens == 300
        assert (await cluster.status()).false_alarms == 1


def gone_on(load: Load, since: float) -> list[str]:
    return [s.request_id for s in load.streams if s.next_token(since) is not None]


async def requests_at(cluster: Cluster, worker_id: str, load: Load) -> set[str]:
    async with retrying.client(cluster.address) as client:
        known = await asyncio.gather(*(client.get_request(s.request_id) for s in load.streams))
    return {k.request_id for k in known if k.worker_id == worker_id}


async def is_alive(cluster: Cluster, worker_id: str) -> bool:
    workers = (await cluster.status()).workers
    return any(w.worker_id == worker_id and w.alive for w in workers)


@pytest.mark.long
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)]
)
async def test_worker_with_lost_rank_ends_and_streams_migrate(
    tmp_path: Path, number: signal.Signals
) -> None:
    fake = FakeModel(step_time=0.01)
    settings = config(tmp_path, tensor_parallel=2, step_timeout=0.8, fake=fake)
    async with (
        running(settings) as cluster,
        Load(cluster.addresses, 16, fake=fake, max_tokens=500, plain=True) as load,
    ):
        await load.until(20)
        since = time.time()
        first, second = cluster.workers[0].pids
        os.kill(second, number)
        await load.finish()
        load.check()
        assert load.moved
        await until(lambda: not is_running(first))
        report(f"rank 1 got {number.name}", cluster, load, since)
        # A stopped rank does not notice that its worker has ended.
        await cluster.kill_worker(0)
        await cluster.idle()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.long
async def test_slow_worker_gets_no_request_while_others_have_room(tmp_path: Path) -> None:
    # On a busy machine, steps of the other workers may also take ten times as long.
    slow = {1: {"fake": FakeModel(step_time=0.25)}}
    async with running(config(tmp_path), slow) as cluster:
        async with Load(cluster.addresses, 8, seed=1, max_tokens=12) as load:
            await load.finish()
        load.check()
        sluggard = cluster.workers[1].worker_id
        await until(lambda: is_slow(cluster, sluggard))
        before = await tokens_of(cluster, sluggard)
        async with Load(cluster.addresses, 16, seed=2, max_tokens=60) as load:
            await load.finish()
        load.check()
        assert await tokens_of(cluster, sluggard) == before


async def is_slow(cluster: Cluster, worker_id: str) -> bool:
    workers = (await cluster.status()).workers
    return any(w.worker_id == worker_id and w.slow for w in workers)


async def tokens_of(cluster: Cluster, worker_id: str) -> int:
    workers = (await cluster.status()).workers
    return next(w.output_tokens for w in workers if w.worker_id == worker_id)


@pytest.mark.long
async def test_request_that_kills_workers_fails_alone(
    tmp_path: Path,
) -> None:
    """Each worker is killed in the prefill of the same request, and only that request fails."""
    fake = FakeModel(step_time=0.004, token_time=0.0005, max_model_len=32_768)
    settings = config(tmp_path, workers=2, fake=fake)
    async with running(settings) as cluster, retrying.client(cluster.address) as client:
        async with Load(cluster.addresses, 12, fake=fake, max_tokens=300) as load:
            await load.until(5, part=1.0)
            # The prefill takes 12 s, which is long enough to notice it and kill the worker.
            poison = client.generate([6] * 24_000, request_id="poison", max_tokens=1)
            eaten = asyncio.create_task(poison.text())
            for _ in range(settings.router.max_losses):
                await kill_in_prefill(cluster, client, "poison")
            with pytest.raises(AttemptsExhausted):
                await eaten
            await load.finish()
        load.check()
        known = await client.get_request("poison")
        assert (known.state, known.losses) == (pb.REQUEST_STATE_FAILED, 3)
        await cluster.idle()


async def kill_in_prefill(cluster: Cluster, client: AsyncClient, request_id: str) -> None:
    """Kill the worker that computes the request's prompt, and restart it."""

    async def is_prefilling() -> bool:
        worker_id = (await client.get_request(request_id)).worker_id
        explanation = await client.explain(request_id)
        spans, attempts = explanation.spans, explanation.attempts
        is_in_prefill = bool(spans) and spans[-1].kind == pb.SPAN_KIND_PREFILL
        is_current = bool(attempts) and attempts[-1].worker_id == worker_id
        return is_in_prefill and is_current and worker_id in alive_ids(cluster)

    await until(is_prefilling)
    worker_id = (await client.get_request(request_id)).worker_id
    index = next(i for i, w in enumerate(cluster.workers) if w.worker_id == worker_id)
    await cluster.restart_worker(index)


def alive_ids(cluster: Cluster) -> set[str]:
    return {w.worker_id for w in cluster.workers if w.is_running}


async def test_memory_shortage_preempts_sequences_and_loses_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step that runs out of memory preempts some of its sequences, and the worker survives."""
    compute = FakeRunner.execute

    def execute(runner: FakeRunner, plan: Plan) -> list[RowResult]:
        if len(plan.rows) > 3:
            raise MemoryError("no room for this step")
        return compute(runner, plan)

    monkeypatch.setattr(FakeRunner, "execute", execute)
    async with in_process.cluster(workers=1) as parts:
        async with Load([parts.address], 12, max_tokens=60, plain=True) as load:
            await load.finish()
        load.check()
        assert not load.moved
        preemptions = [stream.timing.preemptions for stream in load.streams if stream.timing]
        assert sum(preemptions) > 0


@pytest.mark.long
async def test_prompt_with_non_finite_logits_fails_alone(tmp_path: Path) -> None:
    """The checkpoint has a NaN embedding of one token, and the torch engine serves it."""
    poison = 300
    settings = Config(
        model=str(with_broken_token(tmp_path / "model", poison)),
        state_dir=tmp_path / "state",
        router=RouterConfig(port=0, http_port=0),
        worker=WorkerConfig(num_blocks=256, dtype="float32", num_threads=1),
    )
    prompts = [[n + 10, 20, 30] for n in range(4)]
    async with running(settings) as cluster, retrying.client(cluster.address) as client:
        alone = [await greedy(client, prompt) for prompt in prompts]
        neighbours = [asyncio.create_task(greedy(client, prompt)) for prompt in prompts]
        with pytest.raises(EverliftError, match="not finite") as caught:
            await greedy(client, [10, poison, 30])
        assert caught.value.grpc_status == "INTERNAL"
        assert [await task for task in neighbours] == alone
        # NaN keys and values in released blocks do not affect later requests.
        assert [await greedy(client, prompt) for prompt in prompts] == alone
        await cluster.idle()


def with_broken_token(directory: Path, token: int) -> Path:
    """Write the demo model with a NaN embedding of ``token`` and an intact, untied output layer."""
    shutil.copytree(DEMO_MODEL, directory)
    weights = load_file(directory / "model.safetensors")
    embeddings = weights["model.embed_tokens.weight"]
    weights["lm_head.weight"] = embeddings.clone()
    embeddings[token] = math.nan
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    config_file = directory / "config.json"
    facts = json.loads(config_file.read_text()) | {"tie_word_embeddings": False}
    config_file.write_text(json.dumps(facts))
    return directory


async def greedy(client: AsyncClient, prompt: list[int]) -> list[int]:
    stream = client.generate(prompt, max_tokens=40, temperature=0.0, ignore_eos=True)
    return [token async for chunk in stream for token in chunk.token_ids]


async def test_worker_with_other_model_is_rejected() -> None:
    async with in_process.cluster(workers=1) as parts, retrying.client(parts.address) as client:
        other = Rank(replace(in_process.WORKER, fake=FakeModel(eos_one_in=7)))
        try:
            with pytest.raises(InvalidRequest, match="fingerprint"):
                await parts.routers[0].announce(await other.start())
        finally:
            await other.stop()
        assert len((await client.status()).workers) == 1
