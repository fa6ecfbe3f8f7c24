"""Delay of a router's other streams by prompts of 200,000 tokens.

    python benchmarks/long_prompt.py [--rounds 5] [--seconds 8] [--out build/bench/long_prompt.json]

A router with SmolLM2's tokenizer and chat template is a process of its own, with an embedded ledger
(everysec) and a worker that computes nothing. 50 streams receive a token each every 25 ms. In every
second window, another process also sends a chat of 100 messages and 200,000 tokens once a second.
All of them need two cores without other work.

``long_prompt_itl_p99`` is the 99th percentile of the streams' inter-token times in all windows with
these chats, divided by that in all windows without them. One window, of 320 steps, is too short
for this percentile. The raw figures include the longest stall of the router's event loop.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import grpc
import uvloop

from benchmarks import report
from benchmarks.child import Child, child
from benchmarks.noop_worker import TokenPacing, noop_worker
from everlift import heap, model_files
from everlift.channels import CLIENT_OPTIONS
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import inference_pb2_grpc
from router.config import RouterConfig
from router.ledger.config import LedgerConfig
from router.ledger.redis.redis_ledger import connect
from router.requests.tokenizer import HuggingFaceTokenizer
from router.router import Router
from tests.support.ledger.ledgers import valkey_server
from tests.support.router.http_client import JSON, ask

MODEL = "smollm2"
CONFIG = RouterConfig(model=MODEL, port=0, http_port=0, worker_silence=5.0)
STREAMS, PACE_S = 50, 0.025
PROMPT_TOKENS, MESSAGES = 200_000, 100
#: Seconds between the begins of two long chats.
EVERY_S = 1.0
#: Seconds between two samples of the event loop's lag.
_TICK_S = 0.001
#: First seconds of a window, in which its streams begin; they are not counted.
_WARM_UP_S = 1.0

Figures = dict[str, float]


# the router's process


def _serve(ledger: LedgerConfig, pipe: Connection) -> None:
    uvloop.run(_run(ledger, pipe))


async def _run(ledger: LedgerConfig, pipe: Connection) -> None:
    """Run a router; answer each message with the stalls since the last one, until the pipe ends."""
    router = await Router.start(CONFIG, await connect(ledger))
    heap.freeze_heap()
    pipe.send((router.address, router.internal_address, router.http_address))
    stalls: list[float] = []
    watching = asyncio.create_task(_watch(stalls))
    try:
        while True:
            await asyncio.to_thread(pipe.recv)
            pipe.send(stalls[:])
            stalls.clear()
    except EOFError:
        watching.cancel()
        await router.stop()


async def _watch(stalls: list[float]) -> None:
    # Reading a file here would release the GIL, and a thread with a long prompt could take it.
    while True:
        begin = time.perf_counter()
        await asyncio.sleep(_TICK_S)
        stalls.append(time.perf_counter() - begin - _TICK_S)


@dataclass(frozen=True)
class MeasuredRouter:
    address: str
    internal_address: str
    http_address: str
    child: Child

    def stalls(self) -> list[float]:
        self.child.pipe.send(None)
        return list(self.child.pipe.recv())


@contextmanager
def router_process(ledger: LedgerConfig) -> Iterator[MeasuredRouter]:
    with child(_serve, ledger) as process:
        address, internal_address, http_address = process.pipe.recv()
        yield MeasuredRouter(address, internal_address, http_address, process)


# the long chats


def chat(tokenizer: HuggingFaceTokenizer, num_tokens: int, seed: int) -> list[dict[str, str]]:
    """Return messages of frequent words with about ``num_tokens`` tokens in total."""
    dice = random.Random(seed)
    strings = [tokenizer.token_string(token) or "" for token in range(300, 4000)]
    words = [word[1:] for word in strings if word[0] == "Ġ" and word[1:].isalpha()]
    each = num_tokens // MESSAGES - 5
    return [
        {
            "role": ("user", "assistant")[place % 2],
            "content": " ".join(dice.choices(words, k=each)),
        }
        for place in range(MESSAGES - 1)
    ]


def _send_chats(address: str, pipe: Connection) -> None:
    """Send long chats while the last message was True; answer False with the seconds of each."""
    tokenizer = HuggingFaceTokenizer(
        model_files.locate(MODEL, "", weights=False) / "tokenizer.json"
    )
    messages = chat(tokenizer, PROMPT_TOKENS, seed=1)
    pipe.send(None)
    asyncio.run(_chats(address, messages, pipe))


async def _chats(address: str, messages: list[dict[str, str]], pipe: Connection) -> None:
    seconds: list[float] = []

    async def send(number: int) -> None:
        # The first message differs, so that the prompt has no prefix-cache hits.
        first = {**messages[0], "content": f"{number} {messages[0]['content']}"}
        body = json.dumps({"messages": [first, *messages[1:]], "max_tokens": 1}).encode()
        begin = time.perf_counter()
        answer = await ask(address, "/v1/chat/completions", body, JSON)
        assert answer.status == 200, answer.body
        assert answer.json["usage"]["prompt_tokens"] > 0.95 * PROMPT_TOKENS
        seconds.append(time.perf_counter() - begin)

    number = 0
    try:
        while await asyncio.to_thread(pipe.recv):
            sending: list[asyncio.Task[None]] = []
            while not pipe.poll():
                number += 1
                sending.append(asyncio.create_task(send(number)))
                await asyncio.sleep(EVERY_S)
            await asyncio.gather(*sending)
            pipe.recv()
            pipe.send(seconds[:])
            seconds.clear()
    except EOFError:
        pass


# the streams


async def _gaps(
    stub: inference_pb2_grpc.InferenceAsyncStub, num_tokens: int, since: float
) -> list[float]:
    """Return the seconds between consecutive tokens of a stream that came after ``since``."""
    request = pb.GenerateRequest(tokens=pb.TokenIds(ids=[1]), max_tokens=num_tokens)
    gaps: list[float] = []
    last = 0.0
    async for piece in stub.Generate(request):
        if not piece.token_ids:
            continue
        at = time.perf_counter()
        if last > since:
            gaps += [at - last, *[0.0] * (len(piece.token_ids) - 1)]
        last = at
    return gaps


class Window(NamedTuple):
    """Seconds between tokens, seconds of the event loop's stalls, and latencies of long chats."""

    gaps: list[float]
    stalls: list[float]
    answered: list[float]

    @property
    def figures(self) -> Figures:
        percentiles = statistics.quantiles(self.gaps, n=1000)
        return {
            "itl_p50_ms": percentiles[499] * 1e3,
            "itl_p99_ms": percentiles[989] * 1e3,
            "itl_p999_ms": percentiles[998] * 1e3,
            "itl_max_ms": max(self.gaps) * 1e3,
            "longest_stall_ms": max(self.stalls) * 1e3,
            "stalls_above_2_ms": float(sum(it > 2e-3 for it in self.stalls)),
            "long_chats": float(len(self.answered)),
            "long_chat_s": statistics.median(self.answered) if self.answered else 0.0,
        }


