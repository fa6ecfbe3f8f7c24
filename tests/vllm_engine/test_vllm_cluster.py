"""Cluster whose workers run vLLM, in an environment of its own.

Run by make test-vllm, which names the interpreter of that environment in EVERLIFT_VLLM_PYTHON.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.config import Config
from cluster.llm.completion import gather
from everlift.client.client import AsyncClient
from everlift.errors import EverliftError, InvalidRequest
from everlift.v1 import inference_pb2 as pb
from router.config import RouterConfig
from tests.chaos.support import ROUTER, Cluster, resident, running
from tests.support.router.http_client import ask, get
from tests.support.worker.grammar_support import DEMO_MODEL
from tests.support.worker.lora_files import write_adapter
from tests.vllm_engine.support import PYTHON, Result, generate, is_running, vllm_processes
from worker.config import WorkerConfig

pytestmark = pytest.mark.skipif(not PYTHON, reason="run by make test-vllm")

_REQUESTS, _KILLS, _ADAPTER_KILLS = 64, 10, 3
#: Memory and start time of a cluster with one worker of each engine, on the demo model.
REPORT = Path("build/bench/vllm_worker.json")


def config(tmp_path: Path, adapters: tuple[str, ...] = (), **worker: Any) -> Config:
    fields = {"max_num_seqs": 16, "num_blocks": 1024, "num_threads": 1, **worker}
    return Config(
        model=str(DEMO_MODEL),
        adapters=adapters,
        num_workers=2,
        state_dir=tmp_path / "state",
        router=RouterConfig(**ROUTER | {"model": str(DEMO_MODEL)}),
        worker=WorkerConfig(
            model=str(DEMO_MODEL), engine="vllm", python=PYTHON, dtype="float32", **fields
        ),
    )


async def results(
    cluster: Cluster, count: int = _REQUESTS, models: tuple[str, ...] = ("",)
) -> list[Result]:
    async with AsyncClient(*cluster.addresses) as client:
        each = (generate(client, number, models) for number in range(count))
        return await asyncio.gather(*each)


async def test_killed_workers_lose_and_change_no_token(tmp_path: Path) -> None:
    async with running(config(tmp_path)) as cluster:
        undisturbed = await results(cluster)
        for kill in range(_KILLS):
            disturbed = asyncio.create_task(results(cluster))
            await asyncio.sleep(0.5)
            assert not disturbed.done()
            await cluster.kill_worker(kill % 2)
            assert await disturbed == undisturbed
            await cluster.restart_worker(kill % 2)


async def test_killed_workers_keep_adapters_apart(tmp_path: Path) -> None:
    for seed, name in enumerate(("a", "b")):
        write_adapter(tmp_path / name, DEMO_MODEL, seed=seed, rank=4 + seed)
    models, adapters = ("", "a", "b"), tuple(f"{name}={tmp_path / name}" for name in ("a", "b"))
    async with running(config(tmp_path, adapters)) as cluster:
        undisturbed = await results(cluster, models=models)
        async with AsyncClient(*cluster.addresses) as client:
            alike = [await generate(client, 1, (model,)) for model in models]
        assert len({*alike}) == len(models)
        for kill in range(_ADAPTER_KILLS):
            disturbed = asyncio.create_task(results(cluster, models=models))
            await asyncio.sleep(0.5)
            assert not disturbed.done()
            await cluster.kill_worker(kill % 2)
            assert await disturbed == undisturbed
            await cluster.restart_worker(kill % 2)


async def test_drained_worker_returns_its_sequences(tmp_path: Path) -> None:
    async with running(config(tmp_path)) as cluster:
        undisturbed = await results(cluster)
        disturbed = asyncio.create_task(results(cluster))
        await asyncio.sleep(0.5)
        assert not disturbed.done()
        async with AsyncClient(*cluster.addresses) as client:
            status = await client.status()
            await client.drain(status.workers[0].worker_id)
            assert await disturbed == undisturbed


@pytest.mark.parametrize("victim", ["rank", "process of vLLM"])
async def test_tensor_parallel_worker_ends_as_a_whole(tmp_path: Path, victim: str) -> None:
    async with running(config(tmp_path, tensor_parallel=2)) as cluster:
        undisturbed = await results(cluster, 8)
        disturbed = asyncio.create_task(results(cluster, 8))
        await asyncio.sleep(0.5)
        assert not disturbed.done()
        [rank] = cluster.workers[0].pids
        processes = vllm_processes(rank)
        assert len(processes) == 2
        os.kill(rank if victim == "rank" else processes[1], signal.SIGKILL)
        assert await disturbed == undisturbed
        await _ended(rank, *processes)


async def test_idle_worker_ends_with_a_process_of_vllm(tmp_path: Path) -> None:
    async with running(config(tmp_path, tensor_parallel=2)) as cluster:
        [rank] = cluster.workers[0].pids
        processes = vllm_processes(rank)
        os.kill(processes[0], signal.SIGKILL)
        await _ended(rank, *processes)


async def _ended(*pids: int) -> None:
    """Wait until the processes have ended; fail after 20 seconds."""
    deadline = time.monotonic() + 20
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, f"still running: {left}"
        await asyncio.sleep(0.1)


async def test_structured_output_survives_hostile_grammars(tmp_path: Path) -> None:
    schema = '{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}'
    async with running(config(tmp_path)) as cluster, AsyncClient(*cluster.addresses) as client:
        others = asyncio.create_task(results(cluster))
        good = await gather(client.generate("x", max_tokens=60, temperature=0, json_schema=schema))
        assert json.loads(good.choices[0].text)["a"] in (1, 2)
        with pytest.raises(InvalidRequest):
            await gather(client.generate("x", max_tokens=9, regex="("))
        # These are refused or answered, depending on the compiler of grammars.
        for hostile in ("(a{1,9999}){1,9999}", "a{1,99999999}", "(a|aa)*" * 999):
            with suppress(EverliftError):
                await gather(client.generate("x", max_tokens=9, regex=hostile))
        with pytest.raises(InvalidRequest):
            await gather(client.generate([1 << 20], max_tokens=9))
        assert len(await others) == _REQUESTS
        assert len((await client.status()).workers) == 2


async def test_preempted_sequences_resume_at_another_worker(tmp_path: Path) -> None:
    settings = config(tmp_path, max_model_len=512)
    # Worker 0 lacks blocks for the outputs of its sequences.
    async with (
        running(settings, {0: {"num_blocks": 20}}) as cluster,
        AsyncClient(*cluster.addresses) as client,
    ):
        moved = await results(cluster)
        status = await client.status()
        assert status.preempted > 0
        assert status.moved > 0
        alone = [await generate(client, number) for number in range(0, _REQUESTS, 8)]
    assert moved[::8] == alone


#: Fields of a completion, each of which no worker may fail on.
HOSTILE: dict[str, dict[str, Any]] = {
    "regex": {"guided_regex": "("},
    "large regex": {"guided_regex": "(a{1,9999}){1,9999}"},
    "grammar": {"guided_grammar": "root ::= missing"},
    "JSON schema": {"guided_json": {"type": "no type"}},
    "deep JSON schema": {
        "guided_json": json.loads('{"items": ' * 200 + '{"type": "null"}' + "}" * 200)
    },
    "stop strings": {"stop": [f"stop {number}" for number in range(100_000)]},
    "long stop string": {"stop": "x" * 1_000_000},
    "stop tokens": {"stop_token_ids": [*range(-5, 100_000)]},
    "biases": {"logit_bias": {str(token): 1e308 for token in range(100_000)}},
    "unknown bias": {"logit_bias": {"99999999": 1}},
    "tokens": {"prompt": [-1, 1 << 40]},
    "long prompt": {"prompt": [5] * 100_000},
    "length": {"max_tokens": 1 << 60},
    "minimum": {"min_tokens": 1 << 30},
    "seed": {"seed": -(1 << 63)},
    "large seed": {"seed": 1 << 200},
    "temperature": {"temperature": 1e308},
    "penalty": {"frequency_penalty": -1e9},
    "top_k": {"top_k": 1 << 62},
    "log probabilities": {"logprobs": 1 << 30},
    "choices": {"n": 1 << 20},
    "bad words": {"bad_words": ["a b c"] * 10_000},
}
BROKEN = [b"\xff\xfe{", b'{"prompt": "\xc3\x28", "max_tokens": 4}', b"[" * 100_000, b"null"]
GOOD: dict[str, Any] = {"prompt": "x", "max_tokens": 24, "temperature": 0}


async def test_hostile_http_requests_leave_the_workers_alive(tmp_path: Path) -> None:
    async with running(config(tmp_path)) as cluster:
        address, pids = cluster.routers[0].http_address, [it.pids for it in cluster.workers]
        path = "/v1/completions"
        good = (await ask(address, path, GOOD)).json["choices"]
        for name, fields in HOSTILE.items():
            answer = await ask(address, path, {"prompt": "x", "max_tokens": 4, **fields})
            assert answer.status in (200, 400, 413, 422), (name, answer.status, answer.body)
        for body in BROKEN:
            assert 400 <= (await ask(address, path, body)).status < 500, body
        assert (await ask(address, path, GOOD)).json["choices"] == good
        assert [it.pids for it in cluster.workers] == pids


async def test_explanation_and_metrics_cover_a_request(tmp_path: Path) -> None:
    settings = replace(config(tmp_path), num_workers=1)
    async with running(settings) as cluster, AsyncClient(*cluster.addresses) as client:
        stream = client.generate("count from 1 to 400:", max_tokens=100, ignore_eos=True)
        began = time.monotonic()
        completion = await gather(stream)
        wall_s = time.monotonic() - began
        explanation = await client.explain(completion.request_id)
        [worker] = (await client.status()).workers
        metrics = (await get(cluster.metrics_addresses[0], "/metrics")).body.decode()
    spans = {span.kind: span.seconds for span in explanation.spans}
    assert sum(span.seconds for span in explanation.spans) == pytest.approx(explanation.total_s)
    assert explanation.total_s <= wall_s
    assert spans[pb.SPAN_KIND_DECODE] > 0 < spans[pb.SPAN_KIND_PREFILL]
    [attempt] = explanation.attempts
    assert (attempt.worker_id, attempt.new_tokens) == (worker.worker_id, 100)
    assert attempt.steps >= 100
    assert (worker.output_tokens, worker.blocks_used) == (100, 0)
    assert "everlift_output_tokens_total" in metrics


async def test_memory_and_start_time_are_reported(tmp_path: Path) -> None:
    figures: dict[str, float] = {}
    whole = replace(config(tmp_path), num_workers=1)
    own = replace(whole, worker=replace(whole.worker, engine="everlift", python=""))
    for name, settings in {"vllm": whole, "everlift": own}.items():
        began = time.monotonic()
        async with running(settings) as cluster, AsyncClient(*cluster.addresses) as client:
            figures[f"{name}_start_s"] = time.monotonic() - began
            await generate(client, 1)
            memory = sum(resident(pid) for pid in cluster.workers[0].pids)
            figures[f"{name}_worker_mib"] = memory / (1 << 20)
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    REPORT.write_text(json.dumps({"figures": figures}, indent=2) + "\n")
    print(f"\n{REPORT}: {json.dumps(figures, indent=2)}")
    assert figures["vllm_worker_mib"] < 4096
