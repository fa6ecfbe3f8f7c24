"""Test of the whole product on a GPU without Ray: outputs must not change under disturbances.

    python benchmarks/gpu/gpu_product.py [--model DIR] [--requests 24] [--tokens 160] [--out FILE]

A router, the embedded ledger and one worker, as `everlift up --no-ray` starts them, serve greedy
requests in fp32 and in bf16. Each dtype has four phases:

    undisturbed   one request after the other
    load          Poisson arrivals
    killed        Poisson arrivals; the worker's process is killed, and restarted, when a third of
                  the tokens have come; up to TRIES times, until a request was migrated
    short         all requests at once, with too small a KV cache, so that some are preempted

Each token must be that of the undisturbed phase. Matrix products of different sizes round
differently, so in bf16 either of two almost equally probable tokens may be chosen. If the first
different token is one whose log probability in the undisturbed phase was within NEAR_TIE of the
best one's, the output counts as ``near_tie``. Any other difference is ``different``, and the exit
status is 1. If a phase raises an error, that is a fault, too; the other dtype still runs.

Without a GPU everything runs on the CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks import report
from cluster.config import DEMO_MODEL, load
from cluster.local.processes import ProcessCluster
from everlift import AsyncClient
from everlift.hashes import BLOCK_SIZE
from everlift.sampling import TokenLogprobs

PACKAGES = ("torch", "triton", "transformers", "grpcio")
DTYPES = ("float32", "bfloat16")
#: Largest difference between the log probabilities of tokens of a near tie, in bf16.
NEAR_TIE = 0.1
#: Mean seconds between two arrivals.
INTERVAL_S = 0.02
#: A fast device may end all requests before the client has received a third of the tokens.
TRIES = 3
TIMEOUT_S = 240.0


@dataclass
class Output:
    """Output of one request, and how often the request was migrated and preempted."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    migrations: int = 0
    preemptions: int = 0


@dataclass
class Phase:
    """Outputs of a phase, in the order of the requests, and its duration in seconds."""

    texts: list[Output]
    seconds: float

    def compared(self, with_: Phase, near: float) -> dict[str, Any]:
        """Return how many outputs are the same, near ties and different, and figures."""
        kinds = [
            compare(text, reference, near)
            for text, reference in zip(self.texts, with_.texts, strict=True)
        ]
        return {
            **{kind: kinds.count(kind) for kind in ("same", "near_tie", "different")},
            "tok_s": sum(len(text.tokens) for text in self.texts) / self.seconds,
            "migrations": sum(text.migrations for text in self.texts),
            "preemptions": sum(text.preemptions for text in self.texts),
        }


def compare(text: Output, reference: Output, near: float) -> str:
    """Return how ``text`` relates to the ``reference``: "same", "near_tie" or "different"."""
    if text.tokens == reference.tokens:
        return "same"
    pairs = zip(text.tokens, reference.tokens, strict=False)
    first = next((i for i, (token, other) in enumerate(pairs) if token != other), None)
    if first is None:
        return "different"
    best, *others = reference.logprobs[first].top
    close = [token for token, logprob in others if best[1] - logprob <= near]
    return "near_tie" if text.tokens[first] in close else "different"


class Load:
    """Requests of a phase, and the number of output tokens that have come."""

    def __init__(self, prompts: Sequence[str], max_tokens: int) -> None:
        self._prompts = prompts
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._third_received = asyncio.Event()

    async def one_by_one(self, client: AsyncClient) -> Phase:
        began = time.monotonic()
        texts = [await self._generate(client, prompt) for prompt in self._prompts]
        return Phase(texts, time.monotonic() - began)

    async def at_once(self, client: AsyncClient) -> Phase:
        began = time.monotonic()
        texts = await asyncio.gather(*(self._generate(client, prompt) for prompt in self._prompts))
        return Phase(texts, time.monotonic() - began)

    async def at_random(
        self, client: AsyncClient, disturb: Callable[[], None] | None = None
    ) -> Phase:
        """Send the requests with Poisson arrivals.

        Call ``disturb`` once a third of the output tokens have come.
        """
        self._num_tokens, began, rng = 0, time.monotonic(), Random(3)
        self._third_received.clear()
        async with asyncio.TaskGroup() as group:
            if disturb is not None:
                group.create_task(self._disturb_at_third(disturb))
            asked = []
            for prompt in self._prompts:
                asked.append(group.create_task(self._generate(client, prompt)))
                await asyncio.sleep(rng.expovariate(1 / INTERVAL_S))
        return Phase([task.result() for task in asked], time.monotonic() - began)

    async def _disturb_at_third(self, disturb: Callable[[], None]) -> None:
        await self._third_received.wait()
        disturb()

    async def _generate(self, client: AsyncClient, prompt: str) -> Output:
        text = Output()
        stream = client.generate(
            prompt,
            temperature=0.0,
            max_tokens=self._max_tokens,
            ignore_eos=True,
            logprobs=2,
            timeout_s=TIMEOUT_S,
        )
        async for chunk in stream:
            text.tokens += chunk.token_ids
            text.logprobs += chunk.logprobs
            self._count(len(chunk.token_ids))
        assert stream.timing is not None
        text.migrations = stream.timing.migrations
        text.preemptions = stream.timing.preemptions
        return text

    def _count(self, tokens: int) -> None:
        self._num_tokens += tokens
        if 3 * self._num_tokens > len(self._prompts) * self._max_tokens:
            self._third_received.set()