async def window(router: MeasuredRouter, sender: Child, seconds: float, *, is_long: bool) -> Window:
    num_tokens = round((seconds + _WARM_UP_S) / PACE_S)
    async with grpc.aio.insecure_channel(router.address, options=CLIENT_OPTIONS) as channel:
        stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
        since = time.perf_counter() + _WARM_UP_S
        reading = asyncio.gather(*(_gaps(stub, num_tokens, since) for _ in range(STREAMS)))
        await asyncio.sleep(_WARM_UP_S)
        router.stalls()
        if is_long:
            sender.pipe.send(True)
        gaps = [gap for each in await reading for gap in each]
    stalls = router.stalls()
    answered: list[float] = []
    if is_long:
        sender.pipe.send(False)
        answered = await asyncio.to_thread(sender.pipe.recv)
    return Window(gaps, stalls, answered)


async def measure(url: str, rounds: int, seconds: float) -> list[tuple[Window, Window]]:
    """Return the windows without and with long chats, of each round."""
    with (
        router_process(LedgerConfig(url=url)) as router,
        child(_send_chats, router.http_address) as sender,
    ):
        sender.pipe.recv()
        found = []
        async with noop_worker(router.internal_address, TokenPacing(PACE_S, 1, 1), MODEL):
            for turn in range(rounds + 1):
                without = await window(router, sender, seconds, is_long=False)
                beside = await window(router, sender, seconds, is_long=True)
                if turn:
                    found.append((without, beside))
                    print(json.dumps(_round(without, beside)), flush=True)
        return found


def _round(without: Window, beside: Window) -> dict[str, Figures]:
    return {"without": without.figures, "with": beside.figures}


def ratios(found: list[tuple[Window, Window]]) -> Figures:
    without, beside = (
        _p99([gap for it in each for gap in it.gaps]) for each in zip(*found, strict=True)
    )
    return {"long_prompt_itl_p99": beside / without}


def _p99(gaps: list[float]) -> float:
    return statistics.quantiles(gaps, n=100)[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds of a window")
    parser.add_argument("--out", type=Path, default=Path("build/bench/long_prompt.json"))
    options = parser.parse_args()
    with valkey_server() as url:
        found = asyncio.run(measure(url, options.rounds, options.seconds))
    report.write(
        options.out,
        packages=["tokenizers", "protobuf", "uvloop", "redis"],
        settings={"streams": STREAMS, "pace_s": PACE_S, "prompt_tokens": PROMPT_TOKENS},
        raw={"rounds": [_round(*it) for it in found]},
        ratios=ratios(found),
    )


if __name__ == "__main__":
    main()
