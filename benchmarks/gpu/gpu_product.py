"""The whole product on a GPU without Ray: does each disturbance leave every text as it was?

    python benchmarks/gpu/gpu_product.py [--model DIR] [--requests 24] [--tokens 160] [--out FILE]

What `everlift up --no-ray` starts, a router, the embedded ledger and one worker, serves greedy
requests in fp32 and in bf16: one after the other, undisturbed; then all of them under load, coming
at random; the same while the worker's process is killed in the middle, and started again, up to
TRIES times if nobody was there to be moved; and, all at once, from a KV cache in which they do not
fit, so that some are preempted. Each token must be the undisturbed one's.

Products of other sizes round otherwise, so that in bf16 one of two tokens that are nearly as
probable may win now and the other then: a text that departs where the undisturbed run had both
within NEAR is a near tie, and counts as one. What remains is ``different``, and the exit status
is 1. Nothing of this is measured at fixed times: a disturbance comes when a third of the tokens are
there. What breaks off a type's phases costs the others nothing, and is among the faults.

Without a GPU it runs on the CPU, and shows that it runs.
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
#: Between the log probabilities of two tokens, in bf16.
NEAR = 0.1
#: A request, on the average: a second's worth of steps of a small model on any GPU.
INTERVAL_S = 0.02
#: What a fast device makes may all be there before a client has seen a third of it.
TRIES = 3
TIMEOUT_S = 240.0


@dataclass
class Text:
    """What came of one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    migrations: int = 0
    preemptions: int = 0


@dataclass
class Phase:
    """``texts`` by request."""

    texts: list[Text]
    seconds: float

    def compared(self, with_: Phase, near: float) -> dict[str, Any]:
        kinds = [
            compare(text, right, near) for text, right in zip(self.texts, with_.texts, strict=True)
        ]
        return {
            **{kind: kinds.count(kind) for kind in ("same", "near_tie", "different")},
            "tok_s": sum(len(text.tokens) for text in self.texts) / self.seconds,
            "migrations": sum(text.migrations for text in self.texts),
            "preemptions": sum(text.preemptions for text in self.texts),
        }


def compare(text: Text, right: Text, near: float) -> str:
    """ "same", "near_tie" or "different"."""
    if text.tokens == right.tokens:
        return "same"
    pairs = zip(text.tokens, right.tokens, strict=False)
    first = next((i for i, (token, other) in enumerate(pairs) if token != other), None)
    if first is None:
        return "different"
    best, *others = right.logprobs[first].top
    close = [token for token, logprob in others if best[1] - logprob <= near]
    return "near_tie" if text.tokens[first] in close else "different"


class Load:
    """The requests, and how many of their tokens have come in this phase."""

    def __init__(self, prompts: Sequence[str], max_tokens: int) -> None:
        self._prompts = prompts
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._is_far = asyncio.Event()

    async def one_by_one(self, client: AsyncClient) -> Phase:
        began = time.monotonic()
        texts = [await self._ask(client, prompt) for prompt in self._prompts]
        return Phase(texts, time.monotonic() - began)

    async def at_once(self, client: AsyncClient) -> Phase:
        began = time.monotonic()
        texts = await asyncio.gather(*(self._ask(client, prompt) for prompt in self._prompts))
        return Phase(texts, time.monotonic() - began)

    async def at_random(
        self, client: AsyncClient, disturb: Callable[[], None] | None = None
    ) -> Phase:
        self._num_tokens, began, rng = 0, time.monotonic(), Random(3)
        self._is_far.clear()
        async with asyncio.TaskGroup() as group:
            if disturb is not None:
                group.create_task(self._when_far(disturb))
            asked = []
            for prompt in self._prompts:
                asked.append(group.create_task(self._ask(client, prompt)))
                await asyncio.sleep(rng.expovariate(1 / INTERVAL_S))
        return Phase([task.result() for task in asked], time.monotonic() - began)

    async def _when_far(self, disturb: Callable[[], None]) -> None:
        await self._is_far.wait()
        disturb()

    async def _ask(self, client: AsyncClient, prompt: str) -> Text:
        text = Text()
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
            self._is_far.set()


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
    """First the undisturbed one."""
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
    for pid in cluster.workers[0].pids:
        os.kill(pid, signal.SIGKILL)


def prompts(count: int) -> list[str]:
    """What the demo model was trained to go on with, and no two alike."""
    return [f"count from {n} to {n + 90}:" for n in range(3, 3 + 7 * count, 7)]


@dataclass
class Found:
    """By dtype, what became of each phase, and why some are missing."""

    raw: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


async def found(options: argparse.Namespace) -> Found:
    all_ = Found()
    for dtype in DTYPES:
        all_.raw[dtype] = {}
        try:
            await _find(options, dtype, all_.raw[dtype])
        except Exception as error:
            all_.failed[dtype] = repr(error)
    return all_


async def _find(options: argparse.Namespace, dtype: str, by_phase: dict[str, Any]) -> None:
    near, undisturbed = NEAR if dtype == "bfloat16" else 0.0, None
    async for name, phase in phases(options, dtype):
        undisturbed = undisturbed or phase
        by_phase[name] = phase.compared(undisturbed, near)
        print(dtype, name, by_phase[name], flush=True)


def faults(found: Found) -> Iterator[str]:
    """What is not as it has to be: also a disturbance that disturbed nobody."""
    for dtype, cause in found.failed.items():
        yield f"{dtype}: {cause}"
    for dtype, by_phase in found.raw.items():
        for name, phase in by_phase.items():
            if phase["different"]:
                yield f"{dtype}, {name}: {phase['different']} texts differ"
        if "killed" in by_phase and not by_phase["killed"]["migrations"]:
            yield f"{dtype}: nobody was moved when the worker was killed"
        if "short" in by_phase and not by_phase["short"]["preemptions"]:
            yield f"{dtype}: nobody was preempted"


def main() -> None:
    options = _options()
    all_ = asyncio.run(found(options))
    wrong = [*faults(all_)]
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
        raw=all_.raw,
        ratios={
            f"{dtype}_{name}_same": phase["same"] / options.requests
            for dtype, by_phase in all_.raw.items()
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
