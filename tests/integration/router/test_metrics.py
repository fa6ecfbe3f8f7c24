"""Metrics of a router and of its cluster over HTTP."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from everlift.client.client import AsyncClient
from everlift.errors import EverliftError, PromptTooLong, QueueFull
from everlift.v1.inference_pb2 import Usage
from router.observability.metrics import http_server
from router.observability.metrics.catalogue import (
    CATALOGUE,
    LEDGER_OPERATIONS,
    OUTCOMES,
    STEP_PARTS,
    Metric,
)
from tests.support.in_process import (
    LONG_LEASE,
    ROUTER,
    Cluster,
    cluster,
    paced_cluster,
    receive,
    until,
)
from tests.support.router.keyring import Keyring
from tests.support.router.scrape import PLAIN, Samples, fetch, scraped

#: Metrics without samples in this cluster, by what it lacks.
WITHOUT = {
    "everlift_worker_gpu_utilization_ratio": "a GPU",
    "everlift_worker_predicted_step_seconds": "enough steps",
    "everlift_worker_step_prediction_error_ratio": "enough steps",
    "everlift_predictor_tau": "a predictor",
    "everlift_predictor_coverage_ratio": "a predictor",
    "everlift_tenant_prompt_tokens_total": "tenants",
    "everlift_tenant_prefix_hit_tokens_total": "tenants",
}
LABEL_VALUES = {
    "outcome": set(OUTCOMES),
    "operation": set(LEDGER_OPERATIONS),
    "part": set(STEP_PARTS),
    "reason": {"stop", "length"},
    "state": {"used", "cached", "free"},
    "direction": {"in", "out"},
    "priority": {str(priority) for priority in range(-10, 11)},
}


async def served(parts: Cluster) -> list[list[int]]:
    """Return the tokens of three completed requests; run a rejected and a cancelled one, too."""
    async with AsyncClient(parts.address) as client:
        answers = await asyncio.gather(
            receive(client, [5, 6, 7], 20),
            receive(client, [8, 9], 30, priority=2),
            receive(client, [1] * 70, 10, n=1),
        )
        with pytest.raises(PromptTooLong):
            await receive(client, [1] * 100_000, 1)
        await cancelled(client)
    return [answer.tokens for answer in answers]


async def cancelled(client: AsyncClient) -> None:
    stream = client.generate([3, 3, 3], max_tokens=4000, temperature=0.0)
    async for _ in stream:
        await client.cancel(stream.request_id)
        break
    with pytest.raises(EverliftError):
        async for _ in client.attach(stream.request_id):
            pass


@pytest.mark.parametrize("accept", ["text/plain", "application/openmetrics-text; version=1.0.0"])
async def test_metrics_match_catalogue(accept: str) -> None:
    async with cluster() as parts:
        await served(parts)
        families = await scraped(parts.routers[0].metrics_address, accept)
    assert families.kinds == {family_name(metric): metric.kind for metric in CATALOGUE.values()}
    for metric in CATALOGUE.values():
        labels = families.labels(metric.name)
        assert bool(labels) == (metric.name not in WITHOUT), metric.name
        assert all(set(each) == set(metric.labels) for each in labels), metric.name
        for name, value in (pair for each in labels for pair in each.items()):
            assert value in LABEL_VALUES.get(name, {value}), metric.name


def family_name(metric: Metric) -> str:
    return metric.name.removesuffix("_total")


async def test_metrics_count_each_request_once() -> None:
    async with cluster() as parts:
        answers = await served(parts)
        samples = (await scraped(parts.routers[0].metrics_address)).samples
        workers = {rank.worker_id for rank in parts.workers}
    num_tokens = sum(map(len, answers))
    assert samples["everlift_requests_total", "outcome=ok"] == 3
    assert samples["everlift_requests_total", "outcome=prompt_too_long"] == 1
    assert samples["everlift_requests_total", "outcome=cancelled"] == 1
    assert samples.total("everlift_requests_total") == 5
    assert samples["everlift_requests_accepted_total",] == 4
    assert samples["everlift_choices_finished_total", "reason=length"] == 3
    assert samples["everlift_requests_in_flight",] == 0
    assert samples["everlift_prompt_tokens_total",] == 3 + 2 + 70 + 3
    assert samples["everlift_output_tokens_total",] >= num_tokens
    assert samples.total("everlift_request_output_tokens_sum") == num_tokens
    assert samples.total("everlift_request_prompt_tokens_sum") == 3 + 2 + 70
    for name in ("request_latency_seconds", "decode_seconds"):
        assert samples[f"everlift_{name}_count", "priority=0"] == 2
        assert samples[f"everlift_{name}_count", "priority=2"] == 1
    for name in ("time_to_first_token_seconds", "queue_wait_seconds", "prefill_seconds"):
        assert samples.total(f"everlift_{name}_count") == 4
    # One sample for each delivery but the first one; a delivery has at least one token.
    assert 0 < samples["everlift_inter_token_latency_seconds_count", "priority=2"] < 30
    assert samples["everlift_leading",] == samples["everlift_leader_changes_total",] == 1
    assert samples["everlift_ledger_call_seconds_count", "operation=open"] == 4
    assert samples["everlift_workers",] == samples["everlift_router_workers",] == 2
    assert samples.values("everlift_worker_slots", "worker_id") == dict.fromkeys(workers, 256)
    assert samples.total("everlift_worker_output_tokens_total") >= num_tokens


async def test_worker_metrics_are_split_by_part() -> None:
    async with cluster(workers=1) as parts:
        async with AsyncClient(parts.address) as client:
            await receive(client, [7] * 64, 40)
            await receive(client, [7] * 64, 40)
        await until(lambda: parts.routers[0]._sessions.links[0].state.num_running == 0)
        samples = (await scraped(parts.routers[0].metrics_address)).samples
    blocks = samples.values("everlift_worker_kv_blocks", "state")
    # 104 tokens, the last one of which is not computed: three full blocks of 32, and the rest.
    assert blocks == {"used": 0, "cached": 3, "free": 253}
    # The last prompt token must be computed, and with it its whole block.
    assert samples.total("everlift_worker_prefix_hit_tokens_total") == 32
    parts_s = samples.values("everlift_worker_step_seconds_total", "part")
    assert parts_s["model"] > 0.1 > 0 == parts_s["sample"]
    assert 0 < parts_s["schedule"] and 0 < parts_s["commit"]
    assert sum(parts_s.values()) < samples.total("everlift_worker_busy_seconds_total")
    assert samples.total("everlift_worker_slot_steps_total") == 80


async def test_tenant_metrics_count_each_prompt_once(tmp_path: Path) -> None:
    keyring = Keyring(tmp_path / "keys.yaml")
    keys = {tenant: await keyring.key(tenant) for tenant in ("acme", "other")}
    config = replace(ROUTER, access="file", access_file=str(keyring.path))
    usages: dict[str, list[Usage]] = {tenant: [] for tenant in keys}
    async with cluster(1, 1, config) as parts:
        for tenant, key in keys.items():
            async with AsyncClient(parts.address, api_key=key) as client:
                for choices in (1, 2) if tenant == "acme" else (1,):
                    async with client.generate([7] * 300, max_tokens=3, n=choices) as stream:
                        async for _ in stream:
                            pass
                    assert stream.usage is not None
                    usages[tenant].append(stream.usage)
        samples = (await scraped(parts.routers[0].metrics_address)).samples
    prompts = samples.values("everlift_tenant_prompt_tokens_total", "tenant")
    hits = samples.values("everlift_tenant_prefix_hit_tokens_total", "tenant")
    assert prompts == {"acme": 600, "other": 300}
    # Tenants share no block.
    assert hits == {"acme": 288, "other": 0}
    assert hits == {name: sum(it.cached_tokens for it in each) for name, each in usages.items()}


async def test_tenant_metrics_leave_later_attempts_out(tmp_path: Path) -> None:
    keyring = Keyring(tmp_path / "keys.yaml")
    key = await keyring.key("acme")
    config = replace(ROUTER, access="file", access_file=str(keyring.path))
    async with paced_cluster(router_config=config) as parts:
        async with AsyncClient(parts.address, api_key=key) as client:
            stream = client.generate([7] * 300, max_tokens=400)
            chunks = aiter(stream)
            await anext(chunks)
            await parts.add_worker()
            await parts.drain_worker(parts.workers[0])
            async for _ in chunks:
                pass
        samples = (await scraped(parts.routers[0].metrics_address)).samples
    assert samples["everlift_migrations_total",] == 1
    assert samples["everlift_tenant_prompt_tokens_total", "tenant=acme"] == 300


async def test_lost_worker_series_are_removed_and_loss_is_counted() -> None:
    async with cluster() as parts:
        await parts.drain_worker(parts.workers[0])
        await parts.add_worker()
        lost = parts.workers[0]
        await parts.kill_worker(lost)
        await until(lambda: parts.routers[0]._leader.num_losses)
        samples = (await scraped(parts.routers[0].metrics_address)).samples
        left = {rank.worker_id for rank in parts.workers}
    assert samples.values("everlift_worker_slots", "worker_id").keys() == left
    assert samples["everlift_worker_losses_total",] == 1


async def test_cluster_metrics_are_exported_by_leader_only() -> None:
    async with cluster(routers=2, router_config=LONG_LEASE) as parts:
        await until(lambda: any(router._leader.is_leading for router in parts.routers))
        everybody = [(await scraped(router.metrics_address)).samples for router in parts.routers]
        async with AsyncClient(parts.address) as client:
            await receive(client, [5], 3)
        leaders = [samples for samples in everybody if samples["everlift_leading",]]
        others = [samples for samples in everybody if not samples["everlift_leading",]]
    assert len(leaders) == len(others) == 1
    assert leaders[0]["everlift_workers",] == 2
    names = {name for name, *_ in others[0].by_labels}
    assert not {name for name in names if name.startswith("everlift_worker_")} - {
        "everlift_worker_losses_total"
    }
    assert "everlift_queue_requests" not in names


async def test_metrics_count_queue_full_rejections() -> None:
    config = replace(ROUTER, max_queued=1)
    async with cluster(workers=0, router_config=config) as parts:
        async with AsyncClient(parts.address, retry_s=0.0) as client:
            waits = asyncio.create_task(receive(client, [5], 3))
            await until(lambda: parts.routers[0]._leader_client.queued)
            with pytest.raises(QueueFull):
                await receive(client, [5], 3)
            samples = (await scraped(parts.routers[0].metrics_address)).samples
            await parts.add_worker()
            await waits
    assert samples["everlift_requests_total", "outcome=queue_full"] == 1
    assert samples.total("everlift_requests_total") == 1
    assert samples["everlift_queue_requests",] == 1


async def test_ttft_is_not_recorded_again_after_takeover() -> None:
    """The router that dies has delivered the first token, so the other one records no TTFT."""
    config = replace(ROUTER, lease=0.5, heartbeat=0.1)
    async with paced_cluster(routers=2, workers=2, router_config=config) as parts:
        async with AsyncClient([router.address for router in parts.routers]) as client:
            stream = client.generate([4, 4], max_tokens=100, temperature=0.0)
            chunks = aiter(stream)
            tokens = 0
            while not tokens:
                tokens += len((await anext(chunks)).token_ids)
            # The client continues at the other router.
            dying = next(router for router in parts.routers if len(router._requests))
            await parts.kill_router(dying)
            async for chunk in chunks:
                tokens += len(chunk.token_ids)
            samples = (await scraped(parts.routers[0].metrics_address)).samples
    assert tokens == 100
    assert samples["everlift_requests_total", "outcome=ok"] == 1
    assert samples.total("everlift_time_to_first_token_seconds_count") == 0
    assert samples["everlift_requests_accepted_total",] == 0


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        ("GET /metrics HTTP/1.1", 200),
        ("GET /metrics?name=x HTTP/1.0", 200),
        ("GET / HTTP/1.1", 404),
        ("POST /metrics HTTP/1.1", 405),
        ("nonsense", 404),
        ("GET /metrics HTTP/1.1\r\nX: " + 9000 * "x", 431),
    ],
)
async def test_metrics_server_answers_other_requests_with_status(
    request_line: str, status: int
) -> None:
    async with cluster(workers=0) as parts:
        answer = await fetch(parts.routers[0].metrics_address, request_line)
    assert answer.startswith(f"HTTP/1.1 {status} ")


async def test_silent_metrics_connections_do_not_block_router_stop() -> None:
    async with cluster(workers=0) as parts:
        host, port = parts.routers[0].metrics_address.rsplit(":", 1)
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(20)]
        # Connections beyond the limit are closed.
        await until(lambda: any(reader.at_eof() for reader, _ in silent))
    for reader, writer in silent:
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()


async def test_metrics_stalled_reader_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    async def expose(accept: str) -> tuple[str, bytes]:
        # More than the kernel buffers for a connection.
        return PLAIN, bytes(16 << 20)

    monkeypatch.setattr(http_server, "_MOST_CONNECTIONS", 1)
    monkeypatch.setattr(http_server, "_TIMEOUT_S", 0.1)
    server = http_server.MetricsServer(CollectorRegistry())
    monkeypatch.setattr(server, "expose", expose)
    await server.start("127.0.0.1", 0)
    host, port = server.address.rsplit(":", 1)
    with socket.create_connection((host, int(port))) as stalled:
        stalled.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        await until(lambda: bool(server._answering))
        await until(lambda: not server._answering)
        monkeypatch.setattr(http_server, "_TIMEOUT_S", 30.0)
        assert (await fetch(server.address, "GET /live HTTP/1.1")).startswith("HTTP/1.1 200 ")
    await server.stop()


async def test_metrics_empty_host_disables_endpoint() -> None:
    async with cluster(workers=0, router_config=replace(ROUTER, metrics_host="")) as parts:
        assert parts.routers[0].metrics_address == ""
        async with AsyncClient(parts.address) as client:
            assert (await client.status()).metrics_address == ""


async def test_metrics_used_port_fails_router_start() -> None:
    async with cluster(workers=0) as parts:
        taken = int(parts.routers[0].metrics_address.rsplit(":", 1)[1])
        parts.router_config = replace(ROUTER, metrics_port=taken)
        with pytest.raises(OSError, match="address already in use"):
            await parts.add_router()


async def test_status_reports_metrics_address() -> None:
    async with cluster(workers=0) as parts, AsyncClient(parts.address) as client:
        assert (await client.status()).metrics_address == parts.routers[0].metrics_address


def test_metric_names_end_with_unit() -> None:
    for metric in CATALOGUE.values():
        stem = metric.name.removesuffix("_total")
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert metric.help.endswith("."), metric.name
        if metric.unit in ("seconds", "tokens", "ratio"):
            assert stem.endswith(metric.unit), metric.name
        assert bool(metric.buckets) == (metric.kind == "histogram"), metric.name
        assert list(metric.buckets) == sorted(set(metric.buckets)), metric.name


def test_metrics_readme_lists_catalogue() -> None:
    readme = (Path(__file__).parents[3] / "router/observability/metrics/README.md").read_text()
    listed = re.findall(r"^\| `everlift_[a-z_]+` .*$", readme, re.MULTILINE)
    assert listed == list(rows(CATALOGUE.values()))


def rows(metrics: Iterable[Metric]) -> Iterable[str]:
    for metric in metrics:
        labels = ", ".join(metric.labels)
        yield f"| `{metric.name}` | {metric.kind} | {metric.unit} | {labels} | {metric.help} |"


def test_samples_total_and_select_by_labels() -> None:
    samples = Samples({("a", "x=1"): 2.0, ("a", "x=2"): 3.0, ("b",): 1.0})
    assert samples.total("a") == 5.0
    assert samples.values("a", "x") == {"1": 2.0, "2": 3.0}
