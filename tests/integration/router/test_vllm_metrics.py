"""Metrics of a router under vLLM's names."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from everlift.client.client import AsyncClient
from everlift.errors import EverliftError
from everlift.hashes import BLOCK_SIZE, CHUNK_SIZE
from tests.support.in_process import ROUTER, cluster, receive, until
from tests.support.router.scrape import scraped

CONFIG = replace(ROUTER, vllm_metrics=True)
#: Metrics that vLLM's own Grafana dashboard queries.
DASHBOARD = """
    vllm:e2e_request_latency_seconds_bucket vllm:e2e_request_latency_seconds_sum
    vllm:e2e_request_latency_seconds_count vllm:prompt_tokens_total vllm:generation_tokens_total
    vllm:inter_token_latency_seconds_bucket vllm:inter_token_latency_seconds_sum
    vllm:inter_token_latency_seconds_count vllm:num_requests_running vllm:num_requests_waiting
    vllm:time_to_first_token_seconds_bucket vllm:time_to_first_token_seconds_sum
    vllm:time_to_first_token_seconds_count vllm:kv_cache_usage_perc
    vllm:request_prompt_tokens_bucket vllm:request_generation_tokens_bucket
    vllm:request_success_total vllm:request_queue_time_seconds_sum
    vllm:request_prefill_time_seconds_sum vllm:request_decode_time_seconds_sum
""".split()


#: A prompt that is long enough for dispatch by its cached prefix.
REPEATED = [*range(CHUNK_SIZE + 40)]


async def test_vllm_metrics_are_off_by_default() -> None:
    async with cluster(workers=0) as parts:
        assert not any(
            name.startswith("vllm")
            for name in (await scraped(parts.routers[0].metrics_address)).kinds
        )


async def test_vllm_metrics_match_everlift_metrics() -> None:
    async with cluster(router_config=CONFIG) as parts:
        async with AsyncClient(parts.address) as client:
            for _ in range(2):
                await receive(client, REPEATED, 5)
            await asyncio.gather(
                receive(client, [5, 6, 7], 20),
                receive(client, [8] * 70, 30, priority=1),
                receive(client, [9], 25, n=1),
            )
            stream = client.generate([3, 3, 3], max_tokens=4000, temperature=0.0)
            async for _ in stream:
                await client.cancel(stream.request_id)
                break
            with pytest.raises(EverliftError):
                async for _ in client.attach(stream.request_id):
                    pass
        samples = (await scraped(parts.routers[0].metrics_address)).samples
    names = {name for name, *_ in samples.by_labels}
    assert names >= set(DASHBOARD)
    labels = [set(key[1:]) for key in samples.by_labels if key[0].startswith("vllm:")]
    assert all("model_name=fake" in each for each in labels)
    pairs = {
        "vllm:time_to_first_token_seconds_count": "everlift_time_to_first_token_seconds_count",
        "vllm:inter_token_latency_seconds_count": "everlift_inter_token_latency_seconds_count",
        "vllm:inter_token_latency_seconds_sum": "everlift_inter_token_latency_seconds_sum",
        "vllm:e2e_request_latency_seconds_bucket": "everlift_request_latency_seconds_bucket",
        "vllm:request_generation_tokens_sum": "everlift_request_output_tokens_sum",
        "vllm:generation_tokens_total": "everlift_output_tokens_total",
        "vllm:prompt_tokens_total": "everlift_prompt_tokens_total",
        "vllm:prefix_cache_queries_total": "everlift_worker_prompt_tokens_total",
        "vllm:prefix_cache_hits_total": "everlift_worker_prefix_hit_tokens_total",
        "vllm:num_preemptions_total": "everlift_worker_preemptions_total",
    }
    for theirs, ours in pairs.items():
        assert samples.total(theirs) == pytest.approx(samples.total(ours)), theirs
    assert samples.total("vllm:prefix_cache_hits_total") == CHUNK_SIZE + BLOCK_SIZE
    assert samples.total("vllm:time_to_first_token_seconds_count") == 6
    assert samples.values("vllm:request_success_total", "finished_reason") == {
        "stop": 0,
        "length": 5,
        "abort": 1,
        "error": 0,
    }


async def test_vllm_metrics_report_running_and_waiting_per_engine() -> None:
    async with cluster(workers=1, router_config=CONFIG) as parts:
        [held], [worker] = parts.hold(), parts.workers
        async with AsyncClient(parts.address) as client:
            running = asyncio.create_task(receive(client, [5] * 40, 40))
            await until(lambda: held.num_requests)
            held.let(2)
            link = parts.routers[0]._sessions.links[0]
            await until(lambda: link.state.num_running == 1)
            samples = (await scraped(parts.routers[0].metrics_address)).samples
            held.release()
            await running
    assert samples.values("vllm:num_requests_running", "engine") == {worker.worker_id: 1}
    assert samples.values("vllm:num_requests_waiting", "engine") == {worker.worker_id: 0, "0": 0}
    assert samples.values("vllm:kv_cache_usage_perc", "engine") == {worker.worker_id: 2 / 256}