@asynccontextmanager
async def serving(
    model: Path, dtype: str, num_blocks: int
) -> AsyncIterator[tuple[ProcessCluster, AsyncClient]]:
    with TemporaryDirectory() as directory:
        settings = [
            f"model={model}",
            f"state_dir={directory}",
            "router.port=0",
            "router.http_port=0",
            f"worker.dtype={dtype}",
            f"worker.num_blocks={num_blocks}",
        ]
        async with (
            ProcessCluster(load(None, {}, settings), revive=True) as cluster,
            AsyncClient(cluster.addresses) as client,
        ):
            yield cluster, client


async def phases(options: argparse.Namespace, dtype: str) -> AsyncIterator[tuple[str, Phase]]:
    """Run the four phases with one dtype and yield their names and results, undisturbed first.

    The fourth phase has KV blocks for only two of the longest requests.
    """
    load_ = Load(prompts(options.requests), options.tokens)
    longest = max(map(len, prompts(options.requests))) + options.tokens
    plenty, few = (n * -(-longest // BLOCK_SIZE) + 2 for n in (options.requests, 2))
    async with serving(options.model, dtype, plenty) as (cluster, client):
        yield "undisturbed", await load_.one_by_one(client)
        yield "load", await load_.at_random(client)
        for _ in range(TRIES):
            killed = await load_.at_random(client, lambda: kill(cluster))
            if any(text.migrations for text in killed.texts):
                break
        yield "killed", killed
    async with serving(options.model, dtype, few) as (_, client):
        yield "short", await load_.at_once(client)


def kill(cluster: ProcessCluster) -> None:
    """Kill the processes of the only worker."""
    for pid in cluster.workers[0].pids:
        os.kill(pid, signal.SIGKILL)


def prompts(count: int) -> list[str]:
    """Return ``count`` different prompts of a kind that the demo model was trained on."""
    return [f"count from {n} to {n + 90}:" for n in range(3, 3 + 7 * count, 7)]


@dataclass
class Results:
    """Figures by dtype and phase, and by dtype the error that ended its phases early."""

    raw: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


async def run_all(options: argparse.Namespace) -> Results:
    results = Results()
    for dtype in DTYPES:
        results.raw[dtype] = {}
        try:
            await _run_dtype(options, dtype, results.raw[dtype])
        except Exception as error:
            results.failed[dtype] = repr(error)
    return results


async def _run_dtype(options: argparse.Namespace, dtype: str, by_phase: dict[str, Any]) -> None:
    near, undisturbed = NEAR_TIE if dtype == "bfloat16" else 0.0, None
    async for name, phase in phases(options, dtype):
        undisturbed = undisturbed or phase
        by_phase[name] = phase.compared(undisturbed, near)
        print(dtype, name, by_phase[name], flush=True)


def faults(results: Results) -> Iterator[str]:
    """Yield each fault: an error, a different output, or a disturbance without effect."""
    for dtype, cause in results.failed.items():
        yield f"{dtype}: {cause}"
    for dtype, by_phase in results.raw.items():
        for name, phase in by_phase.items():
            if phase["different"]:
                yield f"{dtype}, {name}: {phase['different']} texts differ"
        if "killed" in by_phase and not by_phase["killed"]["migrations"]:
            yield f"{dtype}: no request was migrated when the worker was killed"
        if "short" in by_phase and not by_phase["short"]["preemptions"]:
            yield f"{dtype}: no request was preempted"


def main() -> None:
    options = _options()
    results = asyncio.run(run_all(options))
    wrong = [*faults(results)]
    report.write(
        options.out,
        packages=PACKAGES,
        settings={
            "model": options.model.name,
            "requests": options.requests,
            "tokens": options.tokens,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
            "wrong": wrong,
        },
        raw=results.raw,
        ratios={
            f"{dtype}_{name}_same": phase["same"] / options.requests
            for dtype, by_phase in results.raw.items()
            for name, phase in by_phase.items()
        },
    )
    if wrong:
        sys.exit("\n".join(wrong))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The whole product on a GPU, disturbed.")
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--out", type=Path, default=Path("build/bench/gpu_product.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
