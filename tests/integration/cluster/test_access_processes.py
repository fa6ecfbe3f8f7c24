"""A cluster of plain processes that requires API keys, operated by the command line."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from cluster.config import Config, load
from cluster.local.processes import ProcessCluster
from everlift import AsyncClient, EverliftError, Unauthenticated
from tests.support.commands import run
from tests.support.router.fronts import Fronts

SETTINGS = {
    "model": "fake",
    "log_level": "debug",
    "num_routers": 2,
    "router": {"port": 0, "http_port": 0, "drain": 0.2, "access": "ledger"},
    "worker": {"fake": {"step_time": 0.005}},
}
PROMPT, OUTPUT, SALT = "XYZZYPROMPT", "XYZZYOUTPUT", "XYZZYSALT"
TEXTS = {"regex": "(XYZZYREGEX", "json_schema": '{"type": "XYZZYSCHEMA"}', "ebnf": "XYZZYEBNF ::="}
#: Time for a created or revoked key to reach all routers, with a margin for a busy machine.
TIMEOUT_S = 20.0


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(SETTINGS | {"state_dir": str(tmp_path / "state")}))
    return path


@pytest.fixture
def config(file: Path) -> Config:
    return load(file, {})


@pytest.fixture
async def cluster(config: Config) -> AsyncIterator[ProcessCluster]:
    async with ProcessCluster(config) as cluster:
        yield cluster


async def come_in(cluster: ProcessCluster, key: str) -> None:
    """Wait until every router accepts the key."""
    for address in cluster.addresses:
        async with asyncio.timeout(TIMEOUT_S), AsyncClient(address, api_key=key) as client:
            while True:
                try:
                    await client.generate("x", max_tokens=1).text()
                    break
                except Unauthenticated:
                    await asyncio.sleep(0.05)


async def stay_out(cluster: ProcessCluster, key: str) -> None:
    """Wait until every router rejects the key."""
    for address in cluster.addresses:
        async with asyncio.timeout(TIMEOUT_S), AsyncClient(address, api_key=key) as client:
            with suppress(Unauthenticated):
                while True:
                    await client.generate("x", max_tokens=1).text()
                    await asyncio.sleep(0.05)


@pytest.mark.long
async def test_key_command_creates_lists_rotates_and_revokes_keys(
    cluster: ProcessCluster, file: Path
) -> None:
    async def key(*arguments: str, **environ: str) -> str:
        return (await run("key", *arguments, "--config", str(file), **environ)).strip()

    made = await key("create", "--tenant", "acme", "--name", "laptop", "--expires", "90d")
    await come_in(cluster, made)
    [listed] = json.loads(await key("list", "--json"))
    assert {name: listed[name] for name in ("tenant", "scopes", "name")} == {
        "tenant": "acme",
        "scopes": ["infer"],
        "name": "laptop",
    }
    assert made not in json.dumps(listed) and listed["id"] in made
    assert listed["id"] in await key("list")
    replaced = await key("rotate", listed["id"], "--overlap", "30m")
    await come_in(cluster, replaced)
    await come_in(cluster, made)
    await key("revoke", listed["id"])
    await stay_out(cluster, made)
    await come_in(cluster, replaced)


@pytest.mark.long
async def test_commands_send_the_api_key_of_the_environment(
    cluster: ProcessCluster, file: Path
) -> None:
    place = {"EVERLIFT_ADDRESS": ",".join(cluster.addresses)}
    said = await run("generate", "x", status=1, **place)
    assert "an API key is required" in said and "EVERLIFT_API_KEY" in said
    scopes = ["--scope", "infer", "--scope", "admin", "--scope", "metrics"]
    key = await run("key", "create", "--tenant", "ops", *scopes, "--config", str(file))
    place["EVERLIFT_API_KEY"] = key.strip()
    await come_in(cluster, key.strip())
    assert await run("generate", "x", "--max-tokens", "3", **place)
    assert "fake" in await run("status", **place)
    worker = cluster.workers[0].worker_id
    assert worker in await run("drain", worker[:6], "--wait", **place)


async def test_logs_and_metrics_contain_no_key_prompt_or_output(
    cluster: ProcessCluster, file: Path, config: Config
) -> None:
    keys = [
        (await run("key", "create", "--tenant", tenant, *scopes, "--config", str(file))).strip()
        for tenant, scopes in (
            ("acme", ()),
            ("other", ()),
            ("ops", ("--scope", "admin", "--scope", "metrics", "--scope", "infer")),
        )
    ]
    for key in keys:
        await come_in(cluster, key)
    await _everything(cluster, keys)
    await run("key", "revoke", keys[1].split("_")[1], "--config", str(file))
    await stay_out(cluster, keys[1])
    metrics = [await asyncio.to_thread(_read, it) for it in cluster.metrics_addresses]
    state = config.state_dir
    logs = [path for path in state.rglob("*") if path.suffix == ".log"]
    assert {path.name for path in logs} >= {"router-0.log", "router-1.log", "worker-0.log"}
    secrets = [part for key in keys for part in (key, key.split("_", 2)[2])]
    texts = {path.name: path.read_text() for path in logs} | {"metrics": "".join(metrics)}
    found = [
        (name, marker)
        for name, text in texts.items()
        for marker in (*secrets, "XYZZY", "xyzzy")
        if marker in text
    ]
    assert found == []
    # The tenant shows that these are the logs of the requests.
    assert '"tenant": "acme"' in texts["router-0.log"] + texts["router-1.log"]


async def _everything(cluster: ProcessCluster, keys: list[str]) -> None:
    """Send valid and invalid requests with markers in all their texts."""
    for key in (*keys, keys[0] + "XYZZY", "XYZZY"):
        async with AsyncClient(cluster.addresses, api_key=key, reconnect_s=5.0) as client:
            asked = [
                {"choice": [OUTPUT], "request_id": "chosen", "cache_salt": SALT},
                {"stop": ["XYZZYSTOP"], "max_tokens": 20, "n": 3, "logprobs": 2},
                {"request_id": "twice", "max_tokens": 5},
                {"request_id": "twice", "max_tokens": 6},
                {"model": "none"},
                {"max_tokens": 1 << 31},
                {"timeout_s": 0.05},
                *({name: text} for name, text in TEXTS.items()),
            ]
            for options in asked:
                with suppress(EverliftError):
                    await client.generate(PROMPT, **options).text()  # type: ignore[arg-type]
            with suppress(EverliftError):
                await client.generate(PROMPT * 5000).text()
            with suppress(EverliftError):
                await client.get_request("unknown")
        await _over_other_fronts(cluster, key)
    async with AsyncClient(cluster.addresses, api_key=keys[0]) as client:
        stream = client.generate(PROMPT, max_tokens=300)
        async with stream:
            await anext(aiter(stream))
            await cluster.restart_worker(0)
            await cluster.restart_router(0)
            async for _ in stream:
                pass


async def _over_other_fronts(cluster: ProcessCluster, key: str) -> None:
    fronts = Fronts(cluster.address, cluster.http_addresses[0], "fake")
    for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}):
        await fronts.completion(headers, prompt=PROMPT, stop=OUTPUT, user=SALT, max_tokens=2)
        await fronts.completion(headers, prompt=PROMPT, XYZZYFIELD=PROMPT)
        await fronts.completion(headers, prompt=PROMPT, structured_outputs={"choice": [OUTPUT]})
        await fronts.chat(headers, messages=[{"role": "user", "content": PROMPT}])
        for body in (b'{"prompt": "XYZZY', b'{"prompt": "XYZZY\xff"}', b"XYZZY"):
            await fronts.over_http("/v1/completions", body, headers)
        await fronts.kserve({"cache_salt": SALT, "max_tokens": 2}, PROMPT.encode(), headers)
        await fronts.kserve({"XYZZY": PROMPT}, PROMPT.encode() + b"\xff", headers)


def _read(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=TIMEOUT_S) as answer:
        return str(answer.read().decode())
