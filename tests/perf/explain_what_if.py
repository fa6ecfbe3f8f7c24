"""How far what-ifs of a request are from what was, for bench-explain: a cluster of plain processes,
two workers of six slots with the smallest checkpoint, whose steps take 1 ms, so that what routers
and ledger take is much of the time.

Requests come at four rates, below and above what the workers can do. Of each load the simulation of
what was is off by a part of what each request took, at the median: it stands below the estimates
that a user asks for, and is told with them.

what_if_error    the median over the loads
"""

from __future__ import annotations

import asyncio
import statistics
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from cluster.config import Config, load
from cluster.processes import ProcessCluster
from everlift.client import AsyncClient
from tests.in_process import receive
from tests.perf import checkpoints
from tests.perf.explain_account import Measured

_RATES, _SECONDS = (15.0, 30.0, 45.0, 60.0), 4.0
_POLICIES = ["shortest", "hrrn"]
_LONGEST_PROMPT, _LONGEST_OUTPUT = 100, 200


def measure() -> Measured:
    model = checkpoints.ensure("tiny")
    with TemporaryDirectory(prefix="everlift-what-if-") as directory:
        loads = asyncio.run(_measured(_config(model, Path(directory))))
    return Measured(
        settings={"rates": _RATES, "seconds": _SECONDS, "policies": _POLICIES},
        raw={"loads": loads},
        ratios={"what_if_error": statistics.median(it["error"] for it in loads)},
    )


def _config(model: Path, directory: Path) -> Config:
    settings = (
        *(f"model={model}", f"state_dir={directory}", "num_workers=2"),
        *("worker.max_num_seqs=6", "worker.num_threads=1"),
        *("router.port=0", "router.http_port=0", "router.what_if_timeout=120"),
    )
    return load(None, {}, settings)


async def _measured(config: Config) -> list[dict[str, float]]:
    async with ProcessCluster(config) as parts, AsyncClient(parts.address) as client:
        while not any(kind.HasField("step_time") for kind in (await client.capacity()).kinds):
            await _forget(client, await _sent(client, "warm-up", _RATES[0], 0))
        return [await _error(client, rate, seed) for seed, rate in enumerate(_RATES, 1)]


async def _error(client: AsyncClient, rate: float, seed: int) -> dict[str, float]:
    """Of this load alone: who came before is forgotten."""
    names = await _sent(client, f"load-{seed}", rate, seed)
    told = (await client.explain(names[-1], what_if=_POLICIES)).counterfactuals
    await _forget(client, names)
    causes = [it.cause for it in told if it.cause]
    assert not causes, causes
    return {"rate": rate, "requests": told[0].requests, "error": told[0].error}


async def _sent(client: AsyncClient, name: str, rate: float, seed: int) -> list[str]:
    dice, asked, names = Random(seed), [], list[str]()
    for number in range(round(rate * _SECONDS)):
        names.append(f"{name}-{number}")
        prompt = [dice.randrange(256) for _ in range(dice.randint(1, _LONGEST_PROMPT))]
        length = dice.randint(1, _LONGEST_OUTPUT)
        one = receive(client, prompt, length, request_id=names[-1])
        asked.append(asyncio.create_task(one))
        await asyncio.sleep(dice.expovariate(rate))
    await asyncio.gather(*asked)
    return names


async def _forget(client: AsyncClient, names: list[str]) -> None:
    for name in names:
        await client.forget(name)
